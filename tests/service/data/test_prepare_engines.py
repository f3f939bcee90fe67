"""Worker processes, parts and Spark for real: the same bytes, and what happens when workers die or are interrupted."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from unittest import mock

import psutil
import pytest
from support.ministack import make_bucket, set_environ
from support.words import WORDS

from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.data.prepare import Local, Part, PrepareSettings, engine, merge, prepare, prepare_part, source_of
from phalanx.data.prepare.tokenizer import train_tokenizer
from phalanx.objects import open_store

needs_java = pytest.mark.skipif(
    shutil.which("java") is None and not os.environ.get("JAVA_HOME"), reason="no Java here, of which Spark needs 17"
)
WORKER = "phalanx.data.prepare.worker"
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """An input of several pieces, its settings, and the dataset that one process makes of it."""
    folder = tmp_path_factory.mktemp("engines")
    corpus = folder / "corpus"
    corpus.mkdir()
    for number in range(700):
        words = [WORDS[(number * 7 + k * (number + 1)) % len(WORDS)] for k in range(200 + number * 13 % 900)]
        (corpus / f"{number:04d}.txt").write_text(f"{number % 650} " + " ".join(words[: 200 + number % 650]))
    (corpus / "lines.jsonl").write_text("".join(json.dumps({"text": f"line {n % 3900}"}) + "\n" for n in range(4000)))
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_bytes(train_tokenizer(iter([" ".join(WORDS).encode()]), 300, "<|endoftext|>"))
    source = source_of(corpus)
    chosen = PrepareSettings(tokenizer=tokenizer, held_out_fraction=0.1, shard_tokens=300_000)
    assert len(source.pieces()) >= 4
    store = open_store(f"file://{folder}/alone")
    prepare(source, store, chosen)
    return source, chosen, objects(store), folder


def objects(store):
    return {found.key: store.read(found.key) for found in store.list()}


def test_pool_of_any_size_gives_the_bytes_of_one_process(made, tmp_path):
    source, chosen, good, _ = made
    for workers in (2, 3):
        seen = []
        store = open_store(f"file://{tmp_path}/{workers}")
        prepare(source, store, chosen, seen.append, Local(workers))
        assert objects(store) == good
        assert seen[0].num_bytes == 0 and max(p.num_documents for p in seen) > 4000


def test_pool_from_and_to_s3_gives_the_bytes_of_one_process_on_disk(made, tmp_path, ministack, monkeypatch):
    """Workers find endpoint and credentials as this process does."""
    _, chosen, _, folder = made
    set_environ(monkeypatch, ministack.environ)
    bucket = make_bucket(ministack, f"bucket-{uuid.uuid4().hex[:12]}")
    for file in sorted((folder / "corpus").iterdir())[-60:]:
        open_store(f"{bucket}/in").create(file.name, file.read_bytes())
    (tmp_path / "in").mkdir()
    for file in sorted((folder / "corpus").iterdir())[-60:]:
        shutil.copy(file, tmp_path / "in")
    remote, local = open_store(f"{bucket}/out"), open_store(f"file://{tmp_path}/out")
    with mock.patch("phalanx.data.prepare.sources.piece_bytes_for", lambda files: 1 << 16):
        prepare(source_of(f"{bucket}/in"), remote, chosen, engine=Local(2))
        prepare(source_of(tmp_path / "in"), local, chosen)
    assert objects(remote) == objects(local)


@needs_java
@pytest.mark.timeout(300)
def test_spark_gives_the_bytes_of_one_process_and_tells_a_users_mistake_in_one_line(made, tmp_path, monkeypatch):
    """One session for all of it: parts by Spark, a merge, and an input that changes under the executors."""
    pytest.importorskip("pyspark")
    from pyspark.sql import SparkSession

    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    source, chosen, good, folder = made
    spark = engine("spark", None, "local[2]")
    with SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate():
        store, seen = open_store(f"file://{tmp_path}/d"), []
        prepare_part(source, store, chosen, Part(2, 2))
        prepare_part(source, store, chosen, Part(1, 2), seen.append, spark)
        merge(store)
        assert objects(store) == good and seen[-1].num_tokens > 0
        changed = tmp_path / "changed"
        shutil.copytree(folder / "corpus", changed)
        listed = source_of(changed)
        (changed / "0300.txt").write_text("of another size")
        with pytest.raises(PhalanxError, match=r"0300.txt: expected the file as it was listed") as error:
            prepare(listed, open_store(f"file://{tmp_path}/e"), chosen, engine=spark)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("master", ["bogus://x", "local[0]", "local[", "spark://host", "spark://host:x", "", "loca"])
def test_spark_master_of_no_form_that_spark_knows_is_refused(master):
    with pytest.raises(PhalanxError, match=r"--spark-master is .*: expected local, .*; write one of these forms"):
        engine("spark", None, master)


@pytest.mark.parametrize(
    "master", ["local", "local[8]", "local[*]", "local[*,4]", "spark://a:7077,b:7077", "k8s://https://h:443", "yarn"]
)
def test_spark_master_of_a_form_that_spark_knows_is_taken(master):
    assert engine("spark", None, master) is not None


@needs_java
@pytest.mark.timeout(200)
def test_spark_that_cannot_start_is_one_line_behind_what_spark_logs(tmp_path):
    pytest.importorskip("pyspark")
    (tmp_path / "a.txt").write_text("some text")
    words = ["data", "prepare", tmp_path / "a.txt", "--out", f"file://{tmp_path}/out", "--vocab-size", "300"]
    words += ["--engine", "spark", "--spark-master", "k8s://http://127.0.0.1:9"]
    done = subprocess.run(
        [sys.executable, "-m", "phalanx.cli", *words], capture_output=True, text=True, timeout=180, check=False
    )
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert last.startswith("phalanx: Spark does not start with --spark-master k8s://http://127.0.0.1:9: "), last


def workers_of(pid):
    children = psutil.Process(pid).children(recursive=True)
    return [child for child in children if WORKER in " ".join(_cmdline(child))]


def _cmdline(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def until(condition):
    deadline = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.02)
    return found


def kill_workers(wanted, busy, stop):
    """Kills the first worker that is busy, `wanted` times."""
    killed = set()
    while len(killed) < wanted and not stop.is_set():
        for worker in workers_of(os.getpid()):
            if worker.pid not in killed and busy.is_set():
                worker.kill()
                killed.add(worker.pid)
                break
        time.sleep(0.01)


@pytest.mark.parametrize(("wanted", "ends_well"), [(1, True), (1000, False)])
def test_pool_worker_that_dies_is_replaced_once(made, tmp_path, wanted, ends_well):
    """SIGKILL, as the system's out-of-memory killer sends it: never a hang."""
    source, chosen, good, _ = made
    busy, stop = threading.Event(), threading.Event()
    killer = threading.Thread(target=kill_workers, args=(wanted, busy, stop))
    killer.start()
    store = open_store(f"file://{tmp_path}/d")
    try:
        if ends_well:
            prepare(source, store, chosen, lambda progress: busy.set(), Local(2))
        else:
            with pytest.raises(OutsideError, match=r"a worker process died while it .*SIGKILL"):
                prepare(source, store, chosen, lambda progress: busy.set(), Local(2))
    finally:
        stop.set()
        killer.join()
    assert not workers_of(os.getpid())
    if not ends_well:
        prepare(source, store, chosen)
    assert objects(store) == good


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_prepare_interrupted_or_killed_leaves_no_worker_behind(made, tmp_path, signum):
    _, chosen, good, folder = made
    command = [
        *(
            sys.executable,
            "-m",
            "phalanx.cli",
            "data",
            "prepare",
            str(folder / "corpus"),
            "--out",
            f"file://{tmp_path}/d",
        ),
        *("--tokenizer", str(chosen.tokenizer), "--held-out-fraction", "0.1", "--shard-tokens", "300000"),
    ]
    with subprocess.Popen([*command, "--workers", "3"], stderr=subprocess.PIPE, start_new_session=True) as process:
        workers = until(lambda: len(found := workers_of(process.pid)) == 3 and found)
        os.killpg(process.pid, signum)
        _, said = process.communicate(timeout=DEADLINE_S)
    gone, alive = psutil.wait_procs(workers, timeout=DEADLINE_S)
    assert not alive and len(gone) == 3
    if signum == signal.SIGINT:
        assert process.returncode == 130 and said.decode().splitlines()[-1] == "phalanx: interrupted"
    done = subprocess.run([*command, "--workers", "2", "--json"], capture_output=True, timeout=DEADLINE_S, check=True)
    store = open_store(f"file://{tmp_path}/d")
    assert objects(store) == good
    assert json.loads(done.stdout)["train"]["num_documents"] > 4000


def test_cli_parts_and_merge_make_one_dataset(made, tmp_path):
    _, chosen, good, folder = made
    url = f"file://{tmp_path}/d"
    options = ["--tokenizer", str(chosen.tokenizer), "--held-out-fraction", "0.1", "--shard-tokens", "300000"]

    def phalanx(*arguments):
        command = [sys.executable, "-m", "phalanx.cli", "data", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)

    first = phalanx("prepare", str(folder / "corpus"), "--out", url, *options, "--part", "1/2", "--workers", "1")
    assert first.returncode == 0 and "part 1/2" in first.stdout and "phalanx data merge" in first.stdout
    early = phalanx("merge", "--out", url)
    assert early.returncode == 2 and "are missing: piece 2" in early.stderr and early.stderr.count("\n") == 1
    phalanx("prepare", str(folder / "corpus"), "--out", url, *options, "--part", "2/2", "--json")
    done = phalanx("merge", "--out", url, "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["counts"]["exact_duplicates"] > 10
    assert objects(open_store(url)) == good
    wrong = phalanx("prepare", str(folder / "corpus"), "--out", url, *options, "--engine", "dask")
    assert wrong.returncode == 2 and "--engine is 'dask': expected one of local, spark" in wrong.stderr
    assert Path(tmp_path / "d" / "report.json").is_file()
