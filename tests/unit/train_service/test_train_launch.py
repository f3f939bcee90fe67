"""The launcher over agents: orders, answers, reports and their acknowledgement, without any stream."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from phalanx.api.agent.v1 import agent_service_pb2 as pb
from phalanx.api.agent.v1 import record_pb2
from phalanx.core.errors import OutsideError
from phalanx.lineage.events import Assignment
from phalanx.rpc import Unavailable
from phalanx.train.decide import Outcome
from phalanx.train.launch.agents import ANSWER_MARGIN_S, RETURN_S, START_DEADLINE_S, Agents, Session
from phalanx.train.launch.base import GangKey, Started, StartGang, To
from phalanx.train.shares import free_slots

JOB = "projects/default/jobs/tiny"
KEY = GangKey(JOB, 1)


class Kit:
    """A launcher, its clock, and what streams and listeners got."""

    def __init__(self) -> None:
        self.now_s, self.settled, self.broken = 0.0, set[GangKey](), False
        self.starting = set[GangKey]()
        self.told: list[tuple[str, GangKey, int]] = []
        self.num_changes = 0
        self.agents = Agents(
            self.on_records,
            lambda key: key in self.settled,
            lambda key: key in self.starting,
            self.on_change,
            clock=lambda: self.now_s,
        )

    def on_records(self, node_id: str, key: GangKey, records: Any) -> None:
        if self.broken:
            raise OutsideError("storage is away")
        self.told.append((node_id, key, len(records)))

    def on_change(self) -> None:
        self.num_changes += 1

    def connect(self, instance: str = "a", *gangs: pb.HeldGang) -> Stream:
        """A stream of node n1."""
        stream = Stream()
        hello = pb.Hello(node_id="n1", instance_id=instance, inventory=pb.Inventory(host="h", num_slots=2), gangs=gangs)
        self.agents.hello(hello, stream.session, 150.0)
        return stream

    def report(self, stream: Stream, number: int, **what: Any) -> None:
        report = pb.Report(number=number, job=JOB, attempt=1, **what)
        self.agents.reported("n1", stream.session, report)

    def records(self, stream: Stream, number: int) -> None:
        self.report(stream, number, records=pb.Records(records=[record_pb2.Record(rank=0)]))

    def end(self, stream: Stream, number: int, state: int = pb.GANG_STATE_FAILED) -> None:
        self.report(stream, number, gang_ended=pb.GangEnded(state=state))  # type: ignore[arg-type]

    def start(self, order: str = "o1", instance: str = "a") -> Any:
        gang = StartGang(KEY, Assignment("n1", (0, 1)), 2, {}, "", None, "token")
        return self.agents.start_gang(To("n1", instance), order, gang)


class Stream:
    """What was sent to an agent."""

    def __init__(self) -> None:
        self.sent: list[pb.ConnectResponse] = []
        self.is_closed = False
        self.session = Session(self.sent.append, self.close)

    def close(self) -> None:
        self.is_closed = True

    @property
    def orders(self) -> list[str]:
        return [each.order.id for each in self.sent if each.WhichOneof("message") == "order"]

    @property
    def acknowledged(self) -> int:
        numbers = [each.acknowledgement.number for each in self.sent if each.HasField("acknowledgement")]
        return max(numbers, default=0)


@pytest.fixture
def kit() -> Kit:
    return Kit()


def held(attempt: int = 1) -> pb.HeldGang:
    return pb.HeldGang(job=JOB, attempt=attempt, ranks=[0, 1], state=pb.GANG_STATE_RUNNING)


def test_hello_is_welcomed_and_the_node_is_known(kit: Kit) -> None:
    stream = kit.connect("a", held())
    assert stream.sent[0].welcome.lost_after.seconds == 150
    (node,) = kit.agents.nodes()
    assert (node.node_id, node.instance_id, node.is_connected) == ("n1", "a", True)
    assert node.holds(KEY)


def test_second_stream_ends_the_first_which_says_no_more(kit: Kit) -> None:
    first, second = kit.connect(), kit.connect()
    assert first.is_closed and not second.is_closed
    with pytest.raises(Unavailable):
        kit.records(first, 1)
    kit.agents.gone("n1", first.session)
    assert kit.agents.nodes()[0].is_connected, "the end of the old stream is not the new one's"


def test_node_is_silent_from_its_last_word(kit: Kit) -> None:
    stream = kit.connect()
    kit.now_s = 5.0
    kit.agents.heard("n1", stream.session, 7)
    kit.now_s = 8.0
    assert (kit.agents.nodes()[0].silent_s, kit.agents.nodes()[0].num_dropped_records) == (3.0, 7)
    kit.agents.gone("n1", stream.session)
    kit.now_s = 10.0
    assert (kit.agents.nodes()[0].is_connected, kit.agents.nodes()[0].silent_s) == (False, 2.0)


def test_records_are_acknowledged_once_they_are_taken(kit: Kit) -> None:
    stream = kit.connect()
    kit.records(stream, 1)
    assert (stream.acknowledged, len(kit.told)) == (1, 1)


def test_report_that_is_told_again_is_taken_once_and_acknowledged_again(kit: Kit) -> None:
    kit.records(kit.connect(), 1)
    again = kit.connect()
    kit.records(again, 1)
    assert (again.acknowledged, len(kit.told)) == (1, 1)


def test_records_that_cannot_be_kept_are_not_acknowledged(kit: Kit) -> None:
    stream = kit.connect()
    kit.broken = True
    with pytest.raises(OutsideError):
        kit.records(stream, 1)
    assert stream.acknowledged == 0
    kit.broken = False
    again = kit.connect()
    kit.records(again, 1)
    assert (again.acknowledged, len(kit.told)) == (1, 1)


def test_first_words_of_ranks_are_acknowledged_once_their_attempt_is_recorded_as_running(kit: Kit) -> None:
    kit.starting.add(KEY)
    stream = kit.connect("a", held())
    kit.records(stream, 1)
    assert (stream.acknowledged, len(kit.told)) == (0, 1)
    kit.starting.clear()
    kit.agents.settle_start(KEY)
    assert stream.acknowledged == 1
    kit.records(stream, 2)
    assert stream.acknowledged == 2


def test_end_of_a_gang_is_acknowledged_once_it_is_settled(kit: Kit) -> None:
    stream = kit.connect("a", held())
    kit.records(stream, 1)
    kit.end(stream, 2)
    kit.records(stream, 3)
    assert stream.acknowledged == 1
    assert kit.agents.ends(KEY)["n1"].outcome is Outcome.FAILED
    assert not kit.agents.nodes()[0].holds(KEY)
    kit.agents.settle(KEY)
    assert (stream.acknowledged, kit.agents.ends(KEY)) == (3, {})


def test_end_of_a_gang_that_is_settled_already_is_acknowledged_at_once(kit: Kit) -> None:
    kit.settled.add(KEY)
    stream = kit.connect("a", held())
    kit.end(stream, 1)
    assert (stream.acknowledged, kit.agents.ends(KEY)) == (1, {})


def test_new_process_of_an_agent_counts_its_reports_anew(kit: Kit) -> None:
    kit.records(kit.connect("a"), 5)
    stream = kit.connect("b")
    kit.records(stream, 1)
    assert (stream.acknowledged, len(kit.told)) == (1, 2)


def test_order_is_sent_once_and_again_on_a_new_stream(kit: Kit) -> None:
    first = kit.connect()
    assert (kit.start(), kit.start()) == (None, None)
    assert first.orders == ["o1"]
    second = kit.connect()
    assert second.orders == ["o1"]
    kit.agents.answered("n1", second.session, answer("o1"))
    assert kit.start() == Started("h:1")
    assert kit.connect("a", held()).orders == []


def answer(order: str) -> pb.Answer:
    return pb.Answer(order_id=order, gang_started=pb.GangStarted(rendezvous="h:1"))


def test_order_for_a_node_that_is_away_waits_for_it(kit: Kit) -> None:
    kit.agents.gone("n1", kit.connect().session)
    assert kit.start() is None
    assert kit.connect().orders == ["o1"]


def test_order_for_another_process_of_the_agent_is_refused(kit: Kit) -> None:
    kit.connect("a")
    kit.start()
    stream = kit.connect("b")
    assert stream.orders == []
    found = kit.agents.started("o1")
    assert found is not None and not isinstance(found, Started) and found.kind == "node_loss"
    kit.agents.answered("n1", stream.session, answer("o1"))
    assert not isinstance(kit.agents.started("o1"), Started)


def test_order_without_an_answer_fails_in_the_end(kit: Kit) -> None:
    kit.connect()
    kit.start()
    kit.now_s = START_DEADLINE_S + ANSWER_MARGIN_S
    found = kit.agents.started("o1")
    assert found is not None and not isinstance(found, Started) and "no answer" in found.message


def test_start_that_was_refused_has_its_cause(kit: Kit) -> None:
    stream = kit.connect()
    kit.start()
    failure = pb.Failure(cause=record_pb2.Cause(kind=record_pb2.CAUSE_KIND_OUT_OF_MEMORY, message="no slot"))
    kit.agents.answered("n1", stream.session, pb.Answer(order_id="o1", failure=failure))
    found = kit.agents.started("o1")
    assert found is not None and not isinstance(found, Started) and found.kind == "out_of_memory"


def test_gang_that_ended_before_its_start_was_answered_is_not_held(kit: Kit) -> None:
    stream = kit.connect()
    kit.start()
    kit.end(stream, 1)
    kit.agents.answered("n1", stream.session, answer("o1"))
    assert not kit.agents.nodes()[0].holds(KEY)


def test_answer_to_nothing_is_ignored(kit: Kit) -> None:
    stream = kit.connect()
    kit.agents.answered("n1", stream.session, answer("nothing"))
    assert not kit.agents.nodes()[0].gangs


def test_order_of_the_moment_that_is_not_answered_is_forgotten(kit: Kit) -> None:
    kit.connect()
    real = Agents(lambda *_: None, lambda key: True, lambda key: False, lambda: None)
    with pytest.raises(OutsideError, match="no answer within"):
        real.stacks(To("n1", "a"), KEY, (), 0.05)
    assert not real._orders


@pytest.mark.timeout(30)
def test_who_waits_for_an_agent_hears_soon_that_its_stream_has_broken(kit: Kit) -> None:
    stream = kit.connect()
    found: list[BaseException] = []

    def ask() -> None:
        try:
            kit.agents.store_shares(To("n1", "a"), KEY, 5, 3600.0, commit=False)
        except OutsideError as error:
            found.append(error)

    waiting = threading.Thread(target=ask)
    waiting.start()
    while not stream.orders:
        waiting.join(0.01)
    kit.agents.gone("n1", stream.session)
    kit.now_s += RETURN_S
    kit.connect("b").session.close()  # whatever wakes it
    waiting.join(20.0)
    assert not waiting.is_alive() and len(found) == 1


def test_agent_that_ends_has_no_free_slots_until_it_is_started_anew() -> None:
    kit = Kit()
    stream = kit.connect()
    assert free_slots(kit.agents.nodes(), ()) == {"n1": 2}
    kit.agents.heard("n1", stream.session, 0, is_ending=True)
    assert free_slots(kit.agents.nodes(), ()) == {"n1": 0}
    kit.agents.heard("n1", stream.session, 0)  # what follows may say nothing of it
    stream = kit.connect("a")
    assert free_slots(kit.agents.nodes(), ()) == {"n1": 0}
    kit.connect("b")
    assert free_slots(kit.agents.nodes(), ()) == {"n1": 2}
