"""The folder of an export while it is being made: `.NAME.part` beside the target, which the next start goes on from.

  .NAME.part/state   one line of JSON for the export, then one for each whole file, appended once the file is durable
  .NAME.part/files   the folder to be; renamed to the target when all is there

So whoever is killed at any moment loses the file it was in the middle of. A file counts as whole where the state names
it and its bytes still have the size and digest written there; a state of another export, or one that can't be read,
begins anew. flock(2) on the state keeps a second process out.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final

import xxhash

from phalanx.core.digest import BytesLike, canonical_json, xxh3
from phalanx.core.errors import PhalanxError
from phalanx.objects.file import translated

FORMAT: Final = "phalanx.export/1"
_READ_BYTES: Final = 1 << 20


class HashedFile:
    """A file that is written from front to back, and its digest."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._hash, self.num_bytes = file, xxhash.xxh3_128(), 0

    def write(self, data: BytesLike) -> None:
        """Appends all of `data`."""
        self._file.write(data)
        self._hash.update(data)
        self.num_bytes += len(data)

    @property
    def digest(self) -> str:
        """Of everything written."""
        return f"xxh3:{self._hash.hexdigest()}"


class PartFolder:
    """The part folder of the export to `out`, claimed for this process. `export`: plain values that name what is
    exported; whole files of an earlier start are kept where it says the same. is_renamed: an earlier start of this very
    export made the target of it, and was killed before it said so.

    Raises PhalanxError where `out` exists or another process makes it, StoreError where the disk fails.
    """

    def __init__(self, out: Path, export: Mapping[str, Any]) -> None:
        self._out, self.path = out, out.parent / f".{out.name}.part"
        self._files, self._state_path = self.path / "files", self.path / "state"
        self._whole: dict[str, tuple[int, str]] = {}
        self.is_renamed = False
        with translated(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._state = os.open(self._state_path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                self._claim()
                self._load({"format": FORMAT, **export})
            except BaseException:
                os.close(self._state)
                raise

    def holds(self, name: str, num_bytes: int) -> bool:
        """Whether an earlier start wrote the file whole: its bytes are read and compared with what was noted."""
        if self._whole.get(name, (None,))[0] != num_bytes:
            return False
        with translated(self._files / name):
            return (num_bytes, _digest_of(self._files / name)) == self._whole[name]

    def holds_small(self, name: str, data: bytes) -> bool:
        """Whether an earlier start wrote the file, with this content."""
        return self._whole.get(name) == (len(data), xxh3(data)) and self.holds(name, len(data))

    @contextmanager
    def create(self, name: str) -> Iterator[HashedFile]:
        """A file to write; durable and noted as whole at the end of the block, unless that raises."""
        path = self._files / name
        with translated(path), path.open("wb") as file:
            hashed = HashedFile(file)
            yield hashed
            file.flush()
            os.fsync(file.fileno())
            _sync(self._files)
            self._append({"file": name, "num_bytes": hashed.num_bytes, "digest": hashed.digest})

    def write(self, name: str, data: bytes) -> None:
        """A small file, written anew."""
        with self.create(name) as file:
            file.write(data)

    def finish(self) -> None:
        """Makes the folder the target: it appears whole. An earlier start's rename is not done again."""
        with translated(self._out):
            if not self.is_renamed:
                self._files.rename(self._out)
            _sync(self._out.parent)
        self.discard()

    def discard(self) -> None:
        """Removes the part folder and all in it."""
        shutil.rmtree(self.path, ignore_errors=True)

    def close(self) -> None:
        """Lets other processes have it."""
        os.close(self._state)

    def _claim(self) -> None:
        try:
            fcntl.flock(self._state, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = os.path.samestat(os.fstat(self._state), self._state_path.stat())
        except (BlockingIOError, FileNotFoundError):
            is_ours = False
        if not is_ours:
            raise PhalanxError(
                str(self._out), expected="a folder that no other export makes now", remedy="wait for it to end"
            )

    def _load(self, header: Mapping[str, Any]) -> None:
        """Takes what an earlier start left, or begins anew; PhalanxError for a target that is not what it left."""
        lines = self._state_path.read_bytes().splitlines(keepends=True)
        found = [_parsed(line) for line in lines]
        is_same = bool(found) and found[0] == header
        if is_same:
            rows = (row for row in found[1:] if row is not None)
            self._whole = {row["file"]: (row["num_bytes"], row["digest"]) for row in rows}
        if os.path.lexists(self._out):  # a link to nowhere too
            self._take_target(is_same)
            return
        if is_same:
            if not lines[-1].endswith(b"\n"):
                os.write(self._state, b"\n")
        else:
            os.ftruncate(self._state, 0)
            shutil.rmtree(self._files, ignore_errors=True)
            self._append(header)
        self._files.mkdir(exist_ok=True)
        _sync(self.path)

    def _take_target(self, is_same: bool) -> None:
        """A target is refused, unless it is this export's: the files that the state names whole, renamed but not told.
        What lies beside a refused one is of an export that was killed after its last act but one.
        """
        if not self._files.exists():
            is_whole = all((self._out / name).is_file() for name in self._whole)
            if is_same and self._whole and is_whole:
                self._files, self.is_renamed = self._out, True
                return
            self.discard()
        raise self.exists()

    def exists(self) -> PhalanxError:
        """What to raise for a target that is not of this export."""
        return PhalanxError(
            str(self._out), expected="a folder that does not exist yet", remedy="choose another --out or remove it"
        )

    def _append(self, line: Mapping[str, Any]) -> None:
        data = canonical_json(line) + b"\n"
        if os.write(self._state, data) != len(data):
            raise OSError(None, "the disk took only a part of a line")
        os.fsync(self._state)


def _parsed(line: bytes) -> dict[str, Any] | None:
    """A line of the state; None for one that was cut or spoiled."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    is_file = isinstance(found, dict) and {"file", "num_bytes", "digest"} == found.keys()
    return found if is_file or (isinstance(found, dict) and "format" in found) else None


def _digest_of(path: Path) -> str | None:
    if not path.is_file():
        return None
    hashed = xxhash.xxh3_128()
    with path.open("rb") as file:
        while data := file.read(_READ_BYTES):
            hashed.update(data)
    return f"xxh3:{hashed.hexdigest()}"


def _sync(folder: Path) -> None:
    """Makes the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
