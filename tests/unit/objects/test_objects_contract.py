"""One suite for every kind of store: what base.py promises."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from phalanx.objects import ObjectExists, ObjectInfo, ObjectMissing, ObjectStore, StoreDenied, StoreError

DATA = bytes(range(256)) * 5


@pytest.mark.parametrize("data", [b"", b"x", DATA], ids=["empty", "one", "some"])
def test_create_any_size_reads_back(store: ObjectStore, data: bytes) -> None:
    store.create("a/b c/d+e=1.bin", data)
    assert store.read("a/b c/d+e=1.bin") == data
    assert store.info("a/b c/d+e=1.bin") == ObjectInfo("a/b c/d+e=1.bin", len(data))


@pytest.mark.parametrize(
    "data", [bytearray(DATA), memoryview(DATA)[::2], memoryview(DATA).cast("I")], ids=["array", "strided", "ints"]
)
def test_create_any_buffer_stores_its_bytes(store: ObjectStore, data: bytearray | memoryview) -> None:
    store.create("k", data)
    assert store.read("k") == bytes(data)


@pytest.mark.parametrize(
    "offset, length",
    [(0, None), (0, 0), (0, 1), (7, 300), (len(DATA) - 1, 1), (len(DATA), 0), (9, None), (len(DATA), None)],
)
def test_read_range_returns_exactly_it(store: ObjectStore, offset: int, length: int | None) -> None:
    store.create("k", DATA)
    assert store.read("k", offset, length) == (DATA[offset:] if length is None else DATA[offset : offset + length])


@pytest.mark.parametrize("offset, length", [(0, 0), (0, 1), (7, 300), (len(DATA) - 1, 1), (0, len(DATA))])
def test_read_view_returns_exactly_it_seen_from_below_too(store: ObjectStore, offset: int, length: int) -> None:
    store.create("folder/k", DATA)
    for seen, key in (store, "folder/k"), (store.within("folder"), "k"):
        scratch = bytearray(len(DATA) + 8)
        assert bytes(seen.read_view(key, offset, length, memoryview(scratch))) == DATA[offset : offset + length]
        assert not any(scratch[length:]), "nothing is written behind what was asked for"


def test_read_view_beyond_the_object_or_of_none_is_an_error(store: ObjectStore) -> None:
    store.create("k", DATA)
    with pytest.raises(StoreError):
        store.read_view("k", 1, len(DATA), memoryview(bytearray(len(DATA))))
    with pytest.raises(ObjectMissing):
        store.read_view("nothing", 0, 1, memoryview(bytearray(1)))


@pytest.mark.parametrize("offset, length", [(0, 0), (0, 1), (7, 300), (len(DATA) - 1, 1), (0, len(DATA))])
def test_read_piece_puts_exactly_it_where_it_is_asked_seen_from_below_too(
    store: ObjectStore, offset: int, length: int
) -> None:
    store.create("folder/k", DATA)
    for seen, key in (store, "folder/k"), (store.within("folder"), "k"):
        memory = bytearray(length + 8)
        piece = seen.read_piece(key, offset, memoryview(memory)[4:-4])
        assert piece.nbytes == len(piece) == length and bytes(piece) == DATA[offset : offset + length]
        assert memory == bytes(4) + DATA[offset : offset + length] + bytes(4)


@pytest.mark.parametrize("offset, length", [(1, len(DATA)), (len(DATA), 1), (-1, 2)])
def test_read_piece_beyond_the_object_is_an_error(store: ObjectStore, offset: int, length: int) -> None:
    store.create("k", DATA)
    with pytest.raises(StoreError):
        store.read_piece("k", offset, memoryview(bytearray(length)))
    with pytest.raises(ObjectMissing):
        store.read_piece("nothing", 0, memoryview(bytearray(1)))


@pytest.mark.parametrize(
    "offset, length", [(0, len(DATA) + 1), (len(DATA), 1), (len(DATA) + 1, None), (len(DATA) + 1, 0), (-1, 2), (0, -1)]
)
def test_read_beyond_the_object_is_an_error(store: ObjectStore, offset: int, length: int | None) -> None:
    store.create("k", DATA)
    with pytest.raises(StoreError):
        store.read("k", offset, length)


def test_missing_object_is_signalled(store: ObjectStore) -> None:
    store.create("folder/object", b"")
    for key in ("nothing", "folder", "folder/other", "folder/object/below"):
        with pytest.raises(ObjectMissing):
            store.read(key)
        with pytest.raises(ObjectMissing):
            store.info(key)
        with pytest.raises(ObjectMissing):
            store.read(key, 5, 0)


@pytest.mark.parametrize(
    "first, second", [(b"first", b"second"), (b"first", b""), (b"", b"second"), (b"same", b"same")]
)
def test_create_taken_key_leaves_the_object(store: ObjectStore, first: bytes, second: bytes) -> None:
    """Checkpoint case 9: an empty object over one that is there, too."""
    store.create("k", first)
    with pytest.raises(ObjectExists):
        store.create("k", second)
    with pytest.raises(ObjectExists), store.writer("k") as writer:
        writer.write(second)
        writer.commit()
    assert store.read("k") == first


@pytest.mark.parametrize("size", [0, 100_000])
def test_create_twenty_writers_race_one_wins(store: ObjectStore, size: int) -> None:
    """Checkpoint case 9: whoever loses hears ObjectExists, on every store."""
    start = threading.Barrier(20)

    def race(writer: int) -> int | None:
        start.wait()
        try:
            store.create("race", bytes([writer]) * size)
        except ObjectExists:
            return None
        return writer

    with ThreadPoolExecutor(20) as threads:
        winners = [winner for winner in threads.map(race, range(20)) if winner is not None]
    assert len(winners) == 1
    assert store.read("race") == bytes(winners) * size


def test_version_changes_with_the_object_alone(store: ObjectStore) -> None:
    store.create("k", b"first")
    first = store.version("k")
    store.create("a/k", b"beside it")
    assert store.version("k") == first and store.within("a").version("k") == store.version("a/k") != first
    store.delete("k")
    with pytest.raises(ObjectMissing):
        store.version("k")
    store.create("k", b"other")
    assert store.version("k") != first


def test_writer_commit_creates_the_stream(store: ObjectStore) -> None:
    with store.writer("a/stream") as writer:
        for start in range(0, len(DATA), 100):
            writer.write(memoryview(DATA)[start : start + 100])
        assert list(store.list()) == []
        writer.commit()
    assert store.read("a/stream") == DATA


def test_writer_left_by_an_exception_leaves_nothing(store: ObjectStore) -> None:
    """Checkpoint case 8."""
    with pytest.raises(ZeroDivisionError), store.writer("a/stream") as writer:
        writer.write(DATA)
        raise ZeroDivisionError
    assert list(store.list()) == []
    store.create("a/stream", b"the name is still free")


def test_writer_without_commit_leaves_nothing(store: ObjectStore) -> None:
    """Checkpoint case 8."""
    with store.writer("a/stream") as writer:
        writer.write(DATA)
    assert list(store.list()) == []


def test_list_is_recursive_sorted_and_by_string_prefix(store: ObjectStore) -> None:
    keys = ["a-b", "a/b-x", "a/b/x", "a/b0/c", "a/c", "ab", "b/c"]
    for key in reversed(keys):
        store.create(key, key.encode())
    assert [info.key for info in store.list()] == sorted(keys)
    assert [info.key for info in store.list("a/b")] == [key for key in sorted(keys) if key.startswith("a/b")]
    assert [info.key for info in store.list("a/")] == [key for key in sorted(keys) if key.startswith("a/")]
    assert list(store.list("nothing/")) == list(store.list("a/c/")) == []


CHILDREN = {
    "": ["a-b", "a/", "ab", "b/"],
    "a": ["a-b", "a/", "ab"],
    "a/": ["a/b-x", "a/b/", "a/b0/", "a/c"],
    "a/b": ["a/b-x", "a/b/", "a/b0/"],
    "a/b/": ["a/b/x", "a/b/y/"],
    "a/c": ["a/c"],
    "b": ["b/"],
    "a/c/": [],
    "nothing/": [],
}


@pytest.mark.parametrize("root", ["", "deep/er"])
def test_children_are_direct_sorted_and_by_string_prefix(store: ObjectStore, root: str) -> None:
    place = store.within(root) if root else store
    for key in ("a-b", "a/b-x", "a/b/x", "a/b/y/z", "a/b0/c", "a/c", "ab", "b/c"):
        place.create(key, key.encode())
    assert {prefix: list(place.children(prefix)) for prefix in CHILDREN} == CHILDREN


def test_children_after_each_change_shows_it(store: ObjectStore) -> None:
    """Case 16; by other processes in test_objects_processes.py."""
    for count in range(3):
        assert len(list(store.children("x/"))) == count
        store.create(f"x/{count}/k", b"")
    store.delete("x/1/k")
    assert list(store.children("x/")) == ["x/0/", "x/2/"]


def test_list_after_each_change_shows_it(store: ObjectStore) -> None:
    for count in range(3):
        assert len(list(store.list("x/"))) == count
        store.create(f"x/{count}", b"")
    store.delete("x/1")
    assert [info.key for info in store.list("x/")] == ["x/0", "x/2"]


def test_delete_missing_object_is_no_error(store: ObjectStore) -> None:
    store.delete("never/was")
    store.create("k", b"1")
    store.delete("k")
    store.delete("k")
    store.create("k", b"2")
    assert store.read("k") == b"2"


def test_within_shows_only_what_is_below(store: ObjectStore) -> None:
    inner = store.within("a").within("b/")
    inner.create("k", b"1")
    store.create("a/bc", b"2")
    assert inner.url == store.url + ("a/b" if store.url.endswith("/") else "/a/b")
    assert [info.key for info in inner.list()] == ["k"]
    assert store.read("a/b/k") == inner.read("k") == b"1"
    assert inner.info("k") == ObjectInfo("k", 1)
    inner.delete("k")
    assert [info.key for info in store.list()] == ["a/bc"]


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/etc/x",
        "../x",
        "a/../../x",
        "a//b",
        "a/",
        "./a",
        "a\\b",
        "a\nb",
        "x" * 256,
        "k/" * 600 + "k",
        "x.phalanx-tmp",
    ],
)
def test_bad_key_is_refused_by_every_method(store: ObjectStore, key: str) -> None:
    for call in (store.read, store.info, store.delete, store.writer, lambda k: store.create(k, b"")):
        with pytest.raises(StoreDenied, match="object key"):
            call(key)
    with pytest.raises(StoreDenied, match="object key"):
        store.within("a").create(key, b"")
