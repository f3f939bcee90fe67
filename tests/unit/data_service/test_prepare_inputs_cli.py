"""Inputs through the whole command: the same dataset from a disk and a bucket, and damage as one line."""

import json

import pytest
from corpus_builders import json_lines, packed, parquet_bytes, tar_bytes, write_corpus, write_file
from import_kit import rows_of, settings, write_megatron
from typer import Typer

from phalanx.cli import data
from phalanx.cli.errors import run_reporting_errors
from phalanx.core.errors import PhalanxError
from phalanx.data.importing import import_tokens
from phalanx.objects import open_store

TEXTS = [f"{number} the line holds when one falls " * (number % 9 + 1) for number in range(120)]


@pytest.fixture
def prepare(monkeypatch, capsys):
    """Runs the command; gives exit code, standard output and standard error."""

    def run(*arguments):
        app = Typer()
        data.register(app)
        app.callback()(lambda: None)
        options = ("--vocab-size", "300", "--workers", "1")
        monkeypatch.setattr("sys.argv", ["phalanx", "data", "prepare", *map(str, arguments), *options])
        code = run_reporting_errors(app)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def corpus(tmp_path):
    """One file of each kind, below names that are sorted."""
    folder = tmp_path / "corpus"
    texts = [TEXTS[start : start + 30] for start in range(0, 120, 30)]
    write_corpus(folder / "a", 20)
    write_file(folder, "b.jsonl.gz", packed(".gz", json_lines([{"text": text} for text in texts[0]])))
    write_file(folder, "c.jsonl.zst", packed(".zst", json_lines([{"text": text} for text in texts[1]])))
    write_file(folder, "d.parquet", parquet_bytes({"text": texts[2]}))
    write_file(folder, "e.tar", tar_bytes([(f"{n}.txt", text.encode()) for n, text in enumerate(texts[3])]))
    write_file(folder, "f.bin", b"other")
    return folder


def test_prepare_from_a_bucket_gives_the_dataset_of_the_same_files_on_a_disk(corpus, tmp_path, s3_prefix, prepare):
    store = open_store(s3_prefix)
    for file in corpus.rglob("*"):
        if file.is_file():
            store.create(file.relative_to(corpus).as_posix(), file.read_bytes())
    there = prepare(s3_prefix, "--out", f"file://{tmp_path}/there", "--json")
    here = prepare(corpus, "--out", f"file://{tmp_path}/here", "--json")
    assert here[0] == there[0] == 0
    objects = [{info.key for info in open_store(f"file://{tmp_path}/{name}").list()} for name in ("here", "there")]
    manifests = [(tmp_path / name / "train/manifest.json").read_bytes() for name in ("here", "there")]
    assert manifests[0] == manifests[1] and objects[0] == objects[1]
    assert "files left out: 1 .bin" in here[2] and "files left out: 1 .bin" in there[2]


def test_prepare_with_chosen_fields_and_lengths_reports_what_it_left_out(tmp_path, prepare):
    records = [{"body": {"raw": text}, "url": f"u{number}"} for number, text in enumerate(TEXTS)]
    records += [{"body": {"raw": "short"}, "url": "s"}, {"body": {"raw": "x" * 5000}}, {"body": {}}]
    file = write_file(tmp_path, "a.jsonl", json_lines(records) + b"{broken\n")
    options = ("--text-field", "body.raw", "--id-field", "url", "--min-chars", "20", "--max-chars", "4000")
    code, output, _ = prepare(file, "--out", f"file://{tmp_path}/out", *options, "--json")
    assert code == 0
    counts = json.loads(output)["counts"]
    names = ("too_short", "too_long", "records_without_text", "broken_records", "records_without_id")
    assert [counts[name] for name in names] == [1, 1, 1, 1, 0]


@pytest.mark.parametrize("name", ["b.jsonl.gz", "c.jsonl.zst", "d.parquet", "e.tar"])
def test_prepare_with_a_cut_file_exits_2_with_one_line_that_names_it(corpus, tmp_path, name, prepare):
    file = corpus / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2 + 9])
    code, output, errors = prepare(corpus, "--out", f"file://{tmp_path}/out")
    lines = [line for line in errors.splitlines() if not line.startswith("files left out")]
    assert code == 2 and not output and len(lines) == 1
    assert f"{file}, byte" in lines[0] and "expected a whole" in lines[0]
    assert not (tmp_path / "out/train/manifest.json").exists()


def test_prepare_option_without_effect_beside_another_is_refused_and_writes_nothing(corpus, tmp_path, prepare):
    (tmp_path / "t.json").write_text("{}")
    code, _, said = prepare(corpus, "--out", f"file://{tmp_path}/out", "--tokenizer", tmp_path / "t.json")
    assert code == 2 and not (tmp_path / "out").exists()
    assert said == "phalanx: --vocab-size is 300: expected no such option with --tokenizer; leave one of them out\n"


@pytest.mark.parametrize(
    ("below", "pattern"), [("", ""), ("/out", ""), ("/a/out", ""), ("/out", "/**"), ("/a/out", "/a/**/*.tar")]
)
def test_prepare_and_import_into_their_own_prefix_of_a_bucket_are_refused(s3_prefix, prepare, below, pattern):
    store = open_store(s3_prefix)
    store.create("a/t.txt", b"text of a file")
    store.create("a/t.tar", tar_bytes([("t.txt", b"text")]))
    code, output, errors = prepare(f"{s3_prefix}{pattern}", "--out", f"{s3_prefix}{below}")
    assert code == 2 and not output
    assert f"--out is '{s3_prefix}{below}': expected a folder outside of the input {s3_prefix}" in errors
    if not pattern:
        with pytest.raises(PhalanxError, match=f"expected a folder outside of the input {s3_prefix};"):
            import_tokens([s3_prefix], open_store(s3_prefix + below), settings())
    assert [info.key for info in store.list()] == ["a/t.tar", "a/t.txt"]


def test_prepare_beside_its_input_in_a_bucket_is_no_mistake(s3_prefix, prepare):
    open_store(s3_prefix).create("in/t.txt", b"text of a file, and some more of it")
    code, _, errors = prepare(f"{s3_prefix}/in", "--out", f"{s3_prefix}/in-out", "--held-out-fraction", "0")
    assert code == 0, errors


def test_import_of_a_megatron_prefix_into_a_folder_of_its_name_is_refused(tmp_path):
    write_megatron(tmp_path / "m", rows_of(3))
    with pytest.raises(PhalanxError, match="expected a folder outside of the input"):
        import_tokens([str(tmp_path / "m")], open_store(f"file://{tmp_path}/m"), settings())


@pytest.mark.parametrize("command", ["prepare", "import"])
def test_prepare_and_import_of_an_empty_input_do_not_take_the_current_folder(tmp_path, phalanx, monkeypatch, command):
    write_file(tmp_path, "t.txt", b"text of a file")
    write_file(tmp_path, "t.bin", bytes(64))
    monkeypatch.chdir(tmp_path)
    options = () if command == "prepare" else ("--dtype", "uint16", "--vocab-size", 9, "--eos-id", 0)
    told = () if command == "prepare" else ("--tokenizer-digest", f"sha256:{'ab' * 32}")
    code, output, errors = phalanx("data", command, "", "--out", f"file://{tmp_path}/out", *options, *told)
    assert code == 2 and not output and not (tmp_path / "out").exists()
    assert errors.startswith("phalanx: Invalid value for 'INPUT...': '' names nothing: expected a file, a folder,")
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    "command",
    [
        "prepare {file} --out memory://x",
        "import {file} --out memory://",
        "merge --out memory://",
        "ls memory://x",
        "show memory://x",
        "verify memory://x",
    ],
)
def test_data_commands_refuse_storage_that_ends_with_them(tmp_path, phalanx, command):
    file = write_file(tmp_path, "t.txt", b"text of a file")
    code, output, errors = phalanx("data", *command.format(file=file).split())
    assert code == 2 and not output and errors.count("\n") == 1
    assert "memory://" in errors and "gone when a command ends" in errors


def test_a_wrong_url_is_told_the_forms_that_last(tmp_path, phalanx):
    code, _, errors = phalanx("data", "prepare", write_file(tmp_path, "t.txt", b"text"), "--out", "gs://bucket/x")
    assert code == 2 and "s3://bucket/prefix" in errors and "memory" not in errors


@pytest.mark.parametrize(
    ("name", "data", "options", "reason"),
    [
        ("a.txt", b"\xff\xfe\xfa", (), "1 of 1 documents are not UTF-8: convert them, as with iconv"),
        ("a.jsonl", b"{broken\n" * 3, (), "3 of 3 documents are broken records: check what wrote them"),
        ("a.jsonl", b'{"body": "x"}\n' * 2 + b"{\n", (), "2 of 3 documents have no text in 'text': name the field"),
        ("a.jsonl", b"\n\n", (), "it holds no document: check the path"),
        ("a.txt", b" \n ", (), "1 of 1 documents are white space only: check the path"),
        ("a.txt", b"", (), "1 of 1 documents are files of 0 bytes: check the path"),
        ("a.txt", b"short", ("--min-chars", 9), "1 of 1 documents are shorter than --min-chars 9: lower it"),
        ("a.txt", b"a long one", ("--max-chars", 9), "1 of 1 documents are longer than --max-chars 9: raise it"),
        ("a.txt", b"a long one", ("--max-bytes", 9), "no text lies before --max-bytes 9: raise it"),
        ("a.txt", b"only one", ("--held-out-fraction", 0.9999999), "lower --held-out-fraction or give more documents"),
    ],
)
def test_prepare_of_input_without_usable_text_names_the_true_reason(tmp_path, prepare, name, data, options, reason):
    file = write_file(tmp_path, name, data)
    code, output, errors = prepare(file, "--out", f"file://{tmp_path}/out", *options)
    assert code == 2 and not output and errors.count("\n") == 1
    assert "expected at least one document with text to train on" in errors and f"; {reason}" in errors
    assert ("--max-bytes" in errors) == ("--max-bytes" in options)


@pytest.mark.parametrize("fraction", ["0", "0.0000001"])
def test_prepare_and_merge_ask_for_a_larger_fraction_only_where_documents_were_to_be_held_out(
    corpus, tmp_path, prepare, phalanx, fraction
):
    out, options = f"file://{tmp_path}/out", ("--held-out-fraction", fraction)
    wants = fraction != "0"
    assert ("raise --held-out-fraction" in prepare(corpus, "--out", out, *options)[1]) == wants
    prepare(corpus, "--out", f"{out}2", *options, "--part", "1/1")
    code, output, errors = phalanx("data", "merge", "--out", f"{out}2")
    assert code == 0, errors
    assert ("raise --held-out-fraction" in output) == wants


def test_prepare_with_a_folder_for_a_tokenizer_says_so(corpus, tmp_path, phalanx):
    code, _, errors = phalanx("data", "prepare", corpus, "--out", f"file://{tmp_path}/out", "--tokenizer", tmp_path)
    assert code == 2 and f"--tokenizer is '{tmp_path}': expected a tokenizer.json file; it is a folder" in errors
