"""Pieces of shards on a node's disk, fetched once for all ranks of the node and kept up to a bound in bytes.

A folder of plain files, and nothing else: no process, no database, no memory that outlives its users.
  <name>         a whole piece; it came to this name by rename(2), so it is never seen half written
  <name>.part    a piece being written, by whoever holds flock(2) on it
  <name>.room    empty: room reserved by whoever holds flock(2) on it
The kernel ends a lock with its process, so after a SIGKILL the next who wants the piece writes the file anew, and one
that nobody wants goes with the next eviction. A name says what the piece holds (the digest of its shard, first byte,
number of bytes), so jobs, datasets and epochs may share a folder and nothing in it can go stale. A piece is not synced:
after a power failure it may be wrong, which its reader finds by the digests of its members.

The bound holds for what is written and what is being written together: who wants to write reserves the place by the
name of its `.part`, lets the pieces go that were used least recently, and writes then. To look through the folder for
every piece would cost more than to fetch it, so a process reserves room for several in one look; the name of its
`.room` says how much, and counts until the process looks again or ends. A piece that is let go stays readable for those
who have mapped it, and takes its space until they are done.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import random
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.errors import PhalanxError
from phalanx.stream.mapped import Bytes, map_open

PART, ROOM, GIB = ".part", ".room", 1 << 30
_NAME = re.compile(rf"[0-9a-f]+-[0-9]+-([0-9]+)({re.escape(PART)}|{re.escape(ROOM)})?")
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.02
_LEAST_ROOM_BYTES = 16 << 20  # small caches are looked through soon enough
_ROOM_SHARE, _MOST_ROOM_BYTES = 256, 256 << 20  # a process reserves this part of the bound in one look, at most so much
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Entry:
    """One file of the cache. num_bytes: what it takes, or will take; is_part: whether it is a `.part` or a `.room`."""

    name: str
    num_bytes: int
    used_ns: int
    is_part: bool


class NodeCache:
    """Pieces below `folder`, `max_bytes` of them. Safe to use from several threads and processes.

    patience_s: how long another process is waited for that fetches the same piece; then it is fetched without the
    cache. Raises PhalanxError where the folder can't be used.
    """

    def __init__(self, folder: Path, max_bytes: int, patience_s: float = 60) -> None:
        self.folder, self.max_bytes, self._patience_s = folder, max_bytes, patience_s
        self._is_told = False
        self._room_lock = threading.Lock()
        self._room_bytes = 0
        self._end_room: Callable[[], object] = _nothing
        make_private(folder)

    def get(self, name: str, num_bytes: int, fetch: Callable[[], Bytes]) -> Bytes:
        """The piece, mapped from the cache, or as `fetch` gave it where the disk can't hold it; raises what `fetch`
        raises. Whether its bytes are right is for the reader to check.
        """
        end_s = time.monotonic() + self._patience_s
        pause_s = _SHORTEST_PAUSE_S
        while True:
            found = self._whole(name, num_bytes)
            if found is not None:
                return found
            try:
                with self._claimed(name + PART) as part:
                    if part is not None:
                        return self._fill(part, name, num_bytes, fetch)
            except OSError as error:
                self._tell(error)
                return fetch()
            if time.monotonic() > end_s:
                return fetch()
            time.sleep(pause_s * random.uniform(0.5, 1))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def require(self, num_bytes: int, what: str) -> None:
        """Raises PhalanxError where the bound or the disk is too small for `num_bytes`, which are `what`: then pieces
        would push each other out before they are read.
        """
        status = os.statvfs(self.folder)
        free_bytes = status.f_bavail * status.f_frsize + self.used_bytes()
        if num_bytes > self.max_bytes:
            raise PhalanxError(
                "cluster.cache_gib",
                value=f"{self.max_bytes / GIB:g}",
                expected=f"at least {num_bytes / GIB:.3f}: {what} ({num_bytes:,} bytes)",
                remedy="raise it, or set it to 0 to read without a cache",
            )
        if num_bytes > free_bytes:
            raise PhalanxError(
                "cluster.cache_folder",
                value=str(self.folder),
                expected=f"a disk with at least {num_bytes:,} free bytes, found {free_bytes:,}: {what}",
                remedy="name a folder on another disk, or set cluster.cache_gib = 0 to read without a cache",
            )

    def drop(self, name: str) -> None:
        """Lets a piece go whose bytes are wrong."""
        with suppress(OSError):
            (self.folder / name).unlink()

    def used_bytes(self) -> int:
        """Bytes of all pieces, with those being written."""
        return sum(num_bytes for name, num_bytes in self._found().items() if not name.endswith(ROOM))

    def _whole(self, name: str, num_bytes: int) -> Bytes | None:
        """A piece that is there, marked as used now; one of another size is let go."""
        path = self.folder / name
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            if os.fstat(file).st_size != num_bytes:
                self.drop(name)
                return None
            with suppress(OSError):
                os.utime(file)
            return map_open(file, 0, num_bytes)
        except OSError as error:
            self._tell(error)
            return None
        finally:
            os.close(file)

    @contextmanager
    def _claimed(self, name: str, creates: int = os.O_CREAT) -> Iterator[int | None]:
        """The open `.part` or `.room` of this name, held by this caller alone; None while another one holds it.
        creates: 0 to raise FileNotFoundError where there is none.
        """
        path = self.folder / name
        file = os.open(path, os.O_RDWR | creates | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            yield file if _locks(file) and _is_at(file, path) else None
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # said aloud: a child that was forked meanwhile would hold it on
            os.close(file)

    def _fill(self, part: int, name: str, num_bytes: int, fetch: Callable[[], Bytes]) -> Bytes:
        """Fetches a piece into its claimed `.part` and gives it its name."""
        found = self._whole(name, num_bytes)  # it may have come between the look and the claim
        path = self.folder / (name + PART)
        if found is not None:
            path.unlink(missing_ok=True)
            return found
        is_kept = False
        try:
            if not self._make_room(num_bytes, name):
                return fetch()
            os.ftruncate(part, 0)
            data = fetch()
            try:
                _write(part, data)
                path.rename(self.folder / name)
            except OSError as error:
                self._tell(error)
                return data
            is_kept = True
            return map_open(part, 0, num_bytes) if len(data) == num_bytes else data
        finally:
            if not is_kept:
                path.unlink(missing_ok=True)

    def _make_room(self, num_bytes: int, name: str) -> bool:
        """Room for the piece `name`, reserved by its `.part`: out of what this process has reserved, or by letting
        others go; False where what is left is being written.
        """
        with self._room_lock:
            if num_bytes > self._room_bytes:
                self._end_room()
                self._room_bytes, self._end_room = 0, _nothing
                most = min(self.max_bytes // _ROOM_SHARE, _MOST_ROOM_BYTES)
                if most < max(num_bytes, _LEAST_ROOM_BYTES) or not self._reserve(most, name):
                    return self._fits(name + PART)
            self._room_bytes -= num_bytes
            return True

    def _reserve(self, num_bytes: int, name: str) -> bool:
        """Reserves room beside the `.part` of the piece `name`, for that piece and others."""
        room = self.folder / f"{os.urandom(16).hex()}-0-{num_bytes}{ROOM}"
        file = os.open(room, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        end = weakref.finalize(self, _end_of_room, file, room, os.getpid())
        try:
            if _locks(file) and _is_at(file, room) and self._fits(name + PART, room.name):
                self._room_bytes, self._end_room = num_bytes, end
                return True
        except BaseException:
            end()
            raise
        end()
        return False

    def _fits(self, *kept: str) -> bool:
        """Lets go what was used least recently, but for `kept`, until all that is there and being written has its
        place; False where what is left is being written.
        """
        found = self._found()
        total = sum(found.values())
        if total <= self.max_bytes:
            return True
        for entry in sorted(self._entries(found), key=lambda entry: entry.used_ns):
            if total <= self.max_bytes:
                break
            if entry.name not in kept and self._let_go(entry):
                total -= entry.num_bytes
        return total <= self.max_bytes

    def _let_go(self, entry: _Entry) -> bool:
        """Removes a piece, or a `.part` or `.room` whose holder is dead; whether its bytes are known to be free now."""
        path = self.folder / entry.name
        try:
            if not entry.is_part:
                path.unlink(missing_ok=True)  # another process may have been sooner
                return True
            with self._claimed(entry.name, creates=0) as part:
                if part is not None:
                    path.unlink()
                return part is not None
        except FileNotFoundError:
            return False  # a part that has gone may have become a piece
        except OSError as error:
            self._tell(error)
            return False

    def _found(self) -> dict[str, int]:
        """Bytes of all pieces, and of parts of those that are not whole yet, by name. Looks twice: a part that becomes
        a piece during one look may be missed by it under both names, but was there in the look before, or is in the one
        after.
        """
        names = {*self._listed(), *self._listed()}
        matches = [match for match in map(_NAME.fullmatch, names) if match is not None]
        return {match[0]: int(match[1]) for match in matches if match[2] is None or match[0][: -len(PART)] not in names}

    def _listed(self) -> list[str]:
        return os.listdir(self.folder)  # noqa: PTH208 - a third of the time of Path.iterdir, for the names alone

    def _entries(self, found: Mapping[str, int]) -> Iterator[_Entry]:
        """What was found and is there still, with the time of its last use."""
        for name, num_bytes in found.items():
            with suppress(FileNotFoundError):
                used_ns = (self.folder / name).lstat().st_mtime_ns
                yield _Entry(name, num_bytes, used_ns, name.endswith((PART, ROOM)))

    def _tell(self, error: OSError) -> None:
        """Logs, once, that the disk does not do its part: reading goes on without it."""
        if not self._is_told:
            self._is_told = True
            _LOG.warning("cache folder %s: %s; what can't be kept is fetched by each rank", self.folder, error)


def _nothing() -> None:
    """Ends the room of who has none."""


def _end_of_room(file: int, room: Path, owner: int) -> None:
    """Gives back the room of the process `owner`; what it was reserved for has names of its own."""
    if os.getpid() == owner:  # a forked child shares the lock, and lets its parent have it
        with suppress(OSError):
            room.unlink()
        fcntl.flock(file, fcntl.LOCK_UN)  # said aloud: a child that was forked meanwhile would hold it on
    os.close(file)


def _locks(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def _is_at(file: int, path: Path) -> bool:
    """Whether an open file still has its name: it may have been finished or removed before it was locked."""
    try:
        return os.path.samestat(os.fstat(file), path.stat(follow_symlinks=False))
    except FileNotFoundError:
        return False


def _write(file: int, data: Bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]


def make_private(folder: Path) -> None:
    """Makes the folder, for this user alone; raises PhalanxError where it is another's or can't be written."""
    try:
        for each in (folder.parent, folder):  # `parents` alone would make them as the umask says
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
        owners = {folder.stat().st_uid, folder.lstat().st_uid}  # of the folder, and of a link that leads there
        reason = "another user's" if owners != {os.getuid()} else ""
        if not reason and not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            reason = "not writable"
    except OSError as error:
        reason = error.strerror or str(error)
    if reason:
        raise PhalanxError(
            "cluster.cache_folder",
            value=str(folder),
            expected=f"a folder of this user's on the node's own disk, found it {reason}",
            remedy="name another folder, or set cluster.cache_gib = 0 to read without a cache",
        )
