"""The live rule on plain values: the design's example, contradictions, and random histories against a small oracle."""

from __future__ import annotations

import pytest
from lineage_kit import an_attempt

from phalanx.lineage import CheckpointRef, DamagedObject, JournalEntry, live_chain, live_checkpoints, live_journal


def refs(*pairs: tuple[int, int]) -> tuple[CheckpointRef, ...]:
    return tuple(CheckpointRef(*pair) for pair in pairs)


def entry(attempt: int, number: int) -> JournalEntry:
    return JournalEntry(attempt, number, "damage", 0, {}, f"{attempt}-{number}")


def test_live_checkpoints_of_the_designs_example_leave_out_the_damaged_and_the_late_one():
    attempts = [an_attempt(1), an_attempt(2, CheckpointRef(1, 5), ((1, 0),))]
    committed = refs((1, 5), (1, 10), (2, 10), (2, 15), (1, 15))
    assert live_checkpoints(attempts, committed) == refs((1, 5), (2, 10), (2, 15))


def test_live_checkpoints_without_attempts_are_none():
    assert live_chain([]) == ()
    assert live_checkpoints([], refs((1, 5))) == ()


def test_live_checkpoints_of_an_attempt_that_was_skipped_are_not_live():
    attempts = [
        an_attempt(1),
        an_attempt(2, CheckpointRef(1, 5), ((1, 0),)),
        an_attempt(3, CheckpointRef(1, 5), ((1, 0),)),
    ]
    assert live_checkpoints(attempts, refs((1, 5), (2, 10), (3, 10))) == refs((1, 5), (3, 10))


def test_live_checkpoints_after_a_start_from_the_beginning_are_the_new_attempts_alone():
    attempts = [an_attempt(1), an_attempt(2)]
    assert live_checkpoints(attempts, refs((1, 5), (2, 5))) == refs((2, 5))


def test_live_checkpoint_at_or_before_the_parents_step_is_not_live():
    attempts = [an_attempt(1), an_attempt(2, CheckpointRef(1, 5), ((1, 0),))]
    assert live_checkpoints(attempts, refs((1, 5), (2, 4), (2, 5), (2, 6))) == refs((1, 5), (2, 6))


def test_live_journal_counts_each_attempts_entries_up_to_the_number_its_child_names():
    attempts = [an_attempt(1), an_attempt(2, CheckpointRef(1, 5), ((1, 2),))]
    written = [entry(2, 1), entry(1, 3), entry(1, 1), entry(1, 2)]
    assert live_journal(attempts, written) == (entry(1, 1), entry(1, 2), entry(2, 1))
    assert live_journal(attempts, written, tip=1) == (entry(1, 1), entry(1, 2), entry(1, 3))


@pytest.mark.parametrize(
    ("attempts", "names"),
    [
        ([an_attempt(2, CheckpointRef(1, 5), ((1, 0),))], "00000001.json is missing"),
        ([an_attempt(1), an_attempt(2, CheckpointRef(1, 5))], "00000002.json names a parent that cannot be"),
        ([an_attempt(1), an_attempt(2, CheckpointRef(1, 5), ((3, 0),))], "00000002.json names other ancestors"),
        ([an_attempt(1, None, ((1, 1),))], "00000001.json has no parent, yet"),
        ([an_attempt(1, CheckpointRef(1, 5), ((1, 0),))], "00000001.json names a parent that cannot be"),
        (
            [
                an_attempt(1),
                an_attempt(2, CheckpointRef(1, 5), ((1, 0),)),
                an_attempt(3, CheckpointRef(2, 5), ((1, 0), (2, 0))),
            ],
            "00000003.json names a parent that cannot be",
        ),
    ],
)
def test_live_chain_of_contradicting_attempts_names_the_object(attempts, names):
    with pytest.raises(DamagedObject, match=names):
        live_chain(attempts)
