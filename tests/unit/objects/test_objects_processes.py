"""What another process writes or deletes shows at once: nothing of a listing is kept (case 16)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from phalanx.objects import ObjectMissing, ObjectStore, StorageSettings, open_store

OTHER = """
import json, sys
from phalanx.objects import ObjectMissing, StorageSettings, open_store

store = open_store(sys.argv[1], StorageSettings(endpoint=sys.argv[2] or None))

def seen():
    infos = [[info.key, info.num_bytes] for info in store.list()]
    there = []
    for key in ("a/1", "a/2", "b/c/3"):
        try:
            there.append(store.info(key).num_bytes)
        except ObjectMissing:
            there.append(None)
    return {"list": infos, "below": [info.key for info in store.list("a/")], "children": list(store.children()),
            "children of a": list(store.children("a/")), "info": there}

for line in sys.stdin:
    what, key, text = json.loads(line)
    if what == "create":
        store.create(key, text.encode())
    elif what == "stream":
        with store.writer(key) as writer:
            writer.write(text.encode())
            writer.commit()
    elif what == "delete":
        store.delete(key)
    print(json.dumps(seen()), flush=True)
"""
CHANGES = [
    ("create", "a/1", "one"),
    ("stream", "a/2", "second"),
    ("create", "b/c/3", ""),
    ("delete", "a/1", ""),
    ("create", "a/1", "again, and longer"),
    ("delete", "a/2", ""),
    ("delete", "b/c/3", ""),
    ("delete", "a/1", ""),
]


class Other:
    """A second process with the same store open: it changes what it is told, and says what it sees."""

    def __init__(self, url: str, endpoint: str) -> None:
        command = [sys.executable, "-c", OTHER, url, endpoint]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def does(self, what: str, key: str = "", text: str = "") -> dict[str, object]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps((what, key, text)) + "\n")
        self.process.stdin.flush()
        found: dict[str, object] = json.loads(self.process.stdout.readline())
        return found


@contextmanager
def other_process(url: str, endpoint: str) -> Iterator[Other]:
    other = Other(url, endpoint)
    try:
        yield other
    finally:
        other.process.kill()
        other.process.communicate()


@pytest.fixture(params=["file", "s3"])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    """URL and endpoint of a store that several processes can open."""
    if request.param == "file":
        return f"file://{tmp_path}/not/yet/there", ""
    return request.getfixturevalue("place"), request.getfixturevalue("ministack")


def size_of(store: ObjectStore, key: str) -> int | None:
    try:
        return store.info(key).num_bytes
    except ObjectMissing:
        return None


def seen(store: ObjectStore) -> dict[str, object]:
    """As OTHER says it."""
    return {
        "list": [[info.key, info.num_bytes] for info in store.list()],
        "below": [info.key for info in store.list("a/")],
        "children": list(store.children()),
        "children of a": list(store.children("a/")),
        "info": [size_of(store, key) for key in ("a/1", "a/2", "b/c/3")],
    }


def wanted(objects: dict[str, str]) -> dict[str, object]:
    folders = {key.partition("/")[0] + "/" for key in objects}
    return {
        "list": [[key, len(text)] for key, text in sorted(objects.items())],
        "below": sorted(key for key in objects if key.startswith("a/")),
        "children": sorted(folders),
        "children of a": sorted(key for key in objects if key.startswith("a/")),
        "info": [len(objects[key]) if key in objects else None for key in ("a/1", "a/2", "b/c/3")],
    }


def without_empty_folders(found: dict[str, object], objects: dict[str, str]) -> dict[str, object]:
    """A folder may be seen without objects where one in it was just deleted; see `children`."""
    folders = wanted(objects)["children"]
    children = found["children"]
    assert isinstance(children, list) and isinstance(folders, list)
    assert set(folders) <= set(children) <= {"a/", "b/"}
    return {**found, "children": folders}


@pytest.mark.parametrize("writer", ["other", "own"])
def test_what_another_process_creates_or_deletes_is_seen_at_once(shared: tuple[str, str], writer: str) -> None:
    url, endpoint = shared
    store = open_store(url, StorageSettings(endpoint=endpoint or None))
    objects: dict[str, str] = {}
    with other_process(url, endpoint) as other:
        assert seen(store) == other.does("look") == wanted({})
        for what, key, text in CHANGES:
            if what == "delete":
                del objects[key]
            else:
                objects[key] = text
            if writer == "other":
                other.does(what, key, text)
                found = seen(store)
            else:
                store.delete(key) if what == "delete" else store.create(key, text.encode())
                found = other.does("look")
            assert without_empty_folders(found, objects) == wanted(objects), (what, key)
            if writer == "other" and what != "delete":
                assert store.read(key) == text.encode()
