"""One object of a remote store as a file of this node: fetched by one process, mapped by all, so its pages are there
once.

The file is named by its SHA-256 and created at once or not at all. Who fetches holds a lock on the folder which the
kernel takes back when its holder dies; who waits for it too long fetches by itself. So a process may be killed at any
moment, and what it leaves behind stops nobody: the next writer in the folder removes its temporary file. Where the
folder can't be used, the bytes stay in the process's own memory, and a warning says so.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import mmap
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from phalanx.core.digest import sha256
from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.objects import ObjectStore
from phalanx.objects.leftovers import sweep, temporary_name

CHUNK_BYTES = 8 << 20
LOCK_WAIT_S, _POLL_S = 30.0, 0.02
KEPT_FILES, _SWEPT_ENTRIES = 8, 1000
_READS_AT_ONCE = 4
_SUFFIX = ".object"
_UNUSABLE = (OSError, PhalanxError, OutsideError)
_LOG = logging.getLogger(__name__)


def node_folder() -> Path:
    """Where this user's processes on this node share copies where no other folder is named: below TMPDIR."""
    return Path(tempfile.gettempdir()) / f"phalanx-{os.getuid()}" / "objects"


def mapped_object(
    store: ObjectStore,
    key: str,
    num_bytes: int,
    digest: str,
    folder: Path | None = None,
    lock_wait_s: float = LOCK_WAIT_S,
) -> bytes | memoryview:
    """The object's bytes, mapped from its own file or from this node's copy in `folder`.

    Objects are never changed; a file that is cut short all the same ends the process that then touches what is gone.
    Raises ObjectMissing, OutsideError where the object not `num_bytes` and `digest` (`sha256:...`) twice in a row, and
    what the store raises.
    """
    path = store.local_path(key)
    if path is not None:
        own = _mapped(path, num_bytes, digest) or _mapped(path, num_bytes, digest)
        if own is None:
            store.info(key)  # tells where it may not be read
            raise _damaged(store, key, num_bytes, digest)
        return own
    folder = folder or node_folder()
    path = folder / f"{digest.rpartition(':')[2]}{_SUFFIX}"
    try:
        _make_private(folder)
    except _UNUSABLE as error:
        _warn(path, error)
        return b"".join(_fetched(store, key, num_bytes, digest))
    found = _mapped(path, num_bytes, digest)
    if found is None:
        return _fetch_once(store, key, num_bytes, digest, path, lock_wait_s)
    with contextlib.suppress(OSError):
        os.utime(path)  # used now: evicted last
    return found


def _fetch_once(
    store: ObjectStore, key: str, num_bytes: int, digest: str, path: Path, lock_wait_s: float
) -> bytes | memoryview:
    with _locked(path.parent, lock_wait_s):
        found = _mapped(path, num_bytes, digest)
        if found is not None:
            return found
        chunks = _fetched(store, key, num_bytes, digest)
        try:
            _put(path, chunks)
            _evict(path)
        except _UNUSABLE as error:
            _warn(path, error)
        found = _map(path, num_bytes)
        return b"".join(chunks) if found is None else found


def _warn(path: Path, error: Exception) -> None:
    _LOG.warning("no shared copy %s, so each process keeps its own in memory: %s", path, error)


def _make_private(folder: Path) -> None:
    """Makes the folder; raises PhalanxError where another user could change what lies in it."""
    for each in (folder.parent, folder):
        each.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = each.lstat()
        if status.st_uid != os.getuid() or status.st_mode & 0o022 or not each.is_dir() or each.is_symlink():
            raise PhalanxError(
                str(each),
                expected="a folder that only this user can change",
                remedy="remove it, or name another folder (cluster.cache_folder of a job file, else TMPDIR)",
            )


def _mapped(path: Path, num_bytes: int, digest: str) -> memoryview | None:
    """The file's bytes; None where it can't be opened or is not what it should be."""
    mapped = _map(path, num_bytes)
    return mapped if mapped is not None and sha256(mapped) == digest else None


def _map(path: Path, num_bytes: int) -> memoryview | None:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.fstat(file).st_size != num_bytes or not num_bytes:
            return None
        return memoryview(mmap.mmap(file, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ))
    finally:
        os.close(file)


def _fetched(store: ObjectStore, key: str, num_bytes: int, digest: str) -> list[bytes]:
    """The object in chunks, several at once; fetched once more where its bytes are wrong."""

    def read(start: int) -> bytes:
        return store.read(key, start, min(CHUNK_BYTES, num_bytes - start))

    for _ in range(2):
        if store.info(key).num_bytes != num_bytes:
            continue
        whole, chunks = hashlib.sha256(), []
        with ThreadPoolExecutor(_READS_AT_ONCE, thread_name_prefix="phalanx-table") as threads:
            for chunk in threads.map(read, range(0, num_bytes, CHUNK_BYTES)):
                whole.update(chunk)
                chunks.append(chunk)
        if f"sha256:{whole.hexdigest()}" == digest:
            return chunks
    raise _damaged(store, key, num_bytes, digest)


def _put(path: Path, chunks: list[bytes]) -> None:
    """Creates the file at once, or puts it in the place of a damaged one. It is not synced: what a power failure leaves
    of it is found by its digest.
    """
    sweep(path.parent, _SWEPT_ENTRIES)
    temporary = path.parent / temporary_name()
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        for chunk in chunks:
            rest = memoryview(chunk)
            while rest:
                rest = rest[os.write(file, rest) :]
        temporary.replace(path)
    finally:
        os.close(file)
        temporary.unlink(missing_ok=True)


def _evict(newest: Path) -> None:
    """Removes the copies used longest ago; who has mapped one keeps it."""
    found = [(each.stat().st_mtime_ns, each) for each in newest.parent.glob(f"*{_SUFFIX}") if each != newest]
    for _, each in sorted(found, reverse=True)[KEPT_FILES - 1 :]:
        each.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(folder: Path, wait_s: float) -> Iterator[None]:
    """Holds the folder's lock, or goes on without it when the wait is over: it saves work, and guards nothing."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)  # closed: unlocked, also by a kill
    try:
        end = time.monotonic() + wait_s
        while time.monotonic() < end:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_POLL_S)
        yield
    finally:
        os.close(file)


def _damaged(store: ObjectStore, key: str, num_bytes: int, digest: str) -> OutsideError:
    return OutsideError(
        f"{store.url}/{key} is damaged: it does not have the {num_bytes} bytes and the digest {digest} of its manifest"
    )
