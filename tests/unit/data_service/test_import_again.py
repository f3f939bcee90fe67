"""An import that is killed, done in parts, done by more threads, or repeated: the same bytes; and what it reads."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from import_kit import DIGEST, EOS, files_below, imported, read_back, rows_of, settings, write_mds

import phalanx.stream
from phalanx.cli.data.prepare import merge as merge_command
from phalanx.core.errors import PhalanxError
from phalanx.data.importing import ImportSettings, Understanding, import_part, import_recipe, import_tokens, merge
from phalanx.data.prepare import Part
from phalanx.objects import open_store

ROWS = rows_of(400)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_mds(tmp_path / "mds", ROWS, 10)
    return tmp_path / "mds"


def test_import_leaves_no_chunk_and_gives_the_report_again(source: Path, tmp_path: Path) -> None:
    first, found = imported(source, tmp_path / "out", settings())
    before = files_below(tmp_path / "out")
    again, _ = imported(source, tmp_path / "out", settings())
    assert np.array_equal(found.tokens, np.concatenate(ROWS))
    assert again == first
    assert files_below(tmp_path / "out") == before
    assert not any(name.startswith("chunks/") for name in before)


def test_imported_documents_are_read_as_they_were_by_a_notebook(tmp_path: Path) -> None:
    """Also those without EOS, which no reader looks for."""
    np.save(tmp_path / "rows.npy", np.arange(8, 68).reshape(20, 3))
    imported(tmp_path / "rows.npy", tmp_path / "out", settings())
    documents = phalanx.stream.open(f"file://{tmp_path}/out/train")
    assert len(documents) == 20
    assert documents[17].tokens.tolist() == [59, 60, 61]
    assert documents[17].id == "rows.npy#17"
    assert documents[17].text is None


def test_import_in_parts_gives_the_same_bytes_in_any_order(source: Path, tmp_path: Path) -> None:
    imported(source, tmp_path / "whole", settings(), workers=1)
    out = open_store(f"file://{tmp_path / 'parts'}")
    for number in (3, 1):
        report = import_part([str(source)], out, settings(), Part(number, 3))
        assert report.pieces_made == report.pieces_of_part > 0
    recipe = import_recipe(out)
    assert recipe is not None
    with pytest.raises(PhalanxError, match=r"13 are missing: piece 2 \(shard\.00001\.mds\).*and 8 more"):
        merge(out, recipe)
    import_part([str(source)], out, settings(), Part(2, 3))
    merge(out, recipe)
    assert files_below(tmp_path / "parts") == files_below(tmp_path / "whole")
    assert import_part([str(source)], out, settings(), Part(2, 3)).is_finished


@pytest.mark.parametrize("key", ["recipe.json", "input.json"])
@pytest.mark.parametrize("data", [b"{}", b"zz", b"[1]", b'{"format": "phalanx.import/1"}', b'[["flat", {}]]'])
def test_merge_of_an_import_with_a_damaged_claim_says_so_and_its_remedy_works(
    tmp_path: Path, key: str, data: bytes
) -> None:
    np.save(tmp_path / "rows.npy", np.arange(8, 68).reshape(20, 3))
    url = f"file://{tmp_path}/out"
    import_part([str(tmp_path / "rows.npy")], open_store(url), settings(), Part(1, 1))
    (tmp_path / "out" / key).write_bytes(data)
    with pytest.raises(PhalanxError, match=f"{key}: .*damaged; delete it and run one part again") as error:
        merge_command(out=url)
    assert "\n" not in str(error.value)
    (tmp_path / "out" / key).unlink()
    import_part([str(tmp_path / "rows.npy")], open_store(url), settings(), Part(1, 1))
    merge_command(out=url)
    assert len(phalanx.stream.open(f"{url}/train")) == 20


def test_import_that_is_killed_goes_on_and_ends_with_the_same_bytes(source: Path, tmp_path: Path) -> None:
    """Killed after the claim, while chunks are made, and while shards are written."""
    imported(source, tmp_path / "whole", settings(shard_tokens=500))
    given = f"{[str(source)]!r}, open_store('file://{tmp_path / 'out'}')"
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from import_kit import settings\n"
        "from phalanx.objects import open_store\n"
        "from phalanx.data.importing import import_tokens\n"
        f"import_tokens({given}, settings(shard_tokens=500))\n"
    )
    kills = 0
    for wanted in ("recipe.json", "chunks/00000020*", "train/train-00000005.ids.json"):
        process = subprocess.Popen([sys.executable, "-c", script, str(Path(__file__).parent)])
        deadline = time.monotonic() + 60
        while process.poll() is None and not list((tmp_path / "out").glob(wanted)):
            assert time.monotonic() < deadline
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.002)
        process.send_signal(signal.SIGKILL)
        kills += process.wait(30) == -signal.SIGKILL
    assert kills
    imported(source, tmp_path / "out", settings(shard_tokens=500))
    assert files_below(tmp_path / "out") == files_below(tmp_path / "whole")


def test_import_of_another_input_or_with_other_settings_is_refused(source: Path, tmp_path: Path) -> None:
    imported(source, tmp_path / "out", settings())
    before = files_below(tmp_path / "out")
    with pytest.raises(PhalanxError, match="vocab_size 50000 there, 60000 here"):
        imported(source, tmp_path / "out", settings(60_000))
    write_mds(tmp_path / "other", ROWS[:399], 10)
    with pytest.raises(PhalanxError, match=r"'shard\.00039\.mds' is another"):
        imported(tmp_path / "other", tmp_path / "out", settings())
    assert files_below(tmp_path / "out") == before


def test_import_does_not_depend_on_where_the_input_lies(source: Path, tmp_path: Path) -> None:
    imported(source, tmp_path / "here", settings())
    source.rename(tmp_path / "elsewhere")
    imported(f"file://{tmp_path / 'elsewhere'}/", tmp_path / "there", settings())
    assert files_below(tmp_path / "here") == files_below(tmp_path / "there")


def test_import_keeps_copies_unless_asked_and_holds_out_by_content(source: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.repeat(np.arange(8, 108).reshape(50, 2), 2, axis=0))
    _, found = imported(tmp_path / "rows.npy", tmp_path / "all", settings())
    assert len(found.lengths) == 100
    report, found = imported(tmp_path / "rows.npy", tmp_path / "few", replace(settings(), drop_copies=True))
    assert len(found.lengths) == 50 and report.counts["exact_duplicates"] == 50
    out = tmp_path / "split"
    report, found = imported(tmp_path / "rows.npy", out, replace(settings(), held_out_fraction=0.3))
    held_out = read_back(open_store(f"file://{out}"), "held_out")
    assert report.held_out is not None and 0 < len(held_out.lengths) < 60
    both = sorted(np.concatenate([found.tokens, held_out.tokens]).tolist())
    assert both == sorted(np.load(tmp_path / "rows.npy").ravel().tolist())
    train, apart = {int(token) for token in found.tokens}, {int(token) for token in held_out.tokens}
    assert not train & apart


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, "uint16"), (65_537, "uint32")])
def test_import_stores_the_smallest_type_that_the_vocabulary_needs(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    tokens = np.array([0, vocab_size - 1, EOS], ">u8")
    np.save(tmp_path / "a.npy", tokens)
    _, found = imported(tmp_path / "a.npy", tmp_path / "out", settings(vocab_size))
    manifest = json.loads((tmp_path / "out" / "train" / "manifest.json").read_text())
    assert manifest["token_dtype"] == dtype
    assert found.tokens.tolist() == tokens.tolist()


def test_import_of_a_raw_file_with_a_header_and_big_endian_ids(tmp_path: Path) -> None:
    tokens = np.concatenate(ROWS[:20])
    (tmp_path / "a.bin").write_bytes(bytes(1024) + tokens.astype(">u2").tobytes())
    _, found = imported(tmp_path / "a.bin", tmp_path / "out", settings(dtype=">uint16", skip_bytes=1024))
    assert np.array_equal(found.tokens, tokens)
    assert found.ids[1] == f"a.bin#0@{len(ROWS[0])}"


@pytest.mark.parametrize("kind", ["large_list", "fixed", "file", "uint64"])
def test_import_of_arrow_and_parquet_lists_of_every_kind(tmp_path: Path, kind: str) -> None:
    rows = [[8, 9], [10, EOS], [11, 12]]
    column = {
        "large_list": pa.array(rows, pa.large_list(pa.int16())),
        "fixed": pa.array(rows, pa.list_(pa.int32(), 2)),
        "file": pa.array(rows),
        "uint64": pa.array(rows, pa.list_(pa.uint64())),
    }[kind]
    table = pa.table({"tokens": column, "n": [3, 1, 2]})
    if kind == "file":
        source = tmp_path / "a.arrow"
        with pa.ipc.new_file(source, table.schema) as writer:
            writer.write_table(table)
    else:
        source = tmp_path / "a.parquet"
        pq.write_table(table, source)
    _, found = imported(source, tmp_path / "out", settings(id_column="n"))
    assert found.tokens.reshape(3, 2).tolist() == rows
    assert found.ids == ["3", "1", "2"]


def test_import_from_s3_to_s3_equals_one_between_folders(s3_prefix: str, source: Path, tmp_path: Path) -> None:
    there = open_store(s3_prefix)
    for name, data in files_below(source).items():
        there.create(f"in/{name}", data)
    table = pa.table({"input_ids": [row.tolist() for row in ROWS]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=50)
    with pa.ipc.new_stream(tmp_path / "b.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=30)
    for name in ("a.parquet", "b.arrow"):
        there.create(name, (tmp_path / name).read_bytes())
    imported(source, tmp_path / "out", settings())
    import_tokens([f"{s3_prefix}/in"], there.within("out"), settings(), workers=4)
    found = {info.key: there.read(f"out/{info.key}") for info in there.within("out").list()}
    assert found == files_below(tmp_path / "out")
    for name in ("a.parquet", "b.arrow"):
        import_tokens([f"{s3_prefix}/{name}"], there.within(f"{name}.out"), settings())
        assert np.array_equal(read_back(there.within(f"{name}.out")).tokens, np.concatenate(ROWS))


def test_import_with_a_tokenizer_file_copies_it_and_takes_its_vocabulary(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    words = {"<|endoftext|>": 0, **{f"w{number}": number for number in range(1, 40)}}
    Tokenizer(models.WordLevel(words, unk_token="w1")).save(str(tmp_path / "tokenizer.json"))
    np.save(tmp_path / "a.npy", np.arange(1, 40))
    given = ImportSettings(how=Understanding(), tokenizer=tmp_path / "tokenizer.json")
    report, _ = imported(tmp_path / "a.npy", tmp_path / "out", given)
    manifest = json.loads((tmp_path / "out" / "train" / "manifest.json").read_text())
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()
    assert (manifest["vocab_size"], manifest["eos_id"]) == (40, 0)
    assert manifest["tokenizer_digest"] == report.tokenizer_digest != DIGEST
    with pytest.raises(PhalanxError, match="from 40"):
        imported(tmp_path / "a.npy", tmp_path / "less", replace(given, vocab_size=39))
    imported(tmp_path / "a.npy", tmp_path / "padded", replace(given, vocab_size=64))
    with pytest.raises(PhalanxError, match="a token of the tokenizer"):
        imported(tmp_path / "a.npy", tmp_path / "none", replace(given, eos_token="</s>"))
