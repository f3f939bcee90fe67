"""A check of a dataset that ends early goes on from its state file, and still finds what was damaged meanwhile."""

import json
import os
import shutil
import signal
import threading
from contextlib import ExitStack

import pytest
from split_kit import texts_of, tokenizer_bytes, write_dataset
from support.jobs import PHALANX, Command, wait_until

from phalanx.data.checked import CheckedShards
from phalanx.objects import open_store
from phalanx.objects.faults import FaultyStore

TEXTS = texts_of(4, 80)
NUM_SHARDS, STUCK = 8, 5


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "d"
    write_dataset(folder, TEXTS, tokenizer_bytes(TEXTS))
    return folder


@pytest.fixture
def dataset(made, tmp_path):
    """A copy of its own, so that every file is as new as the test."""
    return shutil.copytree(made, tmp_path / "d", copy_function=shutil.copyfile)


@pytest.fixture
def state(tmp_path):
    return tmp_path / "state"


def tar(dataset, number):
    return dataset / "train" / f"train-{number:08d}.tar"


def flip(path, byte=700):
    """Damage as a failing disk or a stray program makes it: other bytes in the same file."""
    with path.open("r+b") as file:
        file.seek(byte)
        old = file.read(1)
        file.seek(byte)
        file.write(bytes([old[0] ^ 1]))


def shards_in(state):
    """Numbers of the shards that the state calls whole."""
    lines = state.read_text().splitlines() if state.exists() else []
    return sorted(json.loads(line)["shard"] for line in lines[1:])


def ended_early(dataset, state, end):
    """A check that meets a tar that never answers, ended once all others are done; it, and that tar is back.

    Without a state, where nobody sees which are done, there are two such tars: asking whether one is waited for lets
    the check go on from there, and the other still holds it.
    """
    stuck, kept = tar(dataset, STUCK), dataset.parent / "kept"
    stuck.rename(kept)
    os.mkfifo(stuck)
    if state is None:
        tar(dataset, STUCK + 1).unlink()
        os.mkfifo(tar(dataset, STUCK + 1))
    others = [number for number in range(NUM_SHARDS) if number != STUCK]
    options = [] if state is None else ["--state", state]
    with ExitStack() as pipe, Command([PHALANX, "data", "verify", dataset.as_uri(), *options]) as command:
        if state is None:
            wait_until(lambda: is_waited_for(stuck, pipe), 60, "a thread waits for the tar")
        else:
            wait_until(lambda: shards_in(state) == others, 60, "the other shards are checked")
        command.process.send_signal(end)
        finished = command.finish(20)
    stuck.unlink()
    kept.rename(stuck)
    return finished


def is_waited_for(pipe, opened):
    """Whether somebody waits until the pipe is written; who does waits on until `opened` ends."""
    try:
        opened.callback(os.close, os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True


def test_verify_killed_goes_on_and_finds_what_was_damaged_meanwhile(phalanx, dataset, state):
    ended_early(dataset, state, signal.SIGKILL)
    flip(tar(dataset, 2))
    code, out, _ = phalanx("data", "verify", dataset.as_uri(), "--state", state)
    assert code == 1 and "train-00000002.tar: member 0 at byte 640" in out
    # The killed check is begun anew for the damaged shard and the one it was waiting for, whose file was moved twice.
    assert f"{NUM_SHARDS} shards checked ({NUM_SHARDS - 2} of them before" in out and "1 damages" in out
    flip(tar(dataset, 2))
    code, out, _ = phalanx("data", "verify", dataset.as_uri(), "--state", state, "--json")
    told = json.loads(out)
    assert code == 0 and told["ok"] and (told["shards"], told["shards_checked_earlier"]) == (NUM_SHARDS, NUM_SHARDS - 1)
    assert not state.exists(), "whole: the next check begins anew"


def test_verify_killed_reads_only_what_is_left(phalanx, dataset, state, monkeypatch):
    ended_early(dataset, state, signal.SIGKILL)
    store = FaultyStore(open_store(dataset.as_uri()))
    monkeypatch.setattr("phalanx.objects.open_store", lambda url: store)
    code, out, _ = phalanx("data", "verify", dataset.as_uri(), "--state", state)
    read = {call.key for call in store.calls if call.operation == "read" and "0000" in call.key}
    names = ("tar", "index.safetensors", "ids.json")
    assert code == 0 and read == {f"train/train-{STUCK:08d}.{name}" for name in names}, out


def test_verify_interrupted_ends_at_once_and_says_how_to_go_on(phalanx, dataset, state):
    finished = ended_early(dataset, state, signal.SIGINT)
    assert finished.code == 130 and finished.err == (
        f"phalanx: interrupted; the same command goes on where it ended (--state {state})\n"
    )
    assert "0 damages so far" in finished.out
    code, out, _ = phalanx("data", "verify", dataset.as_uri(), "--state", state)
    assert code == 0 and f"({NUM_SHARDS - 1} of them before" in out


def test_verify_interrupted_without_a_state_names_the_option(dataset):
    finished = ended_early(dataset, None, signal.SIGINT)
    assert finished.code == 130 and finished.err.startswith("phalanx: interrupted; nothing is kept: with --state FILE")
    assert finished.err.count("\n") == 1


@pytest.mark.parametrize("suffix", ["tar", "index.safetensors", "ids.json"])
@pytest.mark.parametrize("damage", ["missing", "replaced"])
def test_verify_again_reads_a_shard_of_which_an_object_was_changed(phalanx, dataset, state, suffix, damage):
    flip(tar(dataset, 7))  # so that the state stays
    command = "data", "verify", dataset.as_uri(), "--state", state
    assert phalanx(*command)[0] == 1 and shards_in(state) == [*range(7)]
    path = tar(dataset, 3).with_suffix("." + suffix)
    data = path.read_bytes()
    path.unlink()
    if damage == "replaced":
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    code, out, _ = phalanx(*command)
    assert code == 1 and f"train/{path.name}: " in out and "train-00000007.tar" in out and "(6 of them before" in out


def test_verify_again_of_another_manifest_believes_nothing(phalanx, dataset, state):
    """The same shards under another manifest may be asked for other digests."""
    flip(tar(dataset, 7))
    command = "data", "verify", dataset.as_uri(), "--state", state
    assert phalanx(*command)[0] == 1
    manifest = dataset / "train" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"recipe": {"other": 1}}))
    code, out, _ = phalanx(*command)
    assert code == 1 and "of them before" not in out


@pytest.mark.parametrize(
    "tail", [b'{"folder":"train","sha', b"\0\0\0\n[]\n3\n{}\n", b'{"folder":"train","shard":"x"}\n']
)
def test_verify_goes_on_behind_a_line_that_was_cut_or_spoiled(phalanx, dataset, state, tail):
    flip(tar(dataset, 7))
    command = "data", "verify", dataset.as_uri(), "--state", state
    assert phalanx(*command)[0] == 1
    header, _, rest = state.read_bytes().split(b"\n", 2)
    state.write_bytes(header + b"\n" + rest + tail)  # the line of one shard is lost
    code, out, _ = phalanx(*command)
    assert code == 1 and "(6 of them before" in out
    assert phalanx(*command)[1].count("(7 of them before") == 1, "what is appended behind a cut line counts"


@pytest.mark.parametrize(
    "content", [b"my notes\n", b"{}\n", b'{"format":"phalanx.verify/2","url":"","begun":""}\n', b"x"]
)
def test_verify_state_that_is_another_file_is_refused_and_kept(phalanx, dataset, state, content):
    state.write_bytes(content)
    code, out, err = phalanx("data", "verify", dataset.as_uri(), "--state", state)
    assert code == 2 and not out and err.count("\n") == 1 and str(state) in err
    assert state.read_bytes() == content


def test_verify_state_of_another_dataset_is_refused(phalanx, dataset, state):
    flip(tar(dataset, 7))
    assert phalanx("data", "verify", dataset.as_uri(), "--state", state)[0] == 1
    code, _, err = phalanx("data", "verify", f"{dataset.as_uri()}/train", "--state", state)
    assert code == 2 and f"found that of {dataset.as_uri()}" in err and err.count("\n") == 1


def test_verify_state_in_use_is_refused(phalanx, dataset, state):
    with CheckedShards(state, dataset.as_uri()):
        code, _, err = phalanx("data", "verify", dataset.as_uri(), "--state", state)
    assert code == 2 and "no other `phalanx data verify` uses" in err and err.count("\n") == 1


@pytest.mark.parametrize("place", [".", "not/there"])
def test_verify_state_that_cannot_be_a_file_is_refused(phalanx, dataset, tmp_path, place):
    code, out, err = phalanx("data", "verify", dataset.as_uri(), "--state", tmp_path / place)
    assert code == 2 and not out and err.count("\n") == 1 and "--state" in err


def test_verify_state_on_a_full_disk_ends_with_one_line(phalanx, dataset, state, monkeypatch):
    write = os.write

    def full(file, data):
        if b'"shard":3' in bytes(data):
            raise OSError(28, "No space left on device")
        return write(file, data)

    monkeypatch.setattr("os.write", full)
    code, out, err = phalanx("data", "verify", dataset.as_uri(), "--state", state)
    assert code == 2 and "No space left" in err and err.count("\n") == 1 and "so far" in out


def test_verify_of_a_job_has_no_state(phalanx, state):
    code, _, err = phalanx("data", "verify", "job.toml", "--state", state)
    assert code == 2 and "--state" in err and not state.exists()


def test_verify_abandoned_waits_for_no_read(made):
    """Who stops asking is free at once, though a thread reads on."""
    from phalanx.data.verification import verify_split
    from phalanx.objects.faults import delay, on
    from phalanx.stream import open_split

    go, entered, ended = threading.Event(), threading.Event(), threading.Event()

    def wait():
        entered.set()
        go.wait(60)
        ended.set()

    inner = open_store((made / "train").as_uri())
    store = FaultyStore(inner, [delay(on("read", "train-00000003.tar"), wait)])
    checks = verify_split(store, open_split(inner), threads=2)
    assert next(checks).shard == "train-00000000" and entered.wait(60)
    checks.close()
    assert not ended.is_set()
    go.set()


def test_verify_on_s3_goes_on_and_reads_a_replaced_object_again(phalanx, s3_prefix, made, state):
    away = open_store(s3_prefix)
    for path in sorted(made.rglob("*")):
        if path.is_file():
            away.create(str(path.relative_to(made)), path.read_bytes())
    away.delete("train/train-00000007.tar")
    command = "data", "verify", s3_prefix, "--state", state
    assert phalanx(*command)[0] == 1
    data = tar(made, 1).read_bytes()
    away.delete("train/train-00000001.tar")
    away.create("train/train-00000001.tar", data[:700] + bytes([data[700] ^ 1]) + data[701:])
    away.create("train/train-00000007.tar", tar(made, 7).read_bytes())
    code, out, _ = phalanx(*command)
    assert code == 1 and "(6 of them before" in out and "train-00000001.tar: member 0 at byte 640" in out
