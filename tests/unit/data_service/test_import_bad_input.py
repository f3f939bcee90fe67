"""What an import refuses: one clear line that names the file, before a split exists; and what it never writes then."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from import_kit import DIGEST, files_below, imported, rows_of, settings, write_mds, write_megatron
from tokenizers import Tokenizer, models

from phalanx.core.errors import PhalanxError
from phalanx.data.importing import Boundaries, Format, ImportSettings, import_tokens
from phalanx.data.prepare.inputs.objects import InputObject
from phalanx.objects import open_store

ROWS = rows_of(50)


def refused(source: Path, given: ImportSettings, out: Path, *, is_clean: bool = True) -> str:
    """The error's line; nothing is left in `out`, or (not is_clean) no split."""
    with pytest.raises(PhalanxError) as caught:
        import_tokens([str(source)], open_store(f"file://{out}"), given, workers=2)
    line = str(caught.value)
    assert "\n" not in line, line
    left = files_below(out) if out.exists() else {}
    if is_clean:
        assert not left, left.keys()
    assert not any(name.startswith(("train/", "held_out/")) for name in left), left.keys()
    return line


def cut(path: Path, num_bytes: int) -> None:
    """Takes bytes off a file's end."""
    path.write_bytes(path.read_bytes()[:-num_bytes])


def flip(path: Path, offset: int) -> None:
    """Changes one byte."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def edit_index(folder: Path, change: Callable[[dict], None]) -> None:
    """Changes an MDS index."""
    index = json.loads((folder / "index.json").read_text())
    change(index)
    (folder / "index.json").write_text(json.dumps(index))


def test_import_of_nothing_is_refused(tmp_path: Path) -> None:
    assert "nothing is there" in refused(tmp_path / "none", settings(), tmp_path / "out")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.doc").write_text("x")
    assert "it holds none" in refused(tmp_path / "empty", settings(), tmp_path / "out")
    assert "name --format" in refused(tmp_path / "empty" / "notes.doc", settings(), tmp_path / "out")


@pytest.mark.parametrize("out", ["in", "in/out"])
def test_import_into_its_own_input_is_refused(tmp_path: Path, out: str) -> None:
    write_mds(tmp_path / "in", ROWS)
    before = files_below(tmp_path)
    with pytest.raises(PhalanxError, match="expected a folder outside of the input"):
        import_tokens([str(tmp_path / "in")], open_store(f"file://{tmp_path / out}"), settings())
    assert files_below(tmp_path) == before


@pytest.mark.parametrize("name", ["l1.npy", "gone.npy", "pipe.npy", "pipe.bin", "pipe.idx"])
def test_import_of_a_link_that_leads_nowhere_or_a_pipe_is_refused(tmp_path: Path, name: str) -> None:
    source = tmp_path / name
    if name.startswith("pipe"):
        os.mkfifo(source)
    else:
        source.symlink_to(tmp_path / "l2.npy")
        if name == "l1.npy":
            (tmp_path / "l2.npy").symlink_to(source)
    line = refused(source, settings(dtype="uint16"), tmp_path / "out")
    assert str(source) in line and ("it is a pipe" if name.startswith("pipe") else "leads nowhere") in line


def test_import_of_a_folder_leaves_links_that_lead_nowhere_and_pipes_out_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "in"
    (folder / "b").mkdir(parents=True)
    np.save(folder / "b" / "a.npy", np.arange(8, 20, dtype=np.uint16))
    (folder / "l1.npy").symlink_to("l2.npy")
    (folder / "l2.npy").symlink_to("l1.npy")
    (folder / "gone.npy").symlink_to("nothing.npy")
    (folder / "again").symlink_to(folder)
    os.mkfifo(folder / "pipe.npy")
    _, read = imported(folder, tmp_path / "out", settings())
    assert read.ids == ["b/a.npy#0"]
    assert "left out: 3 broken links, 1 links to folders, 1 pipes, sockets or devices" in caplog.text


def test_import_of_a_dataset_with_a_pipe_for_a_shard_is_refused(tmp_path: Path) -> None:
    write_mds(tmp_path / "mds", ROWS)
    (tmp_path / "mds" / "shard.00001.mds").unlink()
    os.mkfifo(tmp_path / "mds" / "shard.00001.mds")
    assert "it is a pipe" in refused(tmp_path / "mds", settings(), tmp_path / "out")


@pytest.mark.parametrize("name", ["a.npy", "a.bin", "index.json", "p.parquet", "s.arrow", "m.bin"])
def test_import_of_files_without_a_token_is_refused(tmp_path: Path, name: str) -> None:
    source, given = tmp_path / name, settings(dtype="uint16") if name == "a.bin" else settings()
    if name == "a.npy":
        np.save(source, np.empty(0, np.uint16))
    elif name == "a.bin":
        source.write_bytes(b"")
    elif name == "index.json":
        source = tmp_path / "mds"
        write_mds(source, [])
    elif name == "p.parquet":
        pq.write_table(pa.table({"input_ids": pa.array([], pa.list_(pa.int32()))}), source)
    elif name == "s.arrow":
        table = pa.table({"input_ids": pa.array([[], []], pa.list_(pa.int32()))})
        with pa.ipc.new_stream(source, table.schema) as writer:
            writer.write_table(table)
    else:
        write_megatron(tmp_path / "m", [], bounds=[0, 0])
    assert "it is empty" in refused(source, given, tmp_path / "out")


@pytest.mark.parametrize("value", [-1, 50_000])
@pytest.mark.parametrize("kind", ["mds", "megatron", "npy", "raw", "parquet", "arrow"])
def test_import_of_an_id_outside_the_vocabulary_names_file_row_and_value(tmp_path: Path, kind: str, value: int) -> None:
    rows = [row.copy() for row in ROWS]
    rows[33][-1] = value
    flat = np.concatenate(rows).astype(np.int32)
    given, where = settings(), "row 33"
    if kind == "mds":
        source = tmp_path / "mds"
        write_mds(source, rows, 20)
        where = "shard.00001.mds, row 13"
    elif kind == "megatron":
        source = tmp_path / "corpus"
        write_megatron(source, rows, code=4, dtype="<i4")
    elif kind == "npy":
        source, where = tmp_path / "a.npy", f"token {len(np.concatenate(rows[:34])) - 1}"
        np.save(source, flat)
        given = settings(boundaries=Boundaries.EOS)
    elif kind == "raw":
        source, where = tmp_path / "a.bin", f"token {len(np.concatenate(rows[:34])) - 1}"
        flat.tofile(source)
        given = settings(dtype="int32")
    else:
        source, table = tmp_path / f"a.{kind}", pa.table({"input_ids": [row.tolist() for row in rows]})
        if kind == "parquet":
            pq.write_table(table, source, row_group_size=10)
        else:
            with pa.ipc.new_stream(source, table.schema) as writer:
                writer.write_table(table, max_chunksize=7)
    line = refused(source, given, tmp_path / "out", is_clean=False)
    assert where in line and f"is {value}:" in line and "from 0 to 49999" in line


def test_import_of_a_first_id_outside_the_vocabulary_leaves_nothing(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([60_000, 1, 2]))
    refused(tmp_path / "a.npy", settings(), tmp_path / "out")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "shard.00001.mds").unlink(), "it is missing"),
        (lambda folder: cut(folder / "shard.00001.mds", 3), "bytes, as index.json has it"),
        (lambda folder: flip(folder / "shard.00000.mds", 300), "sha1"),
        (
            lambda folder: (folder / "index.json").write_text('{"version": 2, "shards": [{"format": "mds"}]}'),
            "an entry is broken",
        ),
        (lambda folder: edit_index(folder, lambda index: index.update(version=1)), "version 2"),
        (lambda folder: edit_index(folder, lambda index: index["shards"][0].update(samples=19)), "19 samples"),
        (lambda folder: edit_index(folder, lambda index: index["shards"][0].update(format="json")), "format 'mds'"),
        (
            lambda folder: edit_index(folder, lambda i: [s.update(column_encodings=["pkl"]) for s in i["shards"]]),
            "ndarray or bytes",
        ),
    ],
)
def test_import_of_a_damaged_mds_dataset_is_refused(
    tmp_path: Path, damage: Callable[[Path], object], words: str
) -> None:
    write_mds(tmp_path / "mds", ROWS)
    damage(tmp_path / "mds")
    assert words in refused(tmp_path / "mds", settings(), tmp_path / "out")


def test_import_of_mds_shards_that_lie_about_offsets_is_refused(tmp_path: Path) -> None:
    write_mds(tmp_path / "mds", ROWS)
    edit_index(tmp_path / "mds", lambda index: [shard["raw_data"].update(hashes={}) for shard in index["shards"]])
    flip(tmp_path / "mds" / "shard.00000.mds", 9)
    assert "its offsets differ" in refused(tmp_path / "mds", settings(), tmp_path / "out")


def test_import_of_mds_floats_or_matrices_is_refused(tmp_path: Path) -> None:
    write_mds(tmp_path / "floats", ROWS, column_encodings=["ndarray:float32"])
    assert "integer type" in refused(tmp_path / "floats", settings(), tmp_path / "out")
    write_mds(tmp_path / "fixed", [np.arange(8, 12)] * 4, column_encodings=["ndarray:uint8:2,11"])
    edit_index(tmp_path / "fixed", lambda index: [shard["raw_data"].update(hashes={}) for shard in index["shards"]])
    refused(tmp_path / "fixed", settings(), tmp_path / "out")


def test_import_of_plain_bytes_needs_a_type(tmp_path: Path) -> None:
    write_mds(tmp_path / "mds", ROWS, column_encodings=["bytes"])
    assert "--dtype" in refused(tmp_path / "mds", settings(), tmp_path / "out")
    np.arange(10, dtype=np.uint16).tofile(tmp_path / "a.bin")
    assert "--dtype" in refused(tmp_path / "a.bin", settings(), tmp_path / "out")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda prefix: cut(prefix.with_suffix(".bin"), 2), "last sequence"),
        (lambda prefix: prefix.with_suffix(".bin").unlink(), "it is missing"),
        (lambda prefix: cut(prefix.with_suffix(".idx"), 8), "bytes for 50 sequences"),
        (lambda prefix: cut(prefix.with_suffix(".idx"), prefix.with_suffix(".idx").stat().st_size - 20), "begin like"),
        (lambda prefix: prefix.with_suffix(".idx").write_bytes(b""), "begin like"),
        (lambda prefix: write_megatron(prefix, ROWS, version=2), "version 1"),
        (lambda prefix: write_megatron(prefix, ROWS, code=7, dtype="<f4"), "integer type"),
        (lambda prefix: write_megatron(prefix, ROWS, code=11), "integer type"),
        (lambda prefix: write_megatron(prefix, ROWS, bounds=[0]), "--sequences"),
        (lambda prefix: write_megatron(prefix, ROWS, bounds=[0, 40]), "--sequences"),
        (lambda prefix: write_megatron(prefix, ROWS, bounds=[0, 30, 20, 50]), "rising order"),
        (lambda prefix: flip(prefix.with_suffix(".idx"), 34 + 4 * 3 + 3), "inside the .bin"),
    ],
)
def test_import_of_a_damaged_megatron_dataset_is_refused(
    tmp_path: Path, damage: Callable[[Path], object], words: str
) -> None:
    prefix = tmp_path / "corpus"
    write_megatron(prefix, ROWS)
    damage(prefix)
    source = prefix.with_suffix(".idx")
    assert words in refused(source, settings(), tmp_path / "out")


def test_import_of_damaged_npy_files_is_refused(tmp_path: Path) -> None:
    source, given = tmp_path / "a.npy", settings()
    for array, words in (
        (np.zeros(10, np.float32), "integer type"),
        (np.array([{}, []], object), "integer type"),
        (np.zeros((2, 3, 4), np.int64), "one axis, or rows of ids in C order; it has 3 axes: save it anew"),
        (np.int64(5), "it has 0 axes"),
        (np.asfortranarray(np.zeros((4, 5), np.int64)), "it has them in Fortran order"),
    ):
        np.save(source, array, allow_pickle=True)
        assert words in refused(source, given, tmp_path / "out")
    np.save(source, np.arange(100))
    cut(source, 1)
    assert "for its shape" in refused(source, given, tmp_path / "out")
    source.write_bytes(b"no array")
    assert ".npy file" in refused(source, given, tmp_path / "out")


def test_import_of_a_raw_file_of_half_an_id_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(11))
    assert "of type uint16" in refused(tmp_path / "a.bin", settings(dtype="uint16"), tmp_path / "out")
    assert "behind 20" in refused(tmp_path / "a.bin", settings(dtype="uint8", skip_bytes=20), tmp_path / "out")
    given = settings(dtype="uint8", boundaries=Boundaries.ROWS)
    assert "no rows" in refused(tmp_path / "a.bin", given, tmp_path / "out")


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_import_of_damaged_columns_is_refused(tmp_path: Path, kind: str) -> None:
    source, given = tmp_path / f"a.{kind}", settings()

    def write(column: pa.Array, name: str = "input_ids") -> None:
        table = pa.table({name: column, "text": ["x"] * len(column)})
        if kind == "parquet":
            pq.write_table(table, source)
            return
        with pa.ipc.new_stream(source, table.schema) as writer:
            writer.write_table(table)

    write(pa.array([[1.5], [2.5]]))
    assert "lists of integers" in refused(source, given, tmp_path / "out")
    write(pa.array([1, 2]))
    assert "lists of integers" in refused(source, given, tmp_path / "out")
    write(pa.array([[1], None]))
    assert "row 1: expected a list of ids, it is null" in refused(source, given, tmp_path / "out")
    write(pa.array([[1], [3, None]]))
    assert "row 1: expected ids without a null" in refused(source, given, tmp_path / "out")
    write(pa.array([[1], [3]]))
    assert "it has input_ids" in refused(source, settings(column="tokens"), tmp_path / "out")
    assert "--id-column" in refused(source, settings(id_column="url"), tmp_path / "out")
    cut(source, 8)
    refused(source, given, tmp_path / "out")
    source.write_bytes(b"")
    refused(source, given, tmp_path / "out")


def test_import_of_a_folder_of_several_splits_names_them(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert "train, test" in refused(tmp_path / "saved", settings(), tmp_path / "out")


def test_import_of_files_of_two_formats_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    np.save(tmp_path / "in" / "a.npy", np.arange(8, 20))
    pq.write_table(pa.table({"input_ids": [[8, 9]]}), tmp_path / "in" / "b.parquet")
    assert "npy and parquet" in refused(tmp_path / "in", settings(), tmp_path / "out")
    _, found = imported(tmp_path / "in", tmp_path / "out", settings(format=Format.PARQUET))
    assert found.tokens.tolist() == [8, 9]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokenizer_digest": None}, "--tokenizer-digest with --vocab-size"),
        ({"tokenizer_digest": "sha256:ab"}, "64 hexadecimal"),
        ({"vocab_size": None}, "--vocab-size"),
        ({"vocab_size": 0}, "--vocab-size"),
        ({"eos_id": None}, "--eos-id"),
        ({"eos_id": 50_000}, "--eos-id"),
        ({"eos_id": -1}, "--eos-id"),
        ({"held_out_fraction": 1.0}, "--held-out-fraction"),
        ({"shard_tokens": 0}, "--shard-tokens"),
        ({"how": replace(settings().how, dtype="float32")}, "--dtype"),
        ({"how": replace(settings().how, column="")}, "--column"),
        ({"how": replace(settings().how, skip_bytes=-1)}, "--skip-bytes"),
    ],
)
def test_import_with_a_setting_out_of_range_is_refused(tmp_path: Path, change: dict[str, object], words: str) -> None:
    np.save(tmp_path / "a.npy", np.arange(8, 20))
    given = replace(settings(), **change)  # type: ignore[arg-type]
    assert words in refused(tmp_path / "a.npy", given, tmp_path / "out")


def test_import_with_another_tokenizer_than_its_digest_says_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    np.save(tmp_path / "a.npy", np.arange(8, 20))
    given = replace(settings(), tokenizer=tmp_path / "tokenizer.json")
    assert "another tokenizer" in refused(tmp_path / "a.npy", given, tmp_path / "out")
    given = replace(given, tokenizer_digest=None)
    assert "a tokenizer.json" in refused(tmp_path / "a.npy", given, tmp_path / "out")
    (tmp_path / "tokenizer.json").write_text(Tokenizer(models.BPE({}, [])).to_str())
    given = replace(given, eos_id=None)
    assert "--eos-token is '<|endoftext|>'" in refused(tmp_path / "a.npy", given, tmp_path / "out")
    given = ImportSettings(tokenizer=tmp_path / "none.json", tokenizer_digest=DIGEST)
    assert "no such file" in refused(tmp_path / "a.npy", given, tmp_path / "out")


@pytest.mark.parametrize("kind", ["index", "mds", "idx", "npy", "arrow", "parquet"])
def test_import_of_a_file_with_damage_anywhere_never_ends_in_anything_but_one_line(tmp_path: Path, kind: str) -> None:
    source, given, rows = tmp_path / "in", settings(), ROWS[:30]
    source.mkdir()
    target = source / f"a.{kind}"
    if kind in ("index", "mds"):
        source, target = source / "mds", source / "mds" / ("index.json" if kind == "index" else "shard.00000.mds")
        write_mds(source, rows)
        edit_index(source, lambda index: [shard["raw_data"].update(hashes={}) for shard in index["shards"]])
    elif kind == "idx":
        write_megatron(source / "a", rows)
    elif kind == "npy":
        np.save(target, np.arange(8, 40))
    else:
        table = pa.table({"input_ids": [row.tolist() for row in rows], "name": [f"é{n}" for n in range(30)]})
        given = settings(id_column="name")
        if kind == "parquet":
            pq.write_table(table, target, row_group_size=10)
        else:
            with pa.ipc.new_stream(target, table.schema) as writer:
                writer.write_table(table, max_chunksize=10)
    whole, generator, refusals = target.read_bytes(), np.random.default_rng(5), 0
    for number in range(25):
        damaged, place = bytearray(whole), int(generator.integers(min(len(whole), 3000)))
        if number % 3 == 0:
            del damaged[place : place + int(generator.integers(1, 9))]
        else:
            damaged[place] = int(generator.integers(256))
        target.write_bytes(damaged)
        try:
            imported(source, tmp_path / f"out{number}", given)
        except PhalanxError as error:
            refusals += 1
            assert "\n" not in str(error)
    assert refusals


def test_import_of_a_parquet_file_that_changes_while_it_is_read_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, read = tmp_path / "a.parquet", InputObject.range
    pq.write_table(pa.table({"input_ids": [row.tolist() for row in ROWS]}), source)

    def cut_then_read(self: InputObject, start: int, stop: int) -> bytes:
        if start < 4000 < stop or start == 4:  # a page, not the footer
            cut(source, 10)
        return read(self, start, stop)

    monkeypatch.setattr(InputObject, "range", cut_then_read)
    assert "as it was listed" in refused(source, settings(), tmp_path / "out", is_clean=False)
