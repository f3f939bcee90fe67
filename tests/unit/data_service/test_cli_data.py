"""The `phalanx data` commands as a user meets them: output, JSON, exit codes."""

import json

import pytest
from corpus_builders import write_corpus


@pytest.fixture
def prepared(phalanx, tmp_path):
    folder, url = write_corpus(tmp_path / "corpus"), f"file://{tmp_path}/d"
    options = ["--vocab-size", 300, "--held-out-fraction", 0.2, "--shard-tokens", 900]
    code, out, _ = phalanx("data", "prepare", folder, "--out", url, *options, "--json")
    assert code == 0
    return url, json.loads(out)


JOB = """
[job]
name = "t"
storage = "file:///nowhere"
[model]
preset = "tiny"
[data]
train = "{url}/train"
shuffle_block_shards = 2
[training]
seq_len = 16
steps = 10
global_batch_size = 4
[optimizer]
lr = 1e-3
"""


def test_cli_prepare_tells_what_it_made(phalanx, prepared):
    url, report = prepared
    assert report["train"]["num_documents"] + report["held_out"]["num_documents"] == 60
    code, out, _ = phalanx("data", "ls", url, "--json")
    splits = json.loads(out)["splits"]
    assert code == 0 and [split["name"] for split in splits] == ["held_out", "train"]
    assert splits[1]["digest"] == report["train"]["digest"]
    assert phalanx("data", "ls", url)[1].count("sha256:") == 2


def test_cli_show_gives_recipe(phalanx, prepared):
    code, out, _ = phalanx("data", "show", prepared[0] + "/train", "--json")
    (split,) = json.loads(out)["splits"]
    assert code == 0 and split["recipe"]["shard_tokens"] == 900 and not split["is_held_out"]
    assert "tokenizer_digest" in phalanx("data", "show", prepared[0])[1]


def test_cli_verify_damage_exits_one_and_names_it(phalanx, prepared, tmp_path):
    assert phalanx("data", "verify", prepared[0])[0] == 0
    tar = tmp_path / "d" / "train" / "train-00000000.tar"
    tar.write_bytes(tar.read_bytes()[:-2000])
    code, out, _ = phalanx("data", "verify", prepared[0])
    assert code == 1 and "train/train-00000000.tar: it has" in out
    code, out, _ = phalanx("data", "verify", prepared[0], "--json")
    assert code == 1 and not json.loads(out)["ok"]


@pytest.mark.parametrize("below", ["", "/train"])
@pytest.mark.parametrize("change", ["flip", "remove"])
def test_cli_verify_damaged_tokenizer_exits_one_and_names_it_once(phalanx, prepared, tmp_path, below, change):
    """The tokenizer lies above the splits: found from the dataset's URL and from a split's."""
    path = tmp_path / "d" / "tokenizer.json"
    data = path.read_bytes()
    path.unlink()
    if change == "flip":
        path.write_bytes(data[:-9] + b"\x00" + data[-8:])
    code, out, _ = phalanx("data", "verify", prepared[0] + below)
    name = "../tokenizer.json" if below else "tokenizer.json"
    digest = prepared[1]["tokenizer_digest"]
    what = f"its digest is not {digest}" if change == "flip" else "it is missing"
    assert code == 1 and out.splitlines()[0] == f"{name}: {what}" and "1 damages" in out
    row = json.loads(phalanx("data", "verify", prepared[0] + below, "--json")[1])["damages"][0]
    assert row["key"] == "tokenizer.json" and row["path"] == (".." if below else "") and row["shard"] is None


def test_cli_verify_tokenizer_in_the_split_folder_counts(phalanx, prepared, tmp_path):
    (tmp_path / "d" / "tokenizer.json").rename(tmp_path / "d" / "train" / "tokenizer.json")
    assert phalanx("data", "verify", prepared[0] + "/train")[0] == 0
    code, out, _ = phalanx("data", "verify", prepared[0])
    assert code == 1 and out.startswith("tokenizer.json: it is missing\n"), "the held-out split has none"


@pytest.mark.parametrize("question", [["--step", 3], ["--document", "nope"]])
@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda data: data[:40], "its digest is not xxh3:"),
        (lambda data: data.replace(b"part", b"PART"), "its digest is not xxh3:"),
        (None, "it is missing"),
    ],
)
def test_cli_trace_damaged_ids_is_one_line_and_exit_one(phalanx, prepared, tmp_path, question, change, what):
    job = tmp_path / "job.toml"
    job.write_text(JOB.format(url=prepared[0]))
    for path in (tmp_path / "d" / "train").glob("*.ids.json"):
        data = path.read_bytes()
        path.unlink()
        if change is not None:
            path.write_bytes(change(data))
    code, out, err = phalanx("data", "trace", job, *question)
    assert code == 1 and err.count("\n") == 1 and not out
    assert f"{prepared[0]}/train/train-0" in err and f".ids.json is damaged: {what}" in err


def test_cli_prepare_refused_then_corrected_goes_to_the_same_folder(phalanx, tmp_path):
    folder, url = write_corpus(tmp_path / "corpus"), f"file://{tmp_path}/d"
    (tmp_path / "no_tokenizer.json").write_text("{}")
    command = ["data", "prepare", folder, "--out", url]
    for wrong in (
        ["--tokenizer", tmp_path / "no_tokenizer.json"],
        ["--vocab-size", 99999999999],
        ["--vocab-size", 300, "--eos-token", ""],
        ["--vocab-size", 300, "--held-out-fraction", 0.9999999],
    ):
        code, _, err = phalanx(*command, *wrong)
        assert code == 2 and err.count("\n") == 1
        assert not [found for found in (tmp_path / "d").rglob("*") if found.is_file()], err
    assert phalanx(*command, "--vocab-size", 300)[0] == 0


def test_cli_trace_step_and_document_agree(phalanx, prepared, tmp_path):
    job = tmp_path / "job.toml"
    job.write_text(JOB.format(url=prepared[0]))
    code, out, err = phalanx("data", "trace", job, "--step", 3, "--json")
    assert code == 0, err
    segments = json.loads(out)["segments"]
    assert sum(segment["length"] for segment in segments) == 4 * 16
    assert {segment["window"] for segment in segments} == set(range(8, 12))
    for document in {segment["document_id"] for segment in segments}:
        _, out, _ = phalanx("data", "trace", job, "--document", document, "--epochs", 3, "--json")
        visits = json.loads(out)["visits"]
        assert [visit["epoch"] for visit in visits] == [0, 1, 2] and 3 in visits[0]["steps"]
    assert "v1." in phalanx("data", "trace", job, "--step", 3)[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prepare", "{tmp}/none", "--out", "file://{tmp}/d"], "nothing is there: check the path"),
        (["prepare", "{tmp}", "--out", "file://{tmp}/d"], "it holds none: check the path"),
        (["ls", "file://{tmp}/d"], "phalanx data prepare INPUT --out URL"),
        (["verify", "file://{tmp}/d"], "phalanx data prepare INPUT --out URL"),
        (["trace", "{tmp}/job.toml"], "either --step N or --document ID"),
        (["catalog", "--digest", "8a1c"], "--digest is '8a1c': expected sha256: and 64 hexadecimal digits; write"),
    ],
)
def test_cli_user_mistake_is_one_line_and_exit_two(phalanx, tmp_path, arguments, message):
    code, out, err = phalanx("data", *(argument.format(tmp=tmp_path) for argument in arguments))
    assert code == 2 and message in err and err.count("\n") == 1 and not out


def test_cli_trace_unknown_document_or_step_is_exit_two(phalanx, prepared, tmp_path):
    job = tmp_path / "job.toml"
    job.write_text(JOB.format(url=prepared[0]))
    for arguments in (["--document", "nope"], ["--step", 0]):
        code, _, err = phalanx("data", "trace", job, *arguments)
        assert code == 2 and err.startswith(f"phalanx: {arguments[0]} is") and err.count("\n") == 1
