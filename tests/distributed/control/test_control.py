"""What the loop may expect of its control, whoever keeps the run alive: one suite over storage and an agent."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from control_kit import BATCH, PATIENCE_S, AgentSide, Ranks, Side, StorageSide, draft
from support.jobs import wait_until

from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.lineage import CheckpointRef, DamagedObject
from phalanx.lineage.plan import HORIZON_STEPS, damaged_checkpoints
from phalanx.snapshot import load
from phalanx.trainer.control import Orders, Superseded


@pytest.fixture(params=[StorageSide, AgentSide], ids=["storage", "agent"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Side]]:
    """Makes the side that this test runs over."""
    made: list[Side] = []

    def make(**settings: float) -> Side:
        made.append(request.param(tmp_path, **settings))
        return made[-1]

    yield make
    for side in made:
        side.close()


@pytest.fixture
def side(make: Callable[..., Side]) -> Side:
    return make()


def opened(side: Side) -> Ranks:
    ranks = side.start()
    ranks.all(lambda control: control.open())
    return ranks


def committed(side: Side, ranks: Ranks, attempt: int, step: int) -> None:
    side.save(attempt, step)
    ranks.all(lambda control: control.commit(draft(attempt, step)).wait(PATIENCE_S))


def heard(ranks: Ranks, order: Orders) -> Orders:
    """What rank 0 takes from its control once it holds an order, taken at every step boundary as the loop does."""
    taken = Orders.NONE

    def take() -> bool:
        nonlocal taken
        taken |= ranks.controls[0].orders()
        return order in taken

    wait_until(take, PATIENCE_S, f"no {order!r}")
    return taken


def test_every_rank_opens_the_same_attempt_from_nothing(side: Side) -> None:
    openings = side.start().all(lambda control: control.open())
    assert openings[0] == openings[1]
    assert (openings[0].attempt, openings[0].parent, openings[0].plan.horizon_step) == (1, None, HORIZON_STEPS)


def test_next_attempt_goes_on_from_the_newest_checkpoint(side: Side) -> None:
    first = opened(side)
    for step in (2, 4):
        committed(side, first, 1, step)
    openings = side.start().all(lambda control: control.open())
    assert openings[0] == openings[1] and openings[0].attempt == 2
    parent = openings[0].parent
    assert parent is not None and parent.ref == CheckpointRef(1, 4) and parent.loader.position == 4 * BATCH
    assert parent.schedule == {"num_updates": 4, "loss_scale": 0.5}
    assert openings[0].plan.horizon_step == 4 + HORIZON_STEPS


def test_renewals_move_the_horizon_on_every_rank_alike(side: Side) -> None:
    ranks = opened(side)
    for step in (16, 32, 48):
        plans = ranks.all(lambda control, step=step: control.renew(step))  # type: ignore[misc]
        assert plans[0] == plans[1] and plans[0].horizon_step == step + HORIZON_STEPS


def test_windows_that_the_journal_takes_out_come_with_the_next_plan(side: Side) -> None:
    ranks = opened(side)
    before = ranks.all(lambda control: control.renew(16))[0]
    side.lineage.append_journal(1, "skip", 300, {"num_windows": 8})
    side.lineage.append_journal(1, "damage", 400, {"zero_weight": [[400, 402], [500, 501]]})
    after = ranks.all(lambda control: control.renew(32))
    assert before.zero_weight == () and after[0].zero_weight == ((300, 308), (400, 402), (500, 501))
    assert after[0] == after[1] and after[0].journal_digest != before.journal_digest


def test_stop_is_heard_and_stays(side: Side) -> None:
    ranks = opened(side)
    assert ranks.controls[0].orders() == Orders.NONE
    side.order(ranks, Orders.STOP)
    assert heard(ranks, Orders.STOP) == Orders.STOP
    assert ranks.controls[0].orders() == Orders.STOP and ranks.controls[1].orders() == Orders.NONE


def test_checkpoint_orders_are_obeyed_once_each(side: Side) -> None:
    ranks = opened(side)
    for _ in range(3):
        side.order(ranks, Orders.CHECKPOINT)
        assert heard(ranks, Orders.CHECKPOINT) == Orders.CHECKPOINT
        assert ranks.controls[0].orders() == Orders.NONE


@pytest.mark.parametrize(
    ("number", "order"),
    [(signal.SIGINT, Orders.STOP), (signal.SIGTERM, Orders.STOP), (signal.SIGUSR1, Orders.CHECKPOINT)],
)
def test_signal_to_any_rank_is_an_order(side: Side, number: signal.Signals, order: Orders) -> None:
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    ranks = opened(side)
    try:
        ranks.controls[1].listen()
        signal.raise_signal(number)
        assert (ranks.controls[1].orders(), ranks.controls[0].orders()) == (order, Orders.NONE)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def test_commit_waits_for_the_parts_of_all_ranks(side: Side) -> None:
    ranks = opened(side)
    side.save(1, 2, ranks=(0,))
    pending = [control.commit(draft(1, 2)) for control in ranks.controls]
    assert pending[1].done and not pending[0].done and side.lineage.checkpoints() == ()
    side.save(1, 2, ranks=(1,))
    pending[0].wait(PATIENCE_S)
    assert side.lineage.checkpoints() == (CheckpointRef(1, 2),)
    assert (load(side.store.url, 2)["model.weight"] == 2.0).all()
    assert ranks.of("committed") == [(0, {"attempt": 1, "step": 2})]


def test_commits_come_true_in_the_order_in_which_they_were_given(side: Side) -> None:
    ranks = opened(side)
    pending = [ranks.controls[0].commit(draft(1, step)) for step in (2, 4)]
    side.save(1, 4)
    assert not pending[1].done
    side.save(1, 2)
    for each in pending:
        each.wait(PATIENCE_S)
    assert [fields["step"] for _, fields in ranks.of("committed")] == [2, 4]
    assert side.lineage.checkpoints() == (CheckpointRef(1, 2), CheckpointRef(1, 4))


def test_refused_parent_is_avoided_by_the_next_attempt(side: Side) -> None:
    first = opened(side)
    for step in (2, 4):
        committed(side, first, 1, step)
    second = side.start()
    parent = second.all(lambda control: control.open())[1].parent
    assert parent is not None
    for control in second.controls:
        control.refuse_parent(parent, "a byte is wrong")
    assert damaged_checkpoints(side.lineage) == {CheckpointRef(1, 4)} and len(side.lineage.journal(2)) == 1


def test_superseded_attempt_is_told_at_its_horizon(side: Side) -> None:
    ranks = opened(side)
    side.supersede()
    with pytest.raises(Superseded, match="attempt 1"):
        ranks.controls[0].renew(16)


def test_damaged_shard_ends_the_attempt_unless_it_may_be_read_again(side: Side) -> None:
    ranks = opened(side)
    assert not ranks.controls[1].report_shard("shard-3.tar", "has another digest", 7)


@pytest.mark.parametrize("what", ["renew", "commit"])
def test_absence_is_waited_for_by_all_ranks_together(side: Side, what: str) -> None:
    ranks = opened(side)
    side.save(1, 2)
    over = threading.Event()

    def wait() -> None:
        if what == "renew":
            ranks.all(lambda control: control.renew(16))
        else:
            ranks.all(lambda control: control.commit(draft(1, 2)).wait(PATIENCE_S))
        over.set()

    with side.away():
        thread = threading.Thread(target=wait)
        thread.start()
        assert not over.wait(0.5)
    thread.join(PATIENCE_S)
    assert over.is_set()
    assert (side.lineage.checkpoints() == (CheckpointRef(1, 2),)) == (what == "commit")


def test_open_waits_for_what_is_away(side: Side) -> None:
    ranks = side.start()
    opening: list[int] = []
    with side.away():
        thread = threading.Thread(target=lambda: opening.extend(each.attempt for each in ranks.all(lambda c: c.open())))
        thread.start()
        thread.join(0.5)
        assert thread.is_alive()
    thread.join(PATIENCE_S)
    assert opening == [1, 1]


class TestAgentAlone:
    """What only an agent can do to its ranks."""

    @pytest.fixture
    def agent(self, tmp_path: Path) -> Iterator[AgentSide]:
        side = AgentSide(tmp_path)
        yield side
        side.close()

    def test_orders_survive_a_broken_stream_and_none_comes_twice(self, agent: AgentSide) -> None:
        ranks = opened(agent)
        agent.order(ranks, Orders.CHECKPOINT)
        assert heard(ranks, Orders.CHECKPOINT) == Orders.CHECKPOINT
        num_streams = agent.server.calls.count("WatchOrders")
        with agent.away():
            agent.order(ranks, Orders.CHECKPOINT)
            assert ranks.controls[0].orders() == Orders.NONE
        assert heard(ranks, Orders.CHECKPOINT) == Orders.CHECKPOINT
        assert agent.server.calls.count("WatchOrders") > num_streams
        agent.order(ranks, Orders.STOP)
        assert heard(ranks, Orders.STOP) == Orders.STOP

    def test_superseded_attempt_is_told_at_the_next_step_boundary(self, agent: AgentSide) -> None:
        ranks = opened(agent)
        agent.supersede()
        with pytest.raises(Superseded, match="attempt 1"):
            heard(ranks, Orders.STOP)

    def test_superseded_attempt_commits_nothing(self, agent: AgentSide) -> None:
        ranks = opened(agent)
        agent.save(1, 2)
        agent.supersede()
        with pytest.raises(Superseded):
            ranks.controls[0].commit(draft(1, 2)).wait(PATIENCE_S)
        assert [info.key for info in agent.store.list("a00000001/s00000002/") if "manifest" in info.key] == []

    def test_longer_absence_than_allowed_is_told_by_name(self, tmp_path: Path) -> None:
        side = AgentSide(tmp_path, plan_s=0.5)
        try:
            ranks = opened(side)
            with side.away(), pytest.raises(OutsideError, match="agent"):
                ranks.controls[0].renew(16)
        finally:
            side.close()

    def test_all_ranks_tell_the_same_phases_while_they_wait(self, agent: AgentSide) -> None:
        ranks = opened(agent)
        ranks.all(lambda control: control.renew(16))
        assert ranks.phases(0) == ranks.phases(1) == [("plan", 0), ("init", 0), ("plan", 17), ("step", 17)]

    def test_parent_without_a_whole_manifest_is_refused(self, agent: AgentSide) -> None:
        first = opened(agent)
        committed(agent, first, 1, 2)
        second = agent.start()
        manifest = agent.store.within("a00000001/s00000002/")
        manifest.delete("manifest.json")
        manifest.create("manifest.json", b"{")
        with pytest.raises(DamagedObject):
            second.all(lambda control: control.open())
        assert damaged_checkpoints(agent.lineage) == {CheckpointRef(1, 2)}
        assert {fields["checkpoint"] for _, fields in second.of("damage")} == {"attempt 1 step 2"}

    def test_shard_that_is_whole_after_all_may_be_read_again(self, agent: AgentSide) -> None:
        from phalanx.api.data.v1 import data_service_pb2 as data_pb

        ranks = opened(agent)
        agent.server.decision = data_pb.DAMAGE_ACTION_RETRY
        assert ranks.controls[1].report_shard("shard-3.tar", "has another digest", 7)
        assert agent.server.shards == [("shard-3.tar", "has another digest", 7)]

    def test_rank_that_is_not_the_first_dials_only_to_report(self, agent: AgentSide) -> None:
        ranks = opened(agent)
        ranks.all(lambda control: control.renew(16))
        committed(agent, ranks, 1, 2)
        assert agent.server.calls.count("Open") == 1 and agent.server.calls.count("Commit") == 1
        assert ranks.controls[1]._agent._stub is None  # type: ignore[union-attr]


def test_skipping_bad_shards_without_services_is_refused_by_name(tmp_path: Path) -> None:
    side = StorageSide(tmp_path)
    control = side.start().controls[0]
    control._on_bad_shard = "skip"  # type: ignore[union-attr]
    with pytest.raises(PhalanxError, match=r"recovery\.on_bad_shard"):
        control.report_shard("shard-3.tar", "has another digest", 7)
    side.close()
