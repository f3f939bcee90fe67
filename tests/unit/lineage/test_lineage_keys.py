"""Keys are a stored format: they are frozen here, and reading them back gives what wrote them."""

from __future__ import annotations

import pytest

from phalanx.lineage import CheckpointRef, RecordsName, keys

REF = CheckpointRef(3, 40)


def test_keys_are_frozen():
    assert [
        keys.JOB,
        keys.attempt(3),
        keys.journal_entry(3, 2),
        keys.records(RecordsName(attempt=3, rank=1, first_step=36, last_step=40)),
        keys.part(REF, 7),
        keys.tensors(REF, "model", 1),
        keys.manifest(REF),
    ] == [
        "job.json",
        "attempts/00000003.json",
        "journal/a00000003/00000002.json",
        "a00000003/records/s00000036-s00000040-r00000001.safetensors",
        "a00000003/s00000040/parts/00000007.json",
        "a00000003/s00000040/objects/model-00000001.safetensors",
        "a00000003/s00000040/manifest.json",
    ]


def test_keys_read_back_give_what_wrote_them():
    name = RecordsName(attempt=3, rank=1, first_step=36, last_step=40)
    assert keys.records_name(keys.records(name)) == name
    assert keys.attempt_number(keys.attempt(3)) == 3
    assert keys.journal_entry_number(keys.journal_entry(3, 2)) == 2
    assert keys.manifest_ref(keys.manifest(REF)) == REF
    assert keys.checkpoint_of(keys.part(REF, 0)) == REF


@pytest.mark.parametrize("key", ["attempts/3.json", "attempts/00000003.json.tmp", "a00000003/s00000040/manifest.jso"])
def test_keys_of_another_form_are_none(key):
    assert keys.attempt_number(key) is None
    assert keys.manifest_ref(key) is None
    assert keys.records_name(key) is None


@pytest.mark.parametrize("value", [-1, 100_000_000])
def test_number_beyond_eight_digits_is_refused(value):
    with pytest.raises(ValueError, match="8 digits"):
        keys.number(value)
