"""What the inputs of an import stand for: no file is lost or read twice unsaid, and no option is without effect."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from import_kit import EOS, imported, rows_of, settings, write_mds, write_megatron

from phalanx.core.errors import PhalanxError
from phalanx.data.importing import Format, import_tokens
from phalanx.objects import open_store

ROWS = rows_of(30)


def raw(path: Path) -> None:
    """A raw file of all rows."""
    np.concatenate(ROWS).astype(np.uint16).tofile(path)


def npy(path: Path) -> None:
    """All rows in one."""
    np.save(path, np.concatenate(ROWS))


def parquet(path: Path) -> None:
    """A table of all rows, with names."""
    names = [f"n{number}" for number in range(len(ROWS))]
    pq.write_table(pa.table({"input_ids": [row.tolist() for row in ROWS], "url": names}), path)


def saved(folder: Path, *, more: tuple[str, ...] = ()) -> None:
    """What `save_to_disk` writes; more: other arrow files in it."""
    folder.mkdir()
    table = pa.table({"input_ids": [row.tolist() for row in ROWS]})
    for name in ("data-00000-of-00001.arrow", *more):
        with pa.ipc.new_stream(folder / name, table.schema) as writer:
            writer.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    (folder / "dataset_info.json").write_text("{}")


def refused(source: Path, out: Path, **how: object) -> str:
    """The error's line; nothing is written."""
    with pytest.raises(PhalanxError) as caught:
        import_tokens([str(source)], open_store(f"file://{out}"), settings(**how))
    assert not out.exists()
    return str(caught.value)


def _raw_and(write: Callable[[Path], None], name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        folder.mkdir()
        raw(folder / "r.bin")
        write(folder / name)

    return make


def _mds_and(write: Callable[[Path], None], name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        write_mds(folder, ROWS)
        write(folder / name)

    return make


def _saved_and_npy(folder: Path) -> None:
    saved(folder)
    npy(folder / "a.npy")


@pytest.mark.parametrize(
    ("make", "formats"),
    [
        (_raw_and(npy, "a.npy"), "npy and raw"),
        (_raw_and(parquet, "p.parquet"), "parquet and raw"),
        (_mds_and(npy, "a.npy"), "mds and npy"),
        (_mds_and(raw, "r.bin"), "mds and raw"),
        (_saved_and_npy, "arrow and npy"),
    ],
)
def test_import_of_a_folder_of_several_formats_is_refused(
    tmp_path: Path, make: Callable[[Path], None], formats: str
) -> None:
    make(tmp_path / "in")
    line = refused(tmp_path / "in", tmp_path / "out", dtype="uint16")
    assert f"expected files of one format; they are {formats}: name --format" in line


@pytest.mark.parametrize("asked", [None, Format.MEGATRON])
def test_import_of_a_bin_without_its_idx_among_megatron_files_is_refused(tmp_path: Path, asked: Format | None) -> None:
    write_megatron(tmp_path / "in" / "m", ROWS)
    raw(tmp_path / "in" / "lone.bin")
    line = refused(tmp_path / "in", tmp_path / "out", format=asked)
    assert f"{tmp_path}/in/lone.bin: expected lone.idx beside it; it is missing" in line


def test_import_of_mds_folders_that_lie_deeper_is_refused_and_names_them(tmp_path: Path) -> None:
    write_mds(tmp_path / "in" / "train", ROWS)
    write_mds(tmp_path / "in" / "val", ROWS)
    npy(tmp_path / "in" / "a.npy")
    assert "name the folders that hold shards and index (train, val)" in refused(tmp_path / "in", tmp_path / "out")


def test_import_says_which_files_of_a_folder_it_leaves_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "in" / "b").mkdir(parents=True)
    npy(tmp_path / "in" / "b" / "a.npy")
    for name in ("README", "b/one.json", "two.JSON"):
        (tmp_path / "in" / name).write_text("{}")
    imported(tmp_path / "in", tmp_path / "out", settings())
    assert f"{tmp_path}/in: files left out: 2 .json, 1 no suffix" in caplog.text


@pytest.mark.parametrize(
    ("make", "asked", "told"),
    [
        (_raw_and(npy, "a.npy"), Format.NPY, "1 .bin"),
        (lambda folder: write_megatron(folder / "m", ROWS), Format.RAW, "1 .idx"),
        (lambda folder: write_mds(folder, ROWS), None, ""),
        (_mds_and(raw, "shard.00007.mds"), None, "1 .mds"),
        (lambda folder: write_megatron(folder / "m", ROWS), None, ""),
        (saved, None, ""),
        (lambda folder: saved(folder, more=("cache-0123.arrow",)), None, "1 .arrow"),
    ],
)
def test_import_counts_files_that_are_no_part_of_what_it_reads(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    make: Callable[[Path], None],
    asked: Format | None,
    told: str,
) -> None:
    make(tmp_path / "in")
    how = {"dtype": "uint16"} if asked is Format.RAW else {}
    _, found = imported(tmp_path / "in", tmp_path / "out", settings(format=asked, **how))
    assert len(found.tokens) == sum(map(len, ROWS))
    assert caplog.text.count("left out") == bool(told)
    assert f"files left out: {told}" in caplog.text or not told


def test_import_of_both_files_of_a_megatron_dataset_reads_it_once(tmp_path: Path) -> None:
    write_megatron(tmp_path / "m", ROWS)
    names = [str(tmp_path / name) for name in ("m.bin", "m.idx", "m")]
    report = import_tokens(names, open_store(f"file://{tmp_path}/out"), settings())
    assert report.train.num_documents == len(ROWS)


def test_import_of_a_folder_and_a_file_in_it_reads_the_file_once(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    npy(tmp_path / "in" / "a.npy")
    report = import_tokens(
        [str(tmp_path / "in" / "a.npy"), str(tmp_path / "in")], open_store(f"file://{tmp_path}/out"), settings()
    )
    assert report.train.num_documents == 1


_OPTIONS = {"column": "input_ids", "id_column": "url", "dtype": "uint16", "skip_bytes": 2, "sequences": True}
_TAKEN = {
    "npy": (),
    "raw": ("dtype", "skip_bytes"),
    "megatron": ("sequences",),
    "parquet": ("column", "id_column"),
    "mds": ("column", "id_column", "dtype"),
}
_MAKE: dict[str, Callable[[Path], object]] = {
    "npy": npy,
    "raw": raw,
    "megatron": lambda path: write_megatron(path, ROWS),
    "parquet": parquet,
    "mds": lambda path: write_mds(path, ROWS),
}


@pytest.mark.parametrize("option", _OPTIONS)
@pytest.mark.parametrize("kind", _TAKEN)
def test_import_option_without_effect_on_a_format_is_refused(tmp_path: Path, kind: str, option: str) -> None:
    source = tmp_path / {"npy": "a.npy", "raw": "a.bin", "parquet": "a.parquet"}.get(kind, kind)
    _MAKE[kind](source)
    how = {option: _OPTIONS[option]} | ({"dtype": "uint16"} if kind == "raw" else {})
    name = f"--{option.replace('_', '-')}"
    if option in _TAKEN[kind]:
        if kind in ("raw", "megatron", "parquet"):
            imported(source, tmp_path / "out", settings(**how))
        return
    line = refused(source, tmp_path / "out", **how)
    assert line.startswith(name) and f"expected no such option with {kind} files; leave it out" in line


def test_import_dtype_for_mds_values_that_say_their_type_is_refused(tmp_path: Path) -> None:
    write_mds(tmp_path / "mds", ROWS)
    line = refused(tmp_path / "mds", tmp_path / "out", dtype="uint16")
    assert line.startswith("--dtype is 'uint16': expected a column of ids encoded as bytes with it, not ndarray:int32")


def test_import_with_an_eos_id_and_an_eos_token_is_refused(tmp_path: Path) -> None:
    npy(tmp_path / "a.npy")
    given = replace(settings(), eos_token="</s>")
    assert given.eos_id == EOS
    with pytest.raises(PhalanxError, match="--eos-token is '</s>': expected no such option with --eos-id"):
        import_tokens([str(tmp_path / "a.npy")], open_store(f"file://{tmp_path}/out"), given)
    assert not (tmp_path / "out").exists()
