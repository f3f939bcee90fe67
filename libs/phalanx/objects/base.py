"""The contract of an object store: immutable objects under string keys, each created exactly once.

Every store promises the same, whatever holds the bytes:
  read     exactly the bytes asked for, or an error; never fewer
  create   all or nothing, durable at return, and never over an existing object, however many writers race
  writer   the same for a streamed object: nothing exists under the key before `commit`
  list     what is there now, sorted by key; never from a cache; `children` the same one level deep
  delete   idempotent, durable at return
A key is a relative path with `/` between its segments. Writing the same key twice is an error even where the bytes
agree; see `create`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from phalanx.core.digest import BytesLike
from phalanx.core.errors import OutsideError, PhalanxError

MAX_KEY_BYTES, MAX_SEGMENT_BYTES = 1024, 255
TEMPORARY_SUFFIX = ".phalanx-tmp"


class ObjectMissing(Exception):
    """No object has this key."""


class ObjectExists(Exception):
    """An object with this key was there already; it was not touched."""


class StoreDenied(PhalanxError):
    """The store refuses us.

    Permissions, credentials, or a bucket or folder that is not there. The user must change something.
    """


class StoreError(OutsideError):
    """The store failed and did not mend before the deadline, or it does not hold the bytes that were asked for."""


@dataclass(frozen=True, slots=True)
class StorageSettings:
    """How to reach one store: the `[storage.NAME]` section of a job file. None means what the usual AWS variables and
    files say.

    endpoint: URL of an S3-compatible server. addressing: bucket in the path or in the host name (None: path with an
    endpoint of one's own, virtual on AWS). ca_bundle: PEM file with the certificates to trust. profile: section of
    the AWS files.
    """

    endpoint: str | None = None
    region: str | None = None
    addressing: Literal["path", "virtual"] | None = None
    ca_bundle: str | None = None
    profile: str | None = None


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One stored object: its key, relative to the store that was asked, and its size."""

    key: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Upload:
    """An upload in parts that was begun and neither finished nor dropped: it takes space, and no listing shows it."""

    key: str
    upload_id: str


def check_key(key: str) -> str:
    """`key` itself if every store can hold it, else StoreDenied.

    Relative, no empty, `.` or `..` segment, no control character.
    """
    segments = key.split("/")
    if any(segment in ("", ".", "..") for segment in segments):
        problem = "a relative path without empty, '.' or '..' segments"
    elif not key.isprintable() or "\\" in key:
        problem = "printable characters without a backslash"
    elif len(key.encode()) > MAX_KEY_BYTES or any(len(segment.encode()) > MAX_SEGMENT_BYTES for segment in segments):
        problem = f"at most {MAX_KEY_BYTES} bytes, {MAX_SEGMENT_BYTES} in a segment"
    elif any(segment.endswith(TEMPORARY_SUFFIX) for segment in segments):
        problem = f"no segment that ends in {TEMPORARY_SUFFIX}, which marks files being written"
    else:
        return key
    raise StoreDenied("object key", value=key, expected=problem, remedy="choose another name")


def as_view(data: BytesLike) -> memoryview:
    """`data` as a flat view of bytes, without a copy where it is contiguous."""
    view = memoryview(data)
    return view.cast("B") if view.contiguous else memoryview(view.tobytes())


def check_range(where: str, num_bytes: int, offset: int, length: int | None) -> int:
    """How many bytes a read of [offset, offset + length) takes from an object of `num_bytes`.

    StoreError if they are not all there.
    """
    wanted = max(num_bytes - offset, 0) if length is None else length
    if offset < 0 or wanted < 0 or offset + wanted > num_bytes:
        raise StoreError(f"{where}: bytes {offset} to {offset + wanted} were asked of an object of {num_bytes} bytes")
    return wanted


class ObjectWriter(ABC):
    """A streamed object.

    `with store.writer(key) as w: w.write(...); w.commit()`. Leaving without `commit` leaves nothing.
    """

    @abstractmethod
    def write(self, chunk: BytesLike) -> None:
        """Appends `chunk`; the bytes are taken before the call returns."""

    @abstractmethod
    def commit(self) -> None:
        """Makes the object exist, whole and durable.

        Raises ObjectExists if the key was taken, StoreDenied, StoreError.
        """

    @abstractmethod
    def abort(self) -> None:
        """Drops what was written; does nothing after `commit`. Called on leaving the context."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()


class ObjectStore(ABC):
    """Objects below one URL. Instances are safe to share between threads, but not to carry over a fork.

    Every method may raise StoreDenied (the user must change something) and StoreError (broken until the deadline).
    """

    url: str

    @abstractmethod
    def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        """Bytes [offset, offset + length) of an object (length None.

        To its end). Raises ObjectMissing; StoreError if it is shorter.
        """

    def read_view(self, key: str, offset: int, length: int, scratch: memoryview) -> memoryview:
        """As `read`, for who reads much and keeps little: in `scratch`, at least `length` bytes that can be written,
        where the store can put bytes there at no more cost, else in memory of their own.
        """
        return memoryview(self.read(key, offset, length))

    def read_piece(self, key: str, offset: int, into: memoryview) -> memoryview:
        """As `read` of as many bytes as `into` has (writable, a byte an item), which come to lie there: who keeps much
        and lets it go again brings memory of its own. Returns `into`.
        """
        data = self.read(key, offset, len(into))
        into[: len(data)] = data
        return into[: len(data)]

    @abstractmethod
    def info(self, key: str) -> ObjectInfo:
        """Size of an object. Raises ObjectMissing."""

    @abstractmethod
    def version(self, key: str) -> str:
        """A text that differs once the object was written anew, also by others than this library. Raises ObjectMissing.

        What the store says of it, as of its bytes only where it holds them in memory: decay on a disk does not show.
        """

    @abstractmethod
    def create(self, key: str, data: BytesLike) -> None:
        """Makes the object exist, all or nothing, durable at return. Raises ObjectExists, and then nothing was
        touched.

        Where the reply to our own write was lost, an object with exactly our bytes counts as ours: writers that must
        tell each other apart put something of their own (a random id) into the bytes.
        """

    @abstractmethod
    def writer(self, key: str) -> ObjectWriter:
        """A streamed create for what does not fit in memory; see ObjectWriter."""

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Every object whose key starts with `prefix`, at any depth, sorted by key, as the store has it now."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Removes an object; one that is not there is no error."""

    @abstractmethod
    def children(self, prefix: str = "") -> Iterator[str]:
        """The direct children whose keys start with `prefix`, sorted, never cached: objects by their keys, and folders,
        whose keys end in `/`, without looking into them.

        `children("a/")` of a/b, a/c/d and a/c/e gives a/b and a/c/. A folder may turn out to be empty where an object
        in it is being written or was just deleted.
        """

    def local_path(self, key: str) -> Path | None:
        """The file on this machine that is the object, for readers that map it; None where objects are no files.

        Nothing says that the file is there.
        """
        return None

    def creates_large_objects_in_parts(self, folder: str = "") -> bool | None:
        """Whether an upload in parts is create-only here too (found by trying it below `folder`, "" or ending in `/`).

        None: this store has no such uploads.
        """
        return None

    def uploads(self, prefix: str = "") -> tuple[Upload, ...]:
        """Unfinished uploads in parts to keys that start with `prefix`; none in a store that has no such uploads."""
        return ()

    def drop_upload(self, upload: Upload) -> None:
        """Frees what an unfinished upload holds; one that is over by now is no error, and its object stays."""
        raise StoreError(f"{self.url}: has no uploads in parts, so none to {upload.key}")

    def within(self, prefix: str) -> ObjectStore:
        """The same store seen from below `prefix` (no object called `prefix/` need exist)."""
        return ScopedStore(self, prefix)


class ScopedStore(ObjectStore):
    """A store whose keys all lie below a prefix of another store."""

    def __init__(self, store: ObjectStore, prefix: str) -> None:
        self._store, self._prefix = store, check_key(prefix.strip("/")) + "/"
        self.url = store.url + ("" if store.url.endswith("/") else "/") + self._prefix.rstrip("/")

    def _full(self, key: str) -> str:
        return self._prefix + check_key(key)

    def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        return self._store.read(self._full(key), offset, length)

    def read_view(self, key: str, offset: int, length: int, scratch: memoryview) -> memoryview:
        return self._store.read_view(self._full(key), offset, length, scratch)

    def read_piece(self, key: str, offset: int, into: memoryview) -> memoryview:
        return self._store.read_piece(self._full(key), offset, into)

    def info(self, key: str) -> ObjectInfo:
        return ObjectInfo(key, self._store.info(self._full(key)).num_bytes)

    def version(self, key: str) -> str:
        return self._store.version(self._full(key))

    def create(self, key: str, data: BytesLike) -> None:
        self._store.create(self._full(key), data)

    def writer(self, key: str) -> ObjectWriter:
        return self._store.writer(self._full(key))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        for info in self._store.list(self._prefix + prefix):
            yield ObjectInfo(info.key.removeprefix(self._prefix), info.num_bytes)

    def delete(self, key: str) -> None:
        self._store.delete(self._full(key))

    def children(self, prefix: str = "") -> Iterator[str]:
        for key in self._store.children(self._prefix + prefix):
            yield key.removeprefix(self._prefix)

    def local_path(self, key: str) -> Path | None:
        return self._store.local_path(self._full(key))

    def creates_large_objects_in_parts(self, folder: str = "") -> bool | None:
        return self._store.creates_large_objects_in_parts(self._prefix + folder)

    def uploads(self, prefix: str = "") -> tuple[Upload, ...]:
        found = self._store.uploads(self._prefix + prefix)
        return tuple(Upload(each.key.removeprefix(self._prefix), each.upload_id) for each in found)

    def drop_upload(self, upload: Upload) -> None:
        self._store.drop_upload(Upload(self._full(upload.key), upload.upload_id))

    def within(self, prefix: str) -> ObjectStore:
        return ScopedStore(self._store, self._prefix + prefix.strip("/"))
