"""The stored formats are frozen: files under tests/golden/lineage were written once, and must be written and read the
same forever.

A change that breaks one of these needs a new format name beside the old one, never a new golden file in its place.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from lineage_kit import CODE, IDENTITY, a_manifest, an_attempt, step_rows, window_rows
from safetensors.numpy import load_file

from phalanx.core.step_parts import Part
from phalanx.lineage import CheckpointRef, JobRecord, JournalEntry, ObjectRef, RecordsName, WindowRows, journal_digest
from phalanx.lineage.encoding import decode, encode
from phalanx.lineage.records import decode_records, encode_records

GOLDEN = Path(__file__).parents[2] / "golden" / "lineage"
NAME = RecordsName(attempt=2, rank=1, first_step=1, last_step=2)
ENTRY = JournalEntry(1, 1, "damage", 160, {"windows": [3, 4], "reason": "Prüfsumme"}, "request-1")
VALUES = {
    "job.json": JobRecord(
        "request-0", {"training": {"steps": 40, "seq_len": 128}}, {"optimizer.lr": 3e-4, "training.seed": 0}, IDENTITY
    ),
    "attempt-first.json": an_attempt(1),
    "attempt.json": dataclasses.replace(
        an_attempt(2, CheckpointRef(1, 5), ((1, 1),)), journal_digest=journal_digest((ENTRY,))
    ),
    "journal-entry.json": ENTRY,
    "manifest.json": a_manifest(
        2,
        10,
        (ObjectRef("a00000002/records/s00000006-s00000010-r00000000.safetensors", 1234, "xxh3:" + "0f" * 16),),
        parts=(ObjectRef("a00000002/s00000010/parts/00000000.json", 567, CODE),),
    ),
}


def windows() -> WindowRows:
    """Two windows, the second of two segments."""
    rows = window_rows([1, 2], [0, 1])
    return dataclasses.replace(
        rows,
        segment_window=np.array([0, 1, 1]),
        shard=np.array([0, 0, 3]),
        member=np.array([0, 1, 0]),
        offset=np.array([0, 8, 0]),
        length=np.array([8, 5, 3]),
    )


@pytest.mark.parametrize("name", VALUES)
def test_stored_json_is_the_golden_file(name):
    stored = (GOLDEN / name).read_bytes()
    assert encode(VALUES[name]) == stored
    assert decode(type(VALUES[name]), name, stored) == VALUES[name]


def test_stored_records_are_the_golden_file():
    stored = (GOLDEN / "records-2.safetensors").read_bytes()
    assert encode_records(NAME, windows(), step_rows([1, 2])) == stored
    read, steps = decode_records("records", NAME, stored)
    assert read.shard.tolist() == [0, 0, 3]
    assert steps.loss.tolist() == [4.0, 2.0]
    assert steps.backward_s.tolist() == [0.0625, 0.0625]


def test_stored_records_of_the_first_format_are_read_without_the_parts_of_a_step():
    read, steps = decode_records("records", NAME, (GOLDEN / "records.safetensors").read_bytes())
    assert read.shard.tolist() == [0, 0, 3]
    assert (steps.loss.tolist(), steps.data_wait_s.tolist()) == ([4.0, 2.0], [0.0, 0.0])
    assert all(np.isnan(getattr(steps, part)).all() for part in Part if part is not Part.DATA)


def test_stored_records_open_with_safetensors_alone():
    columns = load_file(GOLDEN / "records-2.safetensors")
    assert columns["windows.position"].tolist() == [0, 1]
    assert columns["steps.step"].tolist() == [1, 2]
