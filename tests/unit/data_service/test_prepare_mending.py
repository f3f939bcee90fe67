"""An input that was refused, mended or left out, and prepared again into the same folder: as a fresh start would."""

import dataclasses
import gzip
import json
import random

import pytest
from corpus_builders import SETTINGS, WORDS
from prepare_kit import objects, with_tokenizer
from test_prepare_assembly import pieces_of

from phalanx.core.errors import PhalanxError
from phalanx.data.prepare import Local, Part, making, merge, prepare, prepare_part, source_of
from phalanx.objects import open_store
from phalanx.objects.faults import Fault, FaultyStore, number_is

SMALL = 4096  # bytes of a chunk
DAMAGED = "c.jsonl.gz"


class Killed(BaseException):
    """Stands for the end of the process."""


def dies(call):
    raise Killed


def packed(name, num_lines=300):
    """A packed file that is a piece of its own, of several small chunks."""
    chance = random.Random(name)
    lines = (json.dumps({"text": " ".join(chance.choices(WORDS, k=12))}) for _ in range(num_lines))
    return gzip.compress("\n".join(lines).encode(), 1, mtime=0)


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name in ("a.jsonl.gz", "b.jsonl.gz", DAMAGED, "d.jsonl.gz"):
        (folder / name).write_bytes(packed(name))
    return folder


@pytest.fixture(params=["given tokenizer", "trained tokenizer"])
def chosen(request, tmp_path):
    return with_tokenizer(tmp_path) if request.param == "given tokenizer" else SETTINGS


def damage(corpus, cut=True):
    """Cuts the file, or flips a bit of its checksum, which only its end shows."""
    data = bytearray((corpus / DAMAGED).read_bytes())
    data[-5] ^= 1
    (corpus / DAMAGED).write_bytes(bytes(data[:-3000] if cut else data))


def mend_with_other_content(corpus):
    """Puts another whole file of the same size there."""
    file = corpus / DAMAGED
    data = packed("other", 100)
    file.write_bytes(data + bytes(file.stat().st_size - len(data)))  # zeros behind the last frame are padding


def refused(corpus, store, chosen):
    with pytest.raises(PhalanxError, match=rf"{DAMAGED}, byte \d+: expected a whole gzip file"):
        prepare(source_of(corpus), store, chosen)


def fresh(corpus, chosen):
    store = open_store("memory://")
    prepare(source_of(corpus), store, chosen)
    return objects(store)


def names(store):
    return {key for key in objects(store) if key.startswith("chunks/") and "refused" not in key}


@pytest.mark.parametrize("way", ["mended", "left out"])
def test_prepare_of_a_mended_input_goes_on_in_the_same_folder(corpus, chosen, way):
    """Pieces of files that stayed are not made again where the tokenizer stayed."""
    whole = (corpus / DAMAGED).read_bytes()
    damage(corpus)
    with pieces_of(1 << 14, SMALL):
        store = FaultyStore(open_store("memory://"))
        refused(corpus, store, chosen)
        if chosen.tokenizer is not None:
            assert len(names(store)) > 3
        if way == "mended":
            (corpus / DAMAGED).write_bytes(whole)
        else:
            (corpus / DAMAGED).unlink()
        before = names(store)
        store.calls.clear()
        prepare(source_of(corpus), store, chosen)
        assert objects(store) == fresh(corpus, chosen)
    if chosen.tokenizer is not None:
        made = {call.key for call in store.calls if call.operation == "create"}
        unfinished = {
            key for key in before if key.rpartition("-")[0] not in {k.rpartition("-")[0] for k in before if ".end" in k}
        }
        assert made and not made & (before - unfinished) and len(before - unfinished) >= 2


@pytest.mark.parametrize("cut", [True, False])
def test_prepare_of_an_input_mended_at_the_same_size_takes_nothing_of_the_damaged_one(corpus, chosen, cut):
    """Chunks before the damage, and a tokenizer trained on it, are of the old content."""
    damage(corpus, cut)
    with pieces_of(1 << 14, SMALL):
        store = open_store("memory://")
        refused(corpus, store, chosen)
        mend_with_other_content(corpus)
        prepare(source_of(corpus), store, chosen)
        assert objects(store) == fresh(corpus, chosen)


def test_prepare_killed_while_it_takes_the_mended_input_still_ends_with_the_bytes_of_a_fresh_start(corpus, chosen):
    whole = (corpus / DAMAGED).read_bytes()
    damage(corpus)
    bad = (corpus / DAMAGED).read_bytes()
    with pieces_of(1 << 14, 1 << 20):
        good, number = None, 0
        while True:
            (corpus / DAMAGED).write_bytes(bad)
            base = open_store("memory://")
            refused(corpus, base, chosen)
            (corpus / DAMAGED).write_bytes(whole)
            good = good or fresh(corpus, chosen)
            try:
                prepare(source_of(corpus), FaultyStore(base, [Fault(number_is(number), before=dies)]), chosen)
            except Killed:
                prepare(source_of(corpus), base, chosen)
                assert objects(base) == good
                number += 13 if chosen.tokenizer is not None else 41
                continue
            break
        assert number > 20 and objects(base) == good


def test_prepare_of_a_changed_input_that_was_not_refused_is_refused(corpus, tmp_path):
    """A start that was only killed, or a part with another input by mistake, takes nobody's work away."""
    chosen = with_tokenizer(tmp_path)
    store = open_store("memory://")
    prepare_part(source_of(corpus), store, chosen, Part(1, 2))
    before = objects(store)
    (corpus / DAMAGED).unlink()
    with pytest.raises(PhalanxError, match=rf"the input has changed since: '{DAMAGED}' is not there any more"):
        prepare_part(source_of(corpus), store, chosen, Part(2, 2))
    assert objects(store) == before


def test_parts_of_a_mended_input_are_put_together(corpus, tmp_path):
    """Only what the damaged file touched is made again; a part beside it goes on meanwhile."""
    chosen = with_tokenizer(tmp_path)
    whole = (corpus / DAMAGED).read_bytes()
    damage(corpus)
    with pieces_of(1 << 14, SMALL):
        store = open_store("memory://")
        assert prepare_part(source_of(corpus), store, chosen, Part(1, 4)).pieces_made == 1
        with pytest.raises(PhalanxError, match=DAMAGED):
            prepare_part(source_of(corpus), store, chosen, Part(3, 4))
        assert prepare_part(source_of(corpus), store, chosen, Part(2, 4)).pieces_made == 1
        (corpus / DAMAGED).write_bytes(whole)
        made = [prepare_part(source_of(corpus), store, chosen, Part(number, 4)).pieces_made for number in (3, 1, 2, 4)]
        assert made == [1, 0, 0, 1]
        merge(store)
        assert objects(store) == fresh(corpus, chosen)


def test_prepare_of_another_input_is_refused_where_shards_of_the_old_one_are(corpus, tmp_path):
    chosen = dataclasses.replace(with_tokenizer(tmp_path), shard_tokens=1000)
    damage(corpus)
    with pieces_of(1 << 14, SMALL):
        store = open_store("memory://")
        refused(corpus, store, chosen)
        store.create("train/train-00000000.tar", b"of the old input")
        before = objects(store)
        (corpus / DAMAGED).unlink()
        with pytest.raises(PhalanxError, match="the input has changed since shards were written there: name another"):
            prepare(source_of(corpus), store, chosen)
        assert objects(store) == before


def test_pool_notes_what_was_refused_as_one_process_does(corpus, tmp_path):
    chosen, whole = with_tokenizer(tmp_path), (corpus / DAMAGED).read_bytes()
    damage(corpus)
    with pieces_of(1 << 14, making.PART_BYTES):  # workers know no other
        store = open_store(f"file://{tmp_path}/out")
        with pytest.raises(PhalanxError, match=DAMAGED):
            prepare(source_of(corpus), store, chosen, engine=Local(2))
        (corpus / DAMAGED).write_bytes(whole)
        prepare(source_of(corpus), store, chosen, engine=Local(2))
        assert objects(store) == fresh(corpus, chosen)
