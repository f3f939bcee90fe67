"""Jobs that begin from a checkpoint of another one."""

from __future__ import annotations

import pytest
from lineage_kit import CODE, IDENTITY, PLACEMENT, a_manifest, memory_store, open_next

from phalanx.core.errors import PhalanxError
from phalanx.lineage import CheckpointRef, ForkPoint, JobRecord, Lineage, position_after
from phalanx.lineage.encoding import decode, encode
from phalanx.objects.memory import MemoryStore

ORIGIN = ForkPoint("p", "first", 3, 10, 40)


def create(lineage: Lineage, origin: ForkPoint | None) -> JobRecord:
    return lineage.create_job(request_id="r", spec={}, identity={}, identity_digest=IDENTITY, origin=origin)


def test_job_record_keeps_its_origin_and_one_without_has_no_such_field() -> None:
    for origin in (None, ORIGIN):
        record = JobRecord("r", {}, {}, IDENTITY, origin)
        data = encode(record)
        assert decode(JobRecord, "job.json", data) == record and (b"origin" in data) == (origin is not None)


def test_fork_is_created_once_and_continued_with_or_without_naming_its_origin() -> None:
    lineage = Lineage(memory_store())
    assert create(lineage, ORIGIN).origin == create(lineage, ORIGIN).origin == create(lineage, None).origin == ORIGIN


@pytest.mark.parametrize("stored", [None, ForkPoint("p", "first", 3, 11, 44)])
def test_job_of_that_name_with_another_beginning_is_refused(stored: ForkPoint | None) -> None:
    lineage = Lineage(memory_store())
    create(lineage, stored)
    with pytest.raises(PhalanxError, match=r"forked from attempt 3 step 10 of projects/p/jobs/first"):
        create(lineage, ORIGIN)


def test_fork_starts_from_its_copy_or_not_at_all() -> None:
    lineage = Lineage(memory_store())
    create(lineage, ORIGIN)
    with pytest.raises(PhalanxError, match="at least the copy of attempt 3 step 10"):
        open_next(lineage)
    first = lineage.open_import(ORIGIN, code_digest=CODE, identity_digest=IDENTITY)
    assert lineage.open_import(ORIGIN, code_digest=IDENTITY, identity_digest=IDENTITY) == first
    with pytest.raises(PhalanxError, match="at least the copy"):
        open_next(lineage)
    lineage.commit(a_manifest(1, 10))
    assert open_next(lineage).parent == CheckpointRef(1, 10)
    with pytest.raises(PhalanxError, match="under another if it is damaged"):
        open_next(lineage, avoid=(CheckpointRef(1, 10),))


def test_import_of_another_checkpoint_or_into_a_job_that_trains_is_refused() -> None:
    lineage = Lineage(memory_store())
    lineage.open_import(ORIGIN, code_digest=CODE, identity_digest=IDENTITY)
    other = ForkPoint("p", "other", 3, 10, 40)
    with pytest.raises(PhalanxError, match="other"):
        lineage.open_import(other, code_digest=CODE, identity_digest=IDENTITY)
    trained = Lineage(memory_store("trained"))
    trained.open_attempt(code_digest=CODE, identity_digest=IDENTITY, placement=PLACEMENT)
    with pytest.raises(PhalanxError, match="whose first attempt is the import"):
        trained.open_import(ORIGIN, code_digest=CODE, identity_digest=IDENTITY)


def test_positions_of_a_fork_go_on_from_its_origin_in_batches_of_its_own() -> None:
    assert [position_after(step, 8, None) for step in (0, 1, 5)] == [0, 8, 40]
    assert [position_after(step, 16, ORIGIN) for step in (10, 11, 13)] == [40, 56, 88]


@pytest.mark.parametrize(
    ("first", "last", "expected"), [(4, 4, (40 + 0 * 6, 40 + 6)), (5, 7, (46, 64))], ids=["first-own-step", "three"]
)
def test_windows_of_steps_of_a_fork_count_from_where_its_origin_stood(first, last, expected):
    store = MemoryStore("memory://windows")
    origin = ForkPoint("p", "other", 1, 3, 40)
    Lineage(store).create_job(request_id="r", spec={}, identity={}, identity_digest="sha256:" + 64 * "0", origin=origin)

    assert Lineage(store).windows_of(first, last, 6) == expected


def test_windows_of_steps_of_a_job_of_its_own_count_from_the_beginning():
    assert Lineage(MemoryStore("memory://windows")).windows_of(3, 4, 8) == (16, 32)
