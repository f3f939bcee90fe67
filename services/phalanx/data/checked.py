"""Which shards an interrupted `phalanx data verify` found whole, in a file that the next one goes on from.

A line of JSON for the check, then one for each shard, appended as it is done: so a check that is killed at any moment
loses the shards it was in the middle of, and a line that was cut is left out. A shard is known by the folder and digest
of its split and by the versions of its three objects, taken before they were read: one that was written since is read
again. Damaged shards are not in it.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from phalanx.core.digest import canonical_json, xxh3
from phalanx.core.errors import PhalanxError

FORMAT: Final = "phalanx.verify/1"
_MAX_HEADER_BYTES: Final = 1 << 16
_Taken = TypeVar("_Taken")


class CheckedShards:
    """The file at `path`, for the check of what lies at `url`; made where there is none. Safe for several threads.

    Raises PhalanxError for a file that is none of ours, tells of another URL, is used by another check, or can't be
    read and written.
    """

    def __init__(self, path: Path, url: str) -> None:
        self.path, self._lock = path, threading.Lock()
        self._known: dict[tuple[str, str, int], tuple[str, int]] = {}
        try:
            self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._unusable(error) from error
        try:
            self._claim()
            self.since = self._load(url)
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)

    def of(self, folder: str, digest: str) -> SplitChecked:
        """Those of one split: its folder below the URL, and the digest of its manifest."""
        return SplitChecked(self, folder, digest)

    def remove(self) -> None:
        """Removes the file: everything is found whole, so the next check begins anew."""
        self.path.unlink(missing_ok=True)

    def find(self, key: tuple[str, str, int]) -> tuple[str, int] | None:
        """Versions and bytes of a shard that was found whole; None where it was not."""
        return self._known.get(key)

    def add(self, key: tuple[str, str, int], versions: str, num_bytes: int) -> None:
        """Writes down a shard that was found whole; raises PhalanxError where the disk does not take it."""
        folder, digest, shard = key
        line = {"folder": folder, "split": digest, "shard": shard, "bytes": num_bytes, "versions": versions}
        with self._lock:
            self._append(line)
            self._known[key] = versions, num_bytes

    def _append(self, line: dict[str, Any]) -> None:
        data = canonical_json(line) + b"\n"
        try:
            if os.write(self._file, data) != len(data):
                raise OSError(None, "the disk took only a part of a line")
        except OSError as error:
            raise self._unusable(error) from error

    def _claim(self) -> None:
        """Holds the file until it is closed, also by a kill."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_there = os.path.samestat(os.fstat(self._file), self.path.stat())
        except (BlockingIOError, FileNotFoundError):
            is_there = False
        except OSError as error:
            raise self._unusable(error) from error
        if not is_there:
            raise PhalanxError(
                str(self.path),
                expected="a file that no other `phalanx data verify` uses now",
                remedy="wait for the other one, or name another --state",
            )

    def _load(self, url: str) -> str:
        """Takes what the file says; when its check was begun, ISO 8601."""
        with os.fdopen(os.dup(self._file), "rb") as file:
            file.seek(0)
            first = file.readline(_MAX_HEADER_BYTES)
            if not first:
                begun = datetime.now(UTC).isoformat(timespec="seconds")
                self._append({"format": FORMAT, "url": url, "begun": begun})
                return begun
            header = _parsed(first, lambda line: (line["format"], line["url"], str(line["begun"])))
            if header is None or header[0] != FORMAT:
                raise self._foreign(f"a file of `phalanx data verify --state` ({FORMAT})")
            if header[1] != url:
                raise self._foreign(f"the state of a check of {url}, found that of {header[1]}")
            last = first
            for last in file:
                found = _parsed(last, _entry)
                if found is not None:
                    self._known[found[0]] = found[1]
        if not last.endswith(b"\n"):
            os.write(self._file, b"\n")
        return str(header[2])

    def _foreign(self, expected: str) -> PhalanxError:
        return PhalanxError(str(self.path), expected=expected, remedy="name another --state, or remove the file")

    def _unusable(self, error: OSError) -> PhalanxError:
        return PhalanxError(
            str(self.path),
            expected=f"a file that can be read, written and locked ({error.strerror or error})",
            remedy="name another --state, or leave it out",
        )


class SplitChecked:
    """The shards of one split that were found whole, by their numbers."""

    def __init__(self, checked: CheckedShards, folder: str, digest: str) -> None:
        self._checked, self._folder, self._digest = checked, folder, digest

    def num_bytes(self, shard: int, versions: str) -> int | None:
        """Bytes of a shard's objects, where it was found whole in these versions; else None."""
        found = self._checked.find((self._folder, self._digest, shard))
        return found[1] if found is not None and found[0] == versions else None

    def add(self, shard: int, versions: str, num_bytes: int) -> None:
        """A shard whose objects, num_bytes in all, were found whole; versions: from before they were read."""
        self._checked.add((self._folder, self._digest, shard), versions, num_bytes)


def versions_digest(versions: list[str]) -> str:
    """The versions of several objects as one."""
    return xxh3(canonical_json({"versions": versions}))


def _entry(line: Any) -> tuple[tuple[str, str, int], tuple[str, int]]:
    key = sys.intern(str(line["folder"])), sys.intern(str(line["split"])), int(line["shard"])
    return key, (str(line["versions"]), int(line["bytes"]))


def _parsed(data: bytes, take: Callable[[Any], _Taken]) -> _Taken | None:
    """What `take` makes of a line; None for one that was cut or spoiled."""
    try:
        return take(json.loads(data))
    except (ValueError, KeyError, TypeError):
        return None
