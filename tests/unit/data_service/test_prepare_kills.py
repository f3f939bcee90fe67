"""A preparation that is killed at any moment is started again and ends with the same bytes."""

import dataclasses
import os
import signal
import subprocess
import sys

import pytest
from corpus_builders import write_corpus
from prepare_kit import given_tokenizer, mixed_corpus, objects, with_tokenizer
from test_prepare_assembly import pieces_of

from phalanx.core.errors import OutsideError
from phalanx.data.prepare import Part, merge, prepare, prepare_part, source_of
from phalanx.objects import open_store
from phalanx.objects.faults import Fault, FaultyStore, number_is


class Killed(BaseException):
    """Stands for the end of the process."""


def dies(call):
    raise Killed


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed")
    return source_of(mixed_corpus(folder / "corpus", 6)), with_tokenizer(folder, shard_tokens=1500)


def in_one_go(source, store, chosen):
    prepare(source, store, chosen)


def in_parts(source, store, chosen):
    for number in (2, 1):
        prepare_part(source, store, chosen, Part(number, 2))
    merge(store)


@pytest.mark.parametrize("way", [in_one_go, in_parts])
def test_prepare_killed_at_any_store_operation_continues_to_the_same_bytes(corpus, way):
    source, chosen = corpus
    with pieces_of(9000, 1500):
        whole = FaultyStore(open_store("memory://"))
        way(source, whole, chosen)
        num_calls, good = len(whole.calls), objects(whole)
        assert num_calls > 50 and {call.operation for call in whole.calls} == {
            *("read", "info", "create", "list", "delete")
        }
        for number in range(num_calls):
            base = open_store("memory://")
            with pytest.raises(Killed):
                way(source, FaultyStore(base, [Fault(number_is(number), before=dies)]), chosen)
            is_finished = "train/manifest.json" in objects(base)
            assert not is_finished or good.items() <= objects(base).items()
            way(source, base, chosen)
            assert objects(base) == good


def test_prepare_killed_again_and_again_still_ends(corpus):
    """Each start gets a little further."""
    source, chosen = corpus
    with pieces_of(9000, 1500):
        whole, base = open_store("memory://"), open_store("memory://")
        prepare(source, whole, chosen)
        for starts in range(200):
            try:
                prepare(source, FaultyStore(base, [Fault(number_is(12 + starts), before=dies)]), chosen)
                break
            except Killed:
                continue
        assert starts > 3 and objects(base) == objects(whole)


def test_prepare_started_twice_at_once_gives_one_dataset(corpus):
    """The slower start finds its chunks deleted, at any of its operations, and the finished dataset."""
    source, chosen = corpus
    with pieces_of(9000, 1500):
        whole = FaultyStore(open_store("memory://"))
        report = prepare(source, whole, chosen)
        num_calls, good = len(whole.calls), objects(whole)
        for number in range(0, num_calls, 3):
            base = open_store("memory://")

            def overtake(call, base=base):
                prepare(source, base, chosen)

            slow = FaultyStore(base, [Fault(number_is(number), before=overtake)])
            try:
                assert prepare(source, slow, chosen) == report
            except OutsideError as error:
                assert "start again" in str(error)
            assert prepare(source, base, chosen) == report and objects(base) == good


SIGKILLED = """
import dataclasses, sys
from pathlib import Path
from prepare_kit import SETTINGS
from phalanx.data.prepare import prepare, source_of
from phalanx.objects import open_store
from phalanx.objects.faults import FaultyStore, kill_after, on
root, tokenizer, url, operation, key = sys.argv[1:]
settings = dataclasses.replace(SETTINGS, tokenizer=Path(tokenizer), shard_tokens=20_000)
prepare(source_of(root), FaultyStore(open_store(url), [kill_after(on(operation, key))]), settings)
"""


@pytest.mark.parametrize(
    ("operation", "key"),
    [("create", "chunks/"), ("create", "train-00000000.tar"), ("create", "train/manifest"), ("delete", "chunks/")],
)
def test_prepare_sigkill_of_a_real_process_continues_to_the_same_bytes(tmp_path, operation, key):
    folder, tokenizer = write_corpus(tmp_path / "corpus", 400), given_tokenizer(tmp_path)
    source, url = source_of(folder), f"file://{tmp_path}/d"
    chosen = dataclasses.replace(with_tokenizer(tmp_path), tokenizer=tokenizer, shard_tokens=20_000)
    done = subprocess.run(
        [sys.executable, "-c", SIGKILLED, str(folder), str(tokenizer), url, operation, key],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=100,
    )
    assert done.returncode == -signal.SIGKILL
    store, whole = open_store(url), open_store("memory://")
    prepare(source, whole, chosen)
    is_finished = objects(whole).items() <= objects(store).items()  # chunks go side by side: some may be left
    assert is_finished is (operation == "delete" or key == "train/manifest")
    prepare(source, store, chosen)
    assert objects(store) == objects(whole)
    assert not list((tmp_path / "d").rglob("*.phalanx-tmp"))
