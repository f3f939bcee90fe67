"""docs/formats/checkpoint.md: the reader that it shows, which knows nothing of Phalanx, reads real checkpoints; and all
bytes of one are what the page says, and no pickle.
"""

from __future__ import annotations

import io
import json
import pickletools
import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import deserialize
from saved_job import file_store, open_attempt, rows_of, save, some_tensors
from support.checkpoints import save as save_rows
from support.checkpoints import values_of

from phalanx.lineage import CheckpointRef, Lineage
from phalanx.lineage.lists import MOST_NAMED
from phalanx.objects import ObjectStore

PAGE = Path(__file__).parents[3] / "docs/formats/checkpoint.md"
REF = CheckpointRef(1, 5)
Read = Callable[[Path, int, int], Mapping[str, np.ndarray]]


@pytest.fixture(scope="module")
def read() -> Read:
    """The reader that the page shows."""
    blocks: list[str] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    source = next(block for block in blocks if "def read_checkpoint" in block)
    assert "phalanx" not in source
    room: dict[str, Read] = {}
    exec(source, room)
    return room["read_checkpoint"]


def many_ranks(folder: Path) -> ObjectStore:
    store = file_store(folder)
    open_attempt(store)
    save_rows(store, REF, MOST_NAMED + 6)
    return store


def test_reader_of_the_page_reads_every_type_bit_for_bit(read: Read, tmp_path: Path) -> None:
    store, tensors = file_store(tmp_path), some_tensors()
    save(store, open_attempt(store), 5, rows_of(tensors, 3))
    found = read(tmp_path, 1, 5)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        expected = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        assert np.array_equal(np.atleast_1d(found[name]).reshape(-1).view(np.uint8), expected), name


def test_reader_of_the_page_reads_a_root_that_names_lists(read: Read, tmp_path: Path) -> None:
    manifest = Lineage(many_ranks(tmp_path)).manifest(REF)
    assert manifest.part_lists and not manifest.parts
    (tensor,) = read(tmp_path, 1, 5).values()
    assert len(tensor) == len(values_of(REF)) * (MOST_NAMED + 6) and (tensor == values_of(REF)[0, 0]).all()


def test_reader_of_the_page_refuses_a_flipped_bit_anywhere(read: Read, tmp_path: Path) -> None:
    """Case 7."""
    store = file_store(tmp_path)
    save(store, open_attempt(store), 5, rows_of({"t": torch.arange(600_000.0)}, 2))
    for path in sorted((tmp_path / "a00000001/s00000005").glob("[op]*/*")):
        data = path.read_bytes()
        path.chmod(0o600)
        path.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
        with pytest.raises(ValueError, match="not what was written"):
            read(tmp_path, 1, 5)
        path.write_bytes(data)


@pytest.mark.parametrize("num_ranks", [2, MOST_NAMED + 6])
def test_all_bytes_of_a_checkpoint_are_json_or_safetensors_and_no_pickle(num_ranks: int, tmp_path: Path) -> None:
    """Case 6: there is nothing to unpickle, in no object that a save, its records and its attempt write."""
    if num_ranks > MOST_NAMED:
        many_ranks(tmp_path)
    else:
        store = file_store(tmp_path)
        save(store, open_attempt(store), 5, rows_of(some_tensors(), num_ranks))
    kinds = {what_is(path) for path in tmp_path.rglob("*") if path.is_file()}
    assert kinds == {"json", "safetensors"}


def what_is(path: Path) -> str:
    data = path.read_bytes()
    assert not zipfile.is_zipfile(io.BytesIO(data)) and not is_pickle(data), path
    if path.suffix == ".json":
        json.loads(data)
        return "json"
    assert path.suffix == ".safetensors", path
    deserialize(data)
    return "safetensors"


def is_pickle(data: bytes) -> bool:
    """Whether a pickle machine would run to the end of what stands at the start."""
    try:
        return any(operation.name == "STOP" for operation, _, _ in pickletools.genops(data))
    except ValueError:
        return False


def test_the_search_for_pickles_finds_those_of_torch_and_python(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "new.pt")
    torch.save({"a": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for name in ("new.pt", "old.pt"):
        with pytest.raises(AssertionError, match=name):
            what_is(tmp_path / name)
    assert is_pickle(b"cos\nsystem\n(S'true'\ntR.")
