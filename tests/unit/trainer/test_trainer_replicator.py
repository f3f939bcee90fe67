"""Copies in memory: what is sealed, what fails without harm, and when a rank may go on."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from phalanx.core.box import HeldTensor, whole
from phalanx.core.errors import OutsideError
from phalanx.lineage import LoaderState, Manifest
from phalanx.trainer.replicator import Replicator

DIGEST, DEADLINE_S = "sha256:" + "0" * 64, 20.0
pytestmark = pytest.mark.timeout(60)


class Keeper:
    """Takes shares once it is let."""

    def __init__(self):
        self.may_go_on, self.taken, self.error = threading.Event(), [], None
        self.may_go_on.set()

    def hand_over(self, taken, rank, sealed_step, draft, deadline_s):
        assert self.may_go_on.wait(DEADLINE_S)
        if self.error is not None:
            raise self.error
        self.taken.append((draft.step, sealed_step, os.fstat(taken.fd).st_size == taken.num_bytes))


@pytest.fixture
def keeper():
    return Keeper()


@pytest.fixture
def copies(keeper):
    tensor = torch.arange(12.0).reshape(3, 4)
    held = [HeldTensor("model.w", (3, 4), whole((3, 4)), tensor)]
    return Replicator(keeper, 0, lambda: held, interval=2, deadline_s=DEADLINE_S)


def take(copies, step):
    copies.take(
        Manifest(1, step, 1, DIGEST, DIGEST, DIGEST, DIGEST, LoaderState(step, step), {}, (), ()), lambda store: ()
    )
    copies.wait_captured()


def finish(copies):
    """Until the copy under way has ended, well or badly."""
    copies._handing.exception(DEADLINE_S)


def test_step_is_sealed_once_all_ranks_have_handed_it_over(copies, keeper):
    assert [step for step in range(1, 7) if copies.due(step)] == [2, 4, 6]
    for step, other_failed in ((2, False), (4, True), (6, False), (8, False)):
        take(copies, step)
        finish(copies)
        assert not copies.busy and not copies.failed
        copies.agreed(any_busy=False, any_failed=other_failed)
    assert keeper.taken == [(2, 0, True), (4, 2, True), (6, 2, True), (8, 6, True)]


def test_copy_under_way_is_told_and_seals_nothing(copies, keeper):
    keeper.may_go_on.clear()
    take(copies, 2)
    assert copies.busy
    copies.agreed(any_busy=True, any_failed=False)
    keeper.may_go_on.set()
    finish(copies)
    take(copies, 4)
    finish(copies)
    assert [(step, sealed) for step, sealed, _ in keeper.taken] == [(2, 0), (4, 0)]


def test_hand_over_that_fails_is_told_and_training_goes_on(copies, keeper):
    keeper.error = OutsideError("the partner is gone")
    take(copies, 2)
    finish(copies)
    assert copies.failed and not copies.busy
    keeper.error = None
    take(copies, 4)
    finish(copies)
    assert not copies.failed and keeper.taken == [(4, 0, True)]


def test_copy_without_memory_is_told_and_training_goes_on(copies, monkeypatch):
    def full(fd, num_bytes):
        raise OSError("no memory")

    monkeypatch.setattr(os, "ftruncate", full)
    take(copies, 2)
    finish(copies)
    assert copies.failed
