"""Looking at data from the command line: show, trace by text, verify; output, JSON, exit codes."""

import io
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from rich.console import Console
from split_kit import texts_of, tokenizer_bytes, write_dataset

from phalanx.cli.counting import counting, counting_bytes
from phalanx.objects import open_store

TEXTS = texts_of(4, 60)
JOB = """
[job]
name = "t"
storage = "file://{tmp}/jobs"
[model]
preset = "tiny"
[data]
train = "{url}"
shuffle_block_shards = 2
[training]
seq_len = 16
steps = 10
global_batch_size = 4
[optimizer]
lr = 1e-3
"""


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_bytes(TEXTS)


@pytest.fixture
def url(tmp_path, tokenizer):
    ids = [f"a/v1.{number}_doc.json" for number in range(60)]
    return write_dataset(tmp_path / "d", TEXTS, tokenizer, ids=ids)


@pytest.fixture
def job(tmp_path, url):
    path = tmp_path / "job.toml"
    path.write_text(JOB.format(tmp=tmp_path, url=url))
    return path


def test_show_prints_what_the_first_documents_say(phalanx, url):
    code, out, _ = phalanx("data", "show", url, "-n", 3)
    assert code == 0 and all(text in out for text in TEXTS[:3]) and TEXTS[3] not in out
    assert "--- a/v1.0_doc.json  train-00000000 document 0" in out


def test_show_takes_the_training_split_of_a_dataset(phalanx, url):
    code, out, _ = phalanx("data", "show", url.rpartition("/")[0], "-n", 1, "--json")
    shown = json.loads(out)
    assert code == 0 and shown["url"] == url
    (document,) = shown["documents"]
    assert (document["text"], document["num_tokens"]) == (TEXTS[0], len(document["tokens"]))


@pytest.mark.parametrize(
    ("options", "first", "count"),
    [
        (["--shard", "train-00000002"], 20, 1),
        (["--shard", 2, "-n", 4], 20, 4),
        (["--shard", 5, "--document", 9, "-n", 4], 59, 1),
        (["--document", "a/v1.33_doc.json"], 33, 1),
    ],
)
def test_show_begins_where_it_is_told(phalanx, url, options, first, count):
    """Case 7: ids with dots are found as they are."""
    code, out, _ = phalanx("data", "show", url, *options, "--json")
    shown = [document["text"] for document in json.loads(out)["documents"]]
    assert code == 0 and shown == TEXTS[first : first + count]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shard", "train-9"], "--shard is 'train-9': expected a shard"),
        (["--shard", 6], "a number below 6"),
        (["--shard", "9" * 5000], "(5,002 characters): expected a shard"),
        (["--shard", "train-" + "9" * 5000], "expected a shard"),
        (["--shard", 0, "--document", "9" * 5000], "leave out --shard"),
        (["--shard", 0, "--document", 10], "a number from 0 to 9"),
        (["--shard", 0, "--document", "x"], "leave out --shard"),
        (["--document", "a/v1"], "the id of a document"),
    ],
)
def test_show_of_what_is_not_there_is_one_line_and_exit_two(phalanx, url, options, message):
    code, out, err = phalanx("data", "show", url, *options)
    assert code == 2 and message in err and err.count("\n") == 1 and not out


def test_show_without_tokenizer_gives_tokens_as_json_and_says_what_is_missing(phalanx, url, tmp_path):
    (tmp_path / "d" / "tokenizer.json").unlink()
    assert phalanx("data", "show", url, "-n", 1)[0] == 2
    code, out, _ = phalanx("data", "show", url, "-n", 1, "--json")
    (document,) = json.loads(out)["documents"]
    assert code == 0 and document["text"] is None and document["tokens"]


def test_show_of_a_long_document_can_be_cut(phalanx, url):
    _, out, _ = phalanx("data", "show", url, "-n", 1, "--max-tokens", 2, "--json")
    (document,) = json.loads(out)["documents"]
    assert document["is_cut"] and len(document["tokens"]) == 2 and TEXTS[0].startswith(document["text"])


def test_trace_text_tells_documents_and_steps(phalanx, job):
    code, out, _ = phalanx("data", "trace", "--job", job, "--text", "no4x31 ", "--json", "--epochs", 1)
    found = json.loads(out)
    (visit,) = found["visits"]
    assert code == 0 and (found["documents"], found["is_all"]) == (1, True)
    assert visit["document_id"] == "a/v1.31_doc.json" and visit["steps"] and visit["text"] is None
    step = visit["steps"][0]
    _, out, _ = phalanx("data", "trace", job, "--step", step, "--json")
    assert "a/v1.31_doc.json" in {segment["document_id"] for segment in json.loads(out)["segments"]}


def test_trace_shows_what_is_found_in_one_line_each(phalanx, job):
    code, out, _ = phalanx("data", "trace", job, "--text", "no4x", "--limit", 2, "--epochs", 1, "--show")
    lines = [line for line in out.splitlines() if "no4x" in line]
    assert code == 0 and len(lines) == 2 and "2 documents, the first that say it" in out
    assert "no4x" in phalanx("data", "trace", job, "--step", 2, "--show")[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--text", ""], "--text"),
        (["--text", "nobody says this"], "--text is 'nobody says this'"),
        (["--text", "x", "--step", 1], "either --step N"),
    ],
)
def test_trace_mistake_is_one_line_and_exit_two(phalanx, job, options, message):
    code, out, err = phalanx("data", "trace", job, *options)
    assert code == 2 and message in err and err.count("\n") == 1 and not out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--step", 10**20], "phalanx: --step is 100000000000000000000: expected"),
        (["--step", 9 * 10**18], "the job ends at step 10; name a step that it trains"),
        (["--document", "a/v1.3_doc.json", "--epochs", 10**9], "expected 10,000 passes or fewer"),
        (["--text", "no4x31 ", "--epochs", 10**20], "expected 10,000 passes or fewer"),
    ],
)
def test_trace_too_far_is_one_line_and_exit_two(phalanx, job, options, message):
    code, out, err = phalanx("data", "trace", job, *options)
    assert code == 2 and message in err and err.count("\n") == 1 and not out


def test_trace_text_with_a_limit_beyond_any_number_shows_all(phalanx, job):
    code, out, _ = phalanx("data", "trace", job, "--text", "no4x31 ", "--limit", 10**20, "--json")
    assert code == 0 and json.loads(out)["is_all"]


@pytest.mark.parametrize("options", [["--step", 11], ["--document", "a/v1.3_doc.json", "--epochs", 9]])
def test_trace_says_where_the_job_ends_if_it_tells_of_later_steps(phalanx, job, options):
    code, out, _ = phalanx("data", "trace", job, *options)
    assert code == 0 and out.splitlines()[-1].startswith("the job ends at step 10: the steps behind it are")
    assert json.loads(phalanx("data", "trace", job, *options, "--json")[1])["last_step"] == 10
    assert "the job ends" not in phalanx("data", "trace", job, "--step", 10)[1]


@pytest.mark.parametrize(
    ("command", "option", "beside"),
    [
        ("trace {job} --step 1", "--limit 3", "--step"),
        ("trace {job} --step 1", "--epochs 3", "--step"),
        ("trace {job} --document x", "--limit 3", "--document"),
        ("show {url}", "--max-tokens 4", "the facts of a dataset"),
        ("verify {url}", "--set a.b=1", "the URL of a dataset"),
        ("verify {url}", "--context c.toml", "the URL of a dataset"),
    ],
)
def test_option_without_effect_is_refused_in_one_line(phalanx, job, url, command, option, beside):
    code, out, err = phalanx("data", *f"{command} {option}".format(job=job, url=url).split())
    assert code == 2 and not out and err.count("\n") == 1
    assert err.startswith(f"phalanx: {option.split()[0]} is ")
    assert err.endswith(f": expected no such option with {beside}; leave one of them out\n")


def test_counting_says_a_line_every_five_seconds_where_there_is_no_terminal():
    now, said = [0.0], io.StringIO()
    with counting(Console(file=said), clock=lambda: now[0]) as observe:
        for done in range(1, 13):
            now[0] += 1.0
            observe("passes", done, 2000)
    assert said.getvalue() == "passes: 5 of 2,000\npasses: 10 of 2,000\n"


def test_counting_bytes_from_many_threads_says_each_line_once():
    said, now = io.StringIO(), [0.0]
    with counting_bytes(Console(file=said), "verify", 8000, clock=lambda: now[0]) as told:
        for second in (6.0, 12.0):
            now[0] = second
            with ThreadPoolExecutor(8) as threads:
                list(threads.map(told, [100] * 40))
    first, second = said.getvalue().splitlines()
    assert first.startswith("verify: ") and first.endswith("00 of 8,000 bytes")
    assert int(second.split()[1].replace(",", "")) > 4000


@pytest.mark.parametrize("options", [["--document", "doc/4.txt"], ["--text", "no4x31 "], ["--step", 2]])
def test_trace_names_the_source_in_a_job_of_several_alone(phalanx, job, url, tmp_path, tokenizer, options):
    other = write_dataset(tmp_path / "o", texts_of(5, 20), tokenizer)
    text = job.read_text()
    sources = f'[data.sources.web]\nurl = "{url}"\nweight = 1\n[data.sources.code]\nurl = "{other}"\nweight = 1\n'
    mixed = tmp_path / "mixed.toml"
    mixed.write_text(text.replace(f'train = "{url}"\n', "").replace("[training]", f"{sources}[training]"))
    code, out, err = phalanx("data", "trace", mixed, *options)
    assert code == 0 and "source" in out.splitlines()[0] and ("web" in out or "code" in out), err
    if options[0] == "--text":
        assert "source" not in phalanx("data", "trace", job, *options)[1]


@pytest.mark.parametrize("where", [[], ["x.toml", "--job", "y.toml"]])
def test_trace_of_no_job_or_two_is_exit_two(phalanx, where):
    code, _, err = phalanx("data", "trace", *where, "--step", 1)
    assert code == 2 and "one job" in err


def test_trace_text_without_tokenizer_is_told(phalanx, job, tmp_path):
    (tmp_path / "d" / "tokenizer.json").unlink()
    code, _, err = phalanx("data", "trace", job, "--text", "no4x31 ")
    assert code == 2 and "tokenizer.json" in err and err.count("\n") == 1


@pytest.mark.parametrize("options", [["--step", 1], ["--document", "a/v1.3_doc.json"], ["--step", 1, "--json"]])
def test_trace_show_without_tokenizer_is_told(phalanx, job, tmp_path, options):
    (tmp_path / "d" / "tokenizer.json").unlink()
    assert phalanx("data", "trace", job, *options)[0] == 0
    code, out, err = phalanx("data", "trace", job, *options, "--show")
    assert code == 2 and "tokenizer.json" in err and err.count("\n") == 1 and not out


def test_verify_names_each_damage_with_its_offset(phalanx, url, tmp_path):
    path = tmp_path / "d" / "train" / "train-00000003.tar"
    tar = bytearray(path.read_bytes())
    tar[700] ^= 1
    path.write_bytes(tar)
    code, out, _ = phalanx("data", "verify", url)
    assert code == 1 and "train-00000003.tar: member 0 at byte 640: the tokens do not have their digest" in out
    code, out, _ = phalanx("data", "verify", url, "--json")
    (damage,) = json.loads(out)["damages"]
    assert (damage["shard"], damage["member"], damage["offset"]) == ("train-00000003", 0, 640)


@pytest.mark.parametrize("told_by", ["shards", "report"])
def test_verify_of_a_split_whose_manifest_is_lost_names_it(phalanx, url, tmp_path, told_by):
    dataset = url.rpartition("/")[0]
    write_dataset(tmp_path / "d" / "more", TEXTS, (tmp_path / "d" / "tokenizer.json").read_bytes())
    train = tmp_path / "d" / "train"
    if told_by == "report":
        report = {"format": "phalanx.report/1", "train": {"name": "train"}, "held_out": None}
        (tmp_path / "d" / "report.json").write_text(json.dumps(report))
        assert phalanx("data", "verify", dataset)[0] == 0
        for path in train.iterdir():
            path.unlink()
    else:
        (train / "manifest.json").unlink()
        code, out, _ = phalanx("data", "verify", url)
        assert code == 1 and out.startswith("manifest.json: it is missing")
    code, out, _ = phalanx("data", "verify", dataset)
    assert code == 1 and "train/manifest.json: it is missing" in out and "6 shards checked" in out
    found = json.loads(phalanx("data", "verify", dataset, "--json")[1])
    assert not found["ok"] and [(each["path"], each["key"]) for each in found["damages"]] == [
        ("train", "manifest.json")
    ]


def test_verify_that_storage_ends_tells_what_was_found_so_far(phalanx, url, tmp_path, monkeypatch):
    from phalanx.data import verification
    from phalanx.objects.base import StoreError

    path = tmp_path / "d" / "train" / "train-00000000.tar"
    path.write_bytes(path.read_bytes()[:-1])
    whole = verification._checked

    def failing(store, split, entry, observe):
        if entry.name == "train-00000004":
            raise StoreError("the store is gone")
        return whole(store, split, entry, observe)

    monkeypatch.setattr(verification, "_checked", failing)
    code, out, err = phalanx("data", "verify", url)
    assert code == 1 and "train-00000000.tar" in out and "so far" in out and "the store is gone" in err


def test_looking_at_data_on_s3_is_the_same(phalanx, s3_prefix, url, tmp_path):
    from phalanx.stream import open as open_documents

    away = open_store(s3_prefix)
    for path in sorted((tmp_path / "d").rglob("*")):
        if path.is_file():
            away.create(str(path.relative_to(tmp_path / "d")), path.read_bytes())
    documents = open_documents(s3_prefix)
    assert documents[17].text == TEXTS[17] and [each.index for each in documents.by_id("a/v1.5_doc.json")] == [5]
    assert phalanx("data", "verify", s3_prefix)[0] == 0
    code, out, _ = phalanx("data", "show", f"{s3_prefix}/train", "--shard", 3, "--json")
    assert code == 0 and json.loads(out)["documents"][0]["text"] == TEXTS[30]


@pytest.mark.parametrize("command", ["ls", "show", "verify"])
@pytest.mark.parametrize(
    ("path", "url_of"), [("{tmp}/d", "file://{tmp}/d"), ("./d", "file://./d"), ("d/train", "file://./d/train")]
)
def test_path_where_a_url_is_expected_is_told_with_its_url(phalanx, url, tmp_path, monkeypatch, command, path, url_of):
    monkeypatch.chdir(tmp_path)
    code, out, err = phalanx("data", command, path.format(tmp=tmp_path))
    told = url_of.format(tmp=tmp_path)
    assert code == 2 and err.endswith(f"write {told}\n") and err.count("\n") == 1 and not out
    assert phalanx("data", command, told)[0] == 0
