"""Reports are numbered without a gap, kept until acknowledged, and only what may be dropped is."""

from hypothesis import given
from hypothesis import strategies as st

from phalanx.agent.outbox import Outbox, Waiting


def kept(item, job="a", attempt=1):
    return Waiting(job, attempt, item, is_batched=False)


def record(item, job="a", attempt=1, droppable=True):
    return Waiting(job, attempt, item, is_droppable=droppable)


def drained(outbox):
    """Every report, with acknowledgements as they come."""
    reports = []
    while (report := outbox.next_report()) is not None:
        reports.append(report)
        outbox.acknowledge(report.number)
    return reports


def test_outbox_neighbours_of_one_attempt_share_a_report_up_to_its_size():
    outbox = Outbox(max_batch=3)
    for number in range(4):
        outbox.put(record(number))
    outbox.put(record(9, attempt=2))
    assert [report.items for report in drained(outbox)] == [(0, 1, 2), (3,), (9,)]


def test_outbox_what_is_not_batched_has_a_report_of_its_own():
    outbox = Outbox()
    for waiting in (record(1), kept("end"), record(2)):
        outbox.put(waiting)
    assert [report.items for report in drained(outbox)] == [(1,), ("end",), (2,)]


def test_outbox_too_much_unacknowledged_holds_new_reports_back():
    outbox = Outbox(max_unacknowledged=1, max_batch=1)
    outbox.put(record(1))
    outbox.put(record(2))
    first = outbox.next_report()
    assert outbox.next_report() is None and outbox.unacknowledged == (first,)
    outbox.acknowledge(first.number)
    assert outbox.next_report().items == (2,)


def test_outbox_overflow_drops_the_oldest_droppable_alone():
    outbox = Outbox(max_waiting=2)
    for waiting in (kept("exit"), record(1), record(2), record("commit", droppable=False), record(3)):
        outbox.put(waiting)
    assert [item for report in drained(outbox) for item in report.items] == ["exit", 2, "commit", 3]
    assert outbox.num_dropped == 1


def test_outbox_acknowledgement_of_more_than_was_sent_frees_what_there_is():
    outbox = Outbox()
    outbox.put(record(1))
    report = outbox.next_report()
    assert outbox.acknowledge(99) == (report,) and outbox.is_empty


actions = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.booleans(), st.booleans(), st.integers(1, 2)),
        st.just(("send",)),
        st.tuples(st.just("acknowledge"), st.integers(0, 30)),
    ),
    max_size=80,
)


@given(actions, st.integers(0, 5), st.integers(1, 4), st.integers(1, 4))
def test_outbox_any_history_loses_only_counted_droppables_and_keeps_order(history, waiting, unacknowledged, batch):
    outbox = Outbox(max_waiting=waiting, max_unacknowledged=unacknowledged, max_batch=batch)
    put, sent = [], []
    for number, action in enumerate(history):
        match action:
            case ("put", batched, droppable, attempt):
                droppable = droppable and batched
                outbox.put(Waiting("j", attempt, number, is_batched=batched, is_droppable=droppable))
                put.append((number, droppable))
            case ("send",):
                if (report := outbox.next_report()) is not None:
                    sent.append(report)
            case ("acknowledge", upto):
                outbox.acknowledge(upto)
        assert len(outbox.unacknowledged) <= unacknowledged
    outbox.acknowledge(10**9)
    sent += drained(outbox)
    assert [report.number for report in sent] == list(range(1, len(sent) + 1))
    told = [item for report in sent for item in report.items]
    assert told == sorted(told)
    lost = {number for number, _ in put} - set(told)
    assert len(lost) == outbox.num_dropped
    assert all(droppable for number, droppable in put if number in lost)
    assert outbox.is_empty
