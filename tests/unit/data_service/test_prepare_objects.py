"""Input from a real S3 server: the same documents as from a disk, by ranges, and never fewer."""

import pytest
from corpus_builders import RECORDS, json_lines, packed, parquet_bytes, tar_bytes, write_file

from phalanx.core.errors import PhalanxError
from phalanx.data.prepare import source_of
from phalanx.data.prepare.inputs import ChangedInput, Piece, Span, cut
from phalanx.data.prepare.inputs import objects as input_objects
from phalanx.data.prepare.inputs.objects import InputObject, SeekingStream
from phalanx.data.prepare.inputs.parquet import parquet_documents
from phalanx.data.prepare.sources import Source
from phalanx.objects import open_store
from phalanx.objects.base import ScopedStore

TEXTS = [f"text {number} " * (number % 50) for number in range(1500)]
FILES = {
    "a/one.txt": b"one",
    "a/two.txt.gz": packed(".gz", b"two"),
    "b/x.jsonl": json_lines([{"text": text} for text in TEXTS]),
    "b/x.jsonl.zst": packed(".zst", json_lines(RECORDS)),
    "b/x.parquet": parquet_bytes({"text": TEXTS, "id": [f"p{n}" for n in range(1500)]}, row_group_size=250),
    "c/w.tar.gz": packed(".gz", tar_bytes([(f"{n}.txt", text.encode()) for n, text in enumerate(TEXTS)])),
    "c/.hidden.txt": b"no",
    "c/no.bin": b"no",
}
MARK = "c/folder"  # as tools leave it in place of a folder


@pytest.fixture
def corpus(s3_prefix, tmp_path):
    """The same files in a bucket and on a disk."""
    store = open_store(s3_prefix)
    for name, data in FILES.items():
        store.create(name, data)
        write_file(tmp_path, name, data)
    store.create(MARK, b"")
    return s3_prefix, tmp_path


class CountingStore(ScopedStore):
    """Counts the bytes that are read."""

    def __init__(self, store, prefix):
        super().__init__(store, prefix)
        self.ranges = []

    def read(self, key, offset=0, length=None):
        data = super().read(key, offset, length)
        self.ranges.append(len(data))
        return data


def _all(source, piece_bytes):
    found, before = [], {}
    for piece in cut(source.files, piece_bytes):
        reading = source.read(piece)
        found += [(each.full_id(before.get(piece.part_of, 0)), each.text) for each in reading]
        before[piece.part_of] = before.get(piece.part_of, 0) + reading.num_lines
    return found


@pytest.mark.parametrize("piece_bytes", [30_000, 2**25])
def test_objects_give_the_documents_of_the_same_files_on_a_disk(corpus, monkeypatch, piece_bytes):
    """Blocks smaller than lines and members, so that all of them lie across blocks."""
    monkeypatch.setattr(input_objects, "BLOCK_BYTES", 3000)
    url, folder = corpus
    there, here = source_of(url), source_of(folder)
    assert (there.files, dict(there.left_out), there.root) == (here.files, dict(here.left_out), url)
    found = _all(Source.from_json(there.to_json()), piece_bytes)
    assert found == [(each.id, each.text) for each in here.documents()] and len(found) == 3 * 1500 + 9 + 2


def test_objects_are_named_by_key_prefix_or_pattern(corpus):
    url, folder = corpus
    for given in ("b/x.jsonl", "b", "b/", "*/x.*", "**/*.txt*", "c/*.bin"):
        there, here = source_of(f"{url}/{given}"), source_of(f"{folder}/{given}")
        assert there.files == here.files
        assert there.root.removeprefix(url) == here.root.removeprefix(str(folder))


def test_objects_beside_files_are_named_by_whole_urls_and_paths(corpus):
    url, folder = corpus
    source = source_of([f"{url}/a", folder / "a"])
    assert source.root == "" and [(each.id, each.text) for each in source.documents()] == [
        *((f"{url}/a/one.txt", b"one"), (f"{url}/a/two.txt.gz", b"two")),
        *((f"{folder}/a/one.txt", b"one"), (f"{folder}/a/two.txt.gz", b"two")),
    ]


@pytest.mark.parametrize("given", ["nowhere", "b/x", "*.md"])
def test_objects_that_are_not_there_are_a_one_line_error(corpus, given):
    with pytest.raises(PhalanxError, match="nothing is there") as error:
        source_of(f"{corpus[0]}/{given}")
    assert f"{corpus[0]}/{given}" in str(error.value) and "\n" not in str(error.value)


def test_bucket_that_is_not_there_is_a_one_line_error(corpus):
    with pytest.raises(PhalanxError, match="create the bucket or correct the URL"):
        source_of("s3://no-such-bucket-at-all/x")


@pytest.mark.parametrize("name", [name for name in FILES if not name.startswith("c/.") and name != "c/no.bin"])
@pytest.mark.parametrize("change", ["gone", "longer", "shorter"])
def test_object_that_changes_after_it_was_listed_is_named(corpus, name, change):
    url, _ = corpus
    source, store = source_of(f"{url}/{name}"), open_store(url)
    store.delete(name)
    if change != "gone":
        store.create(name, FILES[name] + b" " if change == "longer" else FILES[name][:-1])
    with pytest.raises(ChangedInput, match=f"{url}/{name}: expected the file as it was listed"):
        list(source.documents())


def test_object_that_changes_among_many_small_ones_is_named(corpus):
    url, _ = corpus
    source, store = source_of(f"{url}/a"), open_store(url)
    store.delete("a/two.txt.gz")
    store.create("a/two.txt.gz", b"shorter")
    with pytest.raises(ChangedInput, match=r"two\.txt\.gz: expected the file as it was listed, of 23 bytes"):
        list(source.documents())


def test_object_that_becomes_shorter_while_it_is_read_is_named(corpus, monkeypatch):
    monkeypatch.setattr(input_objects, "BLOCK_BYTES", 700)
    url, _ = corpus
    store = open_store(url)
    documents = iter(source_of(f"{url}/b/x.jsonl").documents())
    next(documents)
    store.delete("b/x.jsonl")
    store.create("b/x.jsonl", FILES["b/x.jsonl"][:2000])
    with pytest.raises(ChangedInput, match=r"x\.jsonl: expected the file as it was listed"):
        list(documents)


def test_parquet_object_is_read_by_ranges_of_its_text_column(corpus):
    """Columns and row groups that aren't asked for stay on the server."""
    store = CountingStore(open_store(corpus[0]), "d")
    wide = {"text": TEXTS, "other": [f"{n} {text}"[::-1] for n, text in enumerate(TEXTS)]}
    data = parquet_bytes(wide, row_group_size=250, compression="none", use_dictionary=False)
    store.create("w.parquet", data)
    span = Span("w.parquet", len(data), 0, len(data) // 4)
    stream = SeekingStream(InputObject(store, "w.parquet", len(data)))
    found = list(parquet_documents(stream, span, "w", source_of(corpus[1]).fields))
    assert [each.text.decode() if each.text else "" for each in found] == TEXTS[: len(found)] and len(found) == 500
    assert sum(store.ranges) < 65536 + len(data) // 3 and len(data) > 600_000


def test_json_lines_range_of_an_object_reads_little_more_than_the_range(corpus):
    store = CountingStore(open_store(corpus[0]), "d")
    data = FILES["b/x.jsonl"]
    store.create("x.jsonl", data)
    blocks = InputObject(store, "x.jsonl", len(data)).blocks(1000, 2000)
    assert next(blocks) == data[1000:2000] and store.ranges == [1000]
    assert b"".join(blocks) == data[2000:]


def test_piece_of_many_small_objects_is_read_in_order(s3_prefix):
    store = open_store(s3_prefix)
    for number in range(60):
        store.create(f"{number:03d}.txt", f"text {number}".encode())
    source = source_of(s3_prefix)
    (piece,) = source.pieces()
    assert [each.text.decode() for each in source.read(piece)] == [f"text {number}" for number in range(60)]
    assert Piece.from_json(piece.to_json()) == piece
