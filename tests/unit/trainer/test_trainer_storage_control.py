"""Control from storage alone, for one rank: openings, plans, orders, refused parents."""

from __future__ import annotations

import itertools
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from torch.distributed import HashStore

from phalanx.core.digest import sha256
from phalanx.core.errors import OutsideError
from phalanx.lineage import CheckpointRef, DamagedObject, JournalEntry, Lineage, LoaderState, Manifest
from phalanx.lineage.rollback import roll_backs
from phalanx.objects import ObjectStore, StoreError, open_store
from phalanx.objects.faults import FaultyStore, fail_before, on
from phalanx.snapshot import IncompleteCheckpoint
from phalanx.trainer.control import Orders
from phalanx.trainer.exchange import Exchange
from phalanx.trainer.session import tell_damage
from phalanx.trainer.storage_control import (
    HORIZON_STEPS,
    Proposal,
    StorageControl,
    damaged_checkpoints,
    zero_weight_spans,
)

DIGESTS = {name: sha256(name.encode()) for name in ("code", "identity", "placement", "journal")}


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    """A job's root."""
    return open_store(tmp_path.as_uri()).within("job/")


def control_of(store: ObjectStore, reports: list[tuple[str, dict[str, Any]]] | None = None) -> StorageControl:
    """Rank 0 of one."""
    told = reports if reports is not None else []
    return StorageControl(
        Lineage(store),
        store,
        Exchange(HashStore(), 0),
        Proposal(DIGESTS["code"], DIGESTS["identity"], {"world_size": 1}),
        rank=0,
        world_size=1,
        deadline_s=0.3,
        report=lambda kind, **fields: told.append((kind, fields)),
    )


def manifest(attempt: int, step: int) -> Manifest:
    """A checkpoint root; nothing here reads what it names."""
    return Manifest(
        attempt=attempt,
        step=step,
        world_size=1,
        identity_digest=DIGESTS["identity"],
        placement_digest=DIGESTS["placement"],
        code_digest=DIGESTS["code"],
        journal_digest=DIGESTS["journal"],
        loader=LoaderState(step, step * 8),
        schedule={"num_updates": step},
        records=(),
        parts=(),
    )


def test_open_gives_the_first_attempt_no_parent_and_the_next_the_newest_checkpoint(store: ObjectStore) -> None:
    first = control_of(store).open()
    assert (first.attempt, first.parent, first.plan.horizon_step) == (1, None, HORIZON_STEPS)
    lineage = Lineage(store)
    lineage.commit(manifest(1, 2))
    lineage.commit(manifest(1, 4))
    second = control_of(store).open()
    assert second.attempt == 2 and second.parent == manifest(1, 4)
    assert second.plan.horizon_step == 4 + HORIZON_STEPS


def test_refused_parent_is_avoided_by_every_later_attempt(store: ObjectStore) -> None:
    control_of(store).open()
    lineage = Lineage(store)
    for step in (2, 4):
        lineage.commit(manifest(1, step))
    failing = control_of(store)
    opening = failing.open()
    assert opening.parent is not None
    failing.refuse_parent(opening.parent, "a byte is wrong")
    failing.refuse_parent(opening.parent, "found by another rank too")
    assert len(lineage.journal(2)) == 1
    assert damaged_checkpoints(lineage) == {CheckpointRef(1, 4)}
    for attempt in (3, 4):
        opening = control_of(store).open()
        assert opening.attempt == attempt and opening.parent is not None and opening.parent.ref == CheckpointRef(1, 2)


def test_damage_is_told_and_outlives_a_journal_that_cannot_be_written(store: ObjectStore) -> None:
    control_of(store).open()
    Lineage(store).commit(manifest(1, 4))
    gone = FaultyStore(store, [fail_before(on("create", "journal/"), StoreError("the store is gone"))])
    failing = control_of(gone)
    opening = failing.open()
    assert opening.parent is not None
    reports: list[tuple[str, dict[str, Any]]] = []
    damage = DamagedObject("a00000001/s00000004/parts/00000000.json", "is missing")
    tell_damage(opening.parent, damage, failing, lambda kind, **fields: reports.append((kind, fields)))
    assert reports == [("damage", {"checkpoint": "attempt 1 step 4", "why": str(damage)})]
    assert any(call.operation == "create" and "journal/" in call.key for call in gone.calls)


def test_damaged_checkpoints_cost_one_listing_and_one_read_an_entry(store: ObjectStore) -> None:
    for _ in range(5):
        control_of(store).open()
    lineage = Lineage(store)
    lineage.append_journal(2, "damaged_checkpoint", 8, {"attempt": 1, "step": 1, "why": ""})
    lineage.append_journal(4, "skip", 8, {"num_windows": 8})
    watched = FaultyStore(store)
    assert damaged_checkpoints(Lineage(watched)) == {CheckpointRef(1, 1)}
    assert [call.operation for call in watched.calls] == ["list", "read", "read"]


def test_damaged_root_is_told_and_stepped_over(store: ObjectStore) -> None:
    control_of(store).open()
    Lineage(store).commit(manifest(1, 2))
    store.create("a00000001/s00000004/manifest.json", b"{")
    reports: list[tuple[str, dict[str, Any]]] = []
    opening = control_of(store, reports).open()
    assert opening.parent is not None and opening.parent.ref == CheckpointRef(1, 2)
    ((kind, fields),) = reports
    assert kind == "damage" and "a00000001/s00000004/manifest.json" in fields["why"]


def test_renew_moves_the_horizon_and_reads_new_journal_entries(store: ObjectStore) -> None:
    control = control_of(store)
    first = control.open().plan
    Lineage(store).append_journal(1, "skip", 40, {"num_windows": 8})
    renewed = control.renew(16)
    assert first.zero_weight == () and renewed.zero_weight == ((40, 48),)
    assert renewed.horizon_step == 16 + HORIZON_STEPS and renewed.journal_digest != first.journal_digest


def test_zero_weight_spans_are_of_skips_and_damage_alone_in_their_order() -> None:
    entries = [
        ("skip", 8, {"num_windows": 8}),
        ("damaged_checkpoint", 0, {"attempt": 1, "step": 2}),
        ("damage", 3, {"num_windows": 1}),
    ]
    journal = tuple(
        JournalEntry(1, number, kind, position, payload, f"r{number}")
        for number, (kind, position, payload) in enumerate(entries, 1)
    )
    assert zero_weight_spans(journal) == ((8, 16), (3, 4))


def test_orders_are_taken_once_but_a_stop_stays(store: ObjectStore) -> None:
    control = control_of(store)
    assert control.orders() == Orders.NONE
    control.give(Orders.CHECKPOINT)
    assert control.orders() == Orders.CHECKPOINT and control.orders() == Orders.NONE
    control.give(Orders.STOP)
    control.give(Orders.CHECKPOINT)
    assert control.orders() == Orders.STOP | Orders.CHECKPOINT
    assert control.orders() == control.orders() == Orders.STOP


def test_stop_between_any_two_operations_of_orders_is_never_lost(store: ObjectStore) -> None:
    for at in itertools.count(1):
        control = control_of(store)
        control.give(Orders.CHECKPOINT)
        taken, num_operations = interrupted_orders(control, at)
        if num_operations < at:
            break
        assert Orders.CHECKPOINT in taken and Orders.STOP in control.orders(), f"lost at operation {at}"
    assert at > 10


def interrupted_orders(control: StorageControl, at: int) -> tuple[Orders, int]:
    """What `orders` gives when a stop comes before its interpreter's operation number `at`; how many it has."""
    num_operations = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal num_operations
        frame.f_trace_opcodes = True
        num_operations += event == "opcode"
        if event == "opcode" and num_operations == at:
            control.give(Orders.STOP)
        return trace

    sys.settrace(trace)
    try:
        return control.orders(), num_operations
    finally:
        sys.settrace(None)


@pytest.mark.parametrize(
    ("number", "order"),
    [(signal.SIGINT, Orders.STOP), (signal.SIGTERM, Orders.STOP), (signal.SIGUSR1, Orders.CHECKPOINT)],
)
def test_signal_becomes_an_order(store: ObjectStore, number: signal.Signals, order: Orders) -> None:
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    control = control_of(store)
    try:
        control.listen()
        signal.raise_signal(number)
        assert control.orders() == order
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def test_commit_without_parts_raises_what_is_missing_and_makes_no_checkpoint(store: ObjectStore) -> None:
    control = control_of(store)
    control.open()
    pending = control.commit(manifest(1, 2))
    with pytest.raises(IncompleteCheckpoint, match="no part of ranks 0"):
        pending.wait(10.0)
    assert pending.done and Lineage(store).checkpoints() == ()
    control.close()


def test_commit_that_takes_longer_than_its_deadline_is_told_by_name(store: ObjectStore) -> None:
    control = control_of(store)
    control.open()
    with pytest.raises(OutsideError, match=r"not committed within 0\.01 s"):
        control.commit(manifest(1, 2)).wait(0.01)
    control.close()


def test_rolled_back_steps_are_left_out_and_their_checkpoints_avoided(store: ObjectStore) -> None:
    lineage, control = Lineage(store), control_of(store)
    control.open()
    for step in (2, 4):
        lineage.commit(manifest(1, step))
    assert control.roll_back(4, 6) and control.roll_back(4, 6), "said twice it is one"
    second = control_of(store).open()
    assert second.parent == manifest(1, 2), "the checkpoint of step 4 had its windows in it"
    assert second.plan.zero_weight == ((3, 6),)
    lineage.commit(manifest(2, 4))
    third = control_of(store).open()
    assert third.parent == manifest(2, 4), "that of an attempt which left them out is as good as any"
    assert third.plan.zero_weight == ((3, 6),)
    assert [back.first_step for back in roll_backs(lineage)] == [4]


def test_roll_back_of_an_attempt_without_a_checkpoint_holds_for_the_next_ones(store: ObjectStore) -> None:
    control = control_of(store)
    control.open()
    control.roll_back(1, 3)
    for _ in range(2):
        opened = control_of(store).open()
        assert opened.parent is None and opened.plan.zero_weight == ((0, 3),)
    assert len(roll_backs(Lineage(store))) == 1
