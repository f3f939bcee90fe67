"""Checkpoints of an attempt come by rising step, and name records behind the one before."""

from __future__ import annotations

import pytest

from phalanx.checkpoint.order import CommitOrder
from phalanx.lineage import Lineage, LoaderState, Manifest, ObjectRef, RecordsName, keys
from phalanx.lineage.registry import JobName
from phalanx.objects import open_store
from phalanx.rpc import FailedPrecondition

DIGEST, JOB = "sha256:" + "0" * 64, JobName("p", "j")


@pytest.fixture
def lineage(tmp_path):
    lineage = Lineage(open_store(f"file://{tmp_path}"))
    lineage.open_attempt(code_digest=DIGEST, identity_digest=DIGEST, placement={})
    return lineage


def manifest(step, first_step, attempt=1):
    name = keys.records(RecordsName(attempt, 0, first_step, step))
    records = (ObjectRef(name, 1, "xxh3:" + "0" * 32),)
    return Manifest(
        attempt, step, 1, DIGEST, DIGEST, DIGEST, DIGEST, LoaderState(step, step), {}, records=records, parts=()
    )


def commit(order, lineage, made):
    with order.turn(JOB, lineage, made):
        lineage.commit(made)


def test_checkpoints_one_behind_the_other_are_committed_and_again_is_no_other(lineage):
    order = CommitOrder()
    for made in (manifest(5, 1), manifest(10, 6), manifest(10, 6), manifest(12, 11)):
        commit(order, lineage, made)


@pytest.mark.parametrize("is_new_process", [False, True])
def test_one_that_names_records_twice_or_is_older_is_refused(lineage, is_new_process):
    order = CommitOrder()
    commit(order, lineage, manifest(5, 1))
    commit(order, lineage, manifest(12, 6))
    order = CommitOrder() if is_new_process else order
    for made in (manifest(15, 6), manifest(15, 12), manifest(10, 6)):
        with pytest.raises(FailedPrecondition, match="steps behind 12"):
            commit(order, lineage, made)
    commit(order, lineage, manifest(15, 13))


def test_commit_that_fails_changes_nothing(lineage):
    order = CommitOrder()
    with pytest.raises(OSError, match="full"), order.turn(JOB, lineage, manifest(10, 1)):
        raise OSError("full")
    commit(order, lineage, manifest(5, 1))
