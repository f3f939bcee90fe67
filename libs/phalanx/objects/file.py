"""`file://`: objects as files below a root folder, on a local disk or a shared POSIX file system.

An object is written to a temporary file in its own folder, fsynced, and then hard-linked to its name: link(2) is
atomic and fails if the name exists, which makes it create-only whoever races. The folder is fsynced before `create`
returns. A writer that is killed leaves at most a temporary file, which no listing shows and no other writer meets;
whoever next creates an object in that folder, or lists it, removes it (`leftovers`).
Calls on a dead network file system cannot be interrupted: a mount's own time-out is their deadline.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from phalanx.core.digest import BytesLike
from phalanx.objects.base import (
    TEMPORARY_SUFFIX,
    ObjectExists,
    ObjectInfo,
    ObjectMissing,
    ObjectStore,
    ObjectWriter,
    StoreDenied,
    StoreError,
    as_view,
    check_key,
    check_range,
)
from phalanx.objects.leftovers import remove_if_dead, sweep, temporary_name
from phalanx.objects.writeback import STRIDE_BYTES, Writeback

_FOLDER_RACES = 16
_NO_FOLDER = (FileNotFoundError, NotADirectoryError)
_SWEPT_FOLDERS, _SWEPT_ENTRIES = 1024, 10_000


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Turns the operating system's errors into the store's: what the user must change apart from what broke."""
    try:
        yield
    except PermissionError as error:
        raise StoreDenied(
            str(error.filename or path),
            expected="a path this user may use",
            remedy="change its permissions or choose another storage URL",
        ) from error
    except (NotADirectoryError, FileExistsError) as error:
        raise StoreDenied(
            str(error.filename or path),
            expected="a folder, found a file",
            remedy="move the file away or choose another storage URL",
        ) from error
    except OSError as error:
        if error.errno == errno.EROFS:
            raise StoreDenied(
                str(path),
                expected="a file system that can be written",
                remedy="remount it or choose another storage URL",
            ) from error
        raise StoreError(f"{path}: {error.strerror or error}") from error


class FileStore(ObjectStore):
    """Objects below `root`, which is created with the first object."""

    def __init__(self, root: Path) -> None:
        assert root.is_absolute(), root
        self.root, self.url = root, f"file://{root}"
        self._swept: set[Path] = set()
        self._lock = threading.Lock()

    def _path(self, key: str) -> Path:
        return self.root / check_key(key)

    def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        path = self._path(key)
        with _open_object(path, key) as file:
            wanted = check_range(str(path), os.fstat(file).st_size, offset, length)
            return _read_exactly(file, path, offset, wanted)

    def read_view(self, key: str, offset: int, length: int, scratch: memoryview) -> memoryview:
        path = self._path(key)
        with _open_object(path, key) as file:
            wanted = check_range(str(path), os.fstat(file).st_size, offset, length)
            done = 0
            while done < wanted:  # one call reads 2 GiB at most, and less on a signal
                more = os.preadv(file, [scratch[done:wanted]], offset + done)
                if not more:
                    raise _shortened(path, offset + done)
                done += more
        return scratch[:wanted]

    def local_path(self, key: str) -> Path | None:
        return self._path(key)

    def info(self, key: str) -> ObjectInfo:
        with _open_object(self._path(key), key) as file:
            return ObjectInfo(key, os.fstat(file).st_size)

    def version(self, key: str) -> str:
        with _open_object(self._path(key), key) as file:
            found = os.fstat(file)
        return f"{found.st_dev}-{found.st_ino}-{found.st_size}-{found.st_mtime_ns}-{found.st_ctime_ns}"

    def create(self, key: str, data: BytesLike) -> None:
        with self.writer(key) as writer:
            writer.write(data)
            writer.commit()

    def writer(self, key: str) -> ObjectWriter:
        path = self._path(key)
        writer = FileWriter(self.root, path, key)
        self._sweep(path.parent)
        return writer

    def _sweep(self, folder: Path) -> None:
        """Removes what killed writers left in `folder`: with the first object that this store creates there, which
        bounds the cost of many objects in one folder.
        """
        with self._lock:
            if folder in self._swept:
                return
            if len(self._swept) >= _SWEPT_FOLDERS:
                self._swept.clear()
            self._swept.add(folder)
        sweep(folder, _SWEPT_ENTRIES)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        found: list[ObjectInfo] = []
        folder = prefix.rpartition("/")[0]
        with translated(self.root):
            _collect(self._folder(folder), folder, found)
        yield from sorted((info for info in found if info.key.startswith(prefix)), key=lambda info: info.key)

    def children(self, prefix: str = "") -> Iterator[str]:
        folder, slash, _ = prefix.rpartition("/")
        names: list[str] = []
        with translated(self.root), suppress(*_NO_FOLDER), os.scandir(self._folder(folder)) as entries:
            shown = (entry for entry in entries if not entry.name.endswith(TEMPORARY_SUFFIX))
            names += [f"{folder}{slash}{entry.name}{'/' if _is_folder(entry) else ''}" for entry in shown]
        yield from sorted(name for name in names if name.startswith(prefix))

    def _folder(self, key: str) -> Path:
        return self.root / check_key(key) if key else self.root

    def delete(self, key: str) -> None:
        path = self._path(key)
        with translated(path), suppress(FileNotFoundError, IsADirectoryError, NotADirectoryError):
            path.unlink()
            _sync_folder(path.parent)  # so that what is deleted next is never gone while this is there again
            _prune(self.root, path.parent)


class FileWriter(ObjectWriter):
    """One object on its way: an open temporary file beside its final name."""

    def __init__(self, root: Path, path: Path, key: str) -> None:
        self._root, self._path, self._key = root, path, key
        self._temporary = path.parent / temporary_name()
        with translated(path):
            if path.exists():
                raise _taken(path, key)
            self._file = _open_new(self._temporary)
        self._writeback = Writeback(self._file)

    def write(self, chunk: BytesLike) -> None:
        rest = as_view(chunk)
        with translated(self._path):
            while rest:
                num_bytes = os.write(self._file, rest[:STRIDE_BYTES])
                self._writeback.appended(num_bytes)
                rest = rest[num_bytes:]

    def commit(self) -> None:
        with translated(self._path):
            os.fsync(self._file)
            try:
                os.link(self._temporary, self._path)
            except FileExistsError as error:
                # A network file system may repeat a link whose reply was lost: two names mean that the link is ours.
                if os.fstat(self._file).st_nlink != 2:
                    raise _taken(self._path, self._key) from error
            self.abort()
            _sync_folder(self._path.parent)

    def abort(self) -> None:
        if self._file < 0:
            return
        os.close(self._file)
        self._file = -1
        with translated(self._temporary), suppress(FileNotFoundError):
            self._temporary.unlink()
            _prune(self._root, self._path.parent)


def _taken(path: Path, key: str) -> Exception:
    if path.is_dir():
        return StoreError(f"{path}: is a folder of other objects, so no object can have its name")
    return ObjectExists(key)


@contextmanager
def _open_object(path: Path, key: str) -> Iterator[int]:
    with translated(path):
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ObjectMissing(key) from error
        try:
            if path.is_dir():
                raise ObjectMissing(key)
            yield file
        finally:
            os.close(file)


def _read_exactly(file: int, path: Path, offset: int, length: int) -> bytes:
    data = os.pread(file, length, offset)
    while len(data) < length:  # one call returns 2 GiB at most, and less on a signal
        more = os.pread(file, length - len(data), offset + len(data))
        if not more:
            raise _shortened(path, offset + len(data))
        data += more
    return data


def _shortened(path: Path, num_bytes: int) -> StoreError:
    return StoreError(f"{path}: ends at byte {num_bytes}; it became shorter while it was read")


def _open_new(temporary: Path) -> int:
    """Opens a new file, making its folders; tries again where a deleter pruned an empty folder in between."""
    for _ in range(_FOLDER_RACES):
        _make_folders(temporary.parent)
        with suppress(FileNotFoundError):
            return os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    if _takes_nothing(temporary.parent):
        raise StoreDenied(
            str(temporary.parent),
            expected="a folder that can be made and written",
            remedy="it can't be, on the file system that it lies on: choose another storage URL",
        )
    raise StoreError(f"{temporary.parent}: the folder vanished {_FOLDER_RACES} times while an object was created in it")


def _takes_nothing(folder: Path) -> bool:
    """Whether the deepest folder that is there, of `folder` and those above, stays and takes no new folder: /proc says
    of one that it is not found.
    """
    there = next(each for each in (folder, *folder.parents) if each.is_dir())
    trial = there / temporary_name()
    try:
        trial.mkdir()
    except FileNotFoundError:
        return there.is_dir()
    trial.rmdir()
    return False


def _make_folders(folder: Path) -> None:
    """Makes missing folders, each durable in its parent."""
    if folder.is_dir():
        return
    _make_folders(folder.parent)
    with suppress(FileNotFoundError):
        folder.mkdir(exist_ok=True)
        _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _prune(root: Path, folder: Path) -> None:
    """Removes folders that became empty, up to the root, which stays."""
    with suppress(OSError):  # not empty any more, or already gone: both are as it should be
        while folder != root:
            folder.rmdir()
            folder = folder.parent


def _collect(folder: Path, key: str, found: list[ObjectInfo]) -> None:
    """Adds the objects below `folder`, whose own key is `key`; what vanishes meanwhile, or is a link that leads
    nowhere, is left out.

    Removes the temporary files of dead writers that it meets: nobody may ever write again in the folder of an attempt
    that was killed.
    """
    with suppress(*_NO_FOLDER), os.scandir(folder) as entries:
        for entry in entries:
            name = f"{key}/{entry.name}" if key else entry.name
            if entry.name.endswith(TEMPORARY_SUFFIX):
                remove_if_dead(Path(entry.path))
                continue
            if _is_folder(entry):
                _collect(Path(entry.path), name, found)
                continue
            num_bytes = _size(entry)
            if num_bytes is not None:
                found.append(ObjectInfo(name, num_bytes))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except NotADirectoryError:  # a link through a file, which leads nowhere
        return False
    except OSError as error:
        raise _unfollowed(entry, error) from error


def _size(entry: os.DirEntry[str]) -> int | None:
    """Bytes of a file; None where it is gone by now, or the entry is a link that leads nowhere."""
    try:
        return entry.stat().st_size
    except _NO_FOLDER:
        return None
    except OSError as error:
        raise _unfollowed(entry, error) from error


def _unfollowed(entry: os.DirEntry[str], error: OSError) -> Exception:
    """Links to folders are followed: one that leads into a circle would be listed without an end."""
    if error.errno != errno.ELOOP:
        return error
    return StoreDenied(
        entry.path, expected="no links that lead to each other or to a folder above", remedy="remove the link"
    )
