"""Headers of safetensors files that say what the format does not allow: refused by name, before anything is written."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.foreign_checkpoints import Foreign, write_hugging_face

from phalanx.checkpoint.importing.run import Import
from phalanx.core.errors import PhalanxError
from phalanx.spec import Job
from phalanx.trainer.places import job_store

Q0, Q1 = (f"model.layers.{n}.self_attn.q_proj.weight" for n in range(2))
Table = dict[str, Any]


def _same_bytes(table: Table) -> None:
    table[Q0]["data_offsets"] = table[Q1]["data_offsets"]


def _type_as_list(table: Table) -> None:
    table[Q0]["dtype"] = ["F32"]


def _type_as_object(table: Table) -> None:
    table[Q0]["dtype"] = {}


def _shape_as_text(table: Table) -> None:
    table[Q0]["shape"] = [str(n) for n in table[Q0]["shape"]]


def _shape_of_fractions(table: Table) -> None:
    table[Q0]["shape"] = [n + 0.5 for n in table[Q0]["shape"]]


def _reversed_offsets(table: Table) -> None:
    table[Q0]["data_offsets"] = table[Q0]["data_offsets"][::-1]


def _one_offset(table: Table) -> None:
    table[Q0]["data_offsets"] = table[Q0]["data_offsets"][:1]


def _gone(table: Table) -> None:
    del table[Q0]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_same_bytes, "one behind the other without gaps"),
        (_gone, "one behind the other without gaps"),
        (_type_as_list, "expected one of the types"),
        (_type_as_object, "expected one of the types"),
        (_shape_as_text, "expected dtype, shape and data_offsets"),
        (_shape_of_fractions, "expected dtype, shape and data_offsets"),
        (_reversed_offsets, "expected bytes that fit its shape"),
        (_one_offset, "expected dtype, shape and data_offsets"),
    ],
)
def test_a_header_that_the_format_does_not_allow_is_refused(
    tmp_path: Path, job: Job, foreign: Foreign, spoil: Callable[[Table], None], said: str
) -> None:
    folder = write_hugging_face(tmp_path / "hf", foreign)
    table, data = _read(folder / "model.safetensors")
    spoil(table)
    _write(folder / "model.safetensors", json.dumps(table).encode(), data)
    _assert_refused(job, folder, said)


def test_a_name_said_twice_is_refused(tmp_path: Path, job: Job, foreign: Foreign) -> None:
    """Readers differ in which of the two counts; one leaves the other's bytes to nobody."""
    folder = write_hugging_face(tmp_path / "hf", foreign)
    table, data = _read(folder / "model.safetensors")
    again = f', "{Q0}": {json.dumps(table[Q1])}}}'
    _write(folder / "model.safetensors", (json.dumps(table)[:-1] + again).encode(), data)
    _assert_refused(job, folder, "one behind the other without gaps")


def test_bytes_behind_the_last_tensor_are_refused(tmp_path: Path, job: Job, foreign: Foreign) -> None:
    folder = write_hugging_face(tmp_path / "hf", foreign)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"more")
    _assert_refused(job, folder, "one behind the other without gaps")


def _assert_refused(job: Job, folder: Path, said: str) -> None:
    with pytest.raises(PhalanxError, match=said) as caught:
        Import(job, str(folder))
    assert "model.safetensors" in str(caught.value)
    assert not list(job_store(job).list())


def _read(path: Path) -> tuple[Table, bytes]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def _write(path: Path, header: bytes, data: bytes) -> None:
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
