"""`s3://`: objects in a bucket of any S3-compatible store, through obstore.

Create-only is the server's work (`If-None-Match: *`); `phalanx doctor --storage URL` shows whether it does it.
Objects up to PARTS_ABOVE_BYTES are one conditional put. Larger ones go up in parts where the server makes the last
call conditional too, else by one conditional put up to S3's limit of 5 GiB. Retries are ours, not the client's: only
so do we know whether a refusal ("the key is taken") may be the echo of our own write whose reply was lost.
"""

from __future__ import annotations

import mmap
import re
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)

from phalanx.core.digest import BytesLike
from phalanx.objects.base import (
    TEMPORARY_SUFFIX,
    ObjectExists,
    ObjectInfo,
    ObjectMissing,
    ObjectStore,
    ObjectWriter,
    StorageSettings,
    StoreDenied,
    StoreError,
    Upload,
    as_view,
    check_key,
    check_range,
)
from phalanx.objects.retry import (
    SLOWEST_BYTES_PER_S,
    Deadline,
    DeadlineError,
    StaleCredentialsError,
    TransientError,
    retry,
)
from phalanx.objects.s3_client import check_process, make_engine, resolve
from phalanx.objects.s3_credentials import EXPIRED_CODES
from phalanx.objects.s3_parts import PART_BYTES, PartsUploader, TakenError
from phalanx.objects.s3_read import RangeRead

if TYPE_CHECKING:
    from obstore.store import S3Store as Engine

PARTS_ABOVE_BYTES, MAX_PUT_BYTES = 64 * 2**20, 5 * 2**30
_COMPARE_BYTES, _LIST_PAGE = 32 * 2**20, 1000
_SHORTEST_TIMEOUT_S = 0.02
_STATUS = re.compile(r"status code: (\d{3})")
_RETRIED_STATUS = (408, 409, 425, 429)


@contextmanager
def translated(where: str, key: str) -> Iterator[None]:
    """Turns obstore's errors into ours; TransientError where another try may help."""
    try:
        yield
    except FileNotFoundError as error:
        _refuse_missing_bucket(where, error)
        raise ObjectMissing(key) from error
    except (AlreadyExistsError, PreconditionError) as error:
        raise TakenError(str(error)) from error
    except (PermissionDeniedError, UnauthenticatedError) as error:
        _refuse_expired(error)
        raise StoreDenied(
            f"{where}/{key}",
            expected=f"access ({_shown(error)})",
            remedy="check the credentials, their expiry and the bucket's policy",
        ) from error
    except NotSupportedError as error:
        raise StoreError(f"{where}/{key}: the server does not support this: {_shown(error)}") from error
    except (BaseError, OSError) as error:
        _refuse_missing_bucket(where, error)
        _refuse_expired(error)
        if "path segment" in str(error):
            raise StoreError(f"{where}/{key}: a key there that no client can name: {_shown(error)}") from error
        if "redirect without LOCATION" in str(error):
            raise StoreDenied(where, expected="the bucket's own region", remedy="set region in [storage]") from error
        status = _STATUS.search(str(error))
        if status and status[1].startswith("4") and int(status[1]) not in _RETRIED_STATUS:
            raise StoreError(f"{where}/{key}: {_shown(error)}") from error
        raise TransientError(_shown(error)) from error


def _refuse_missing_bucket(where: str, error: Exception) -> None:
    if "NoSuchBucket" in str(error):
        raise StoreDenied(
            where, expected="a bucket that exists", remedy="create the bucket or correct the URL"
        ) from error


def _refuse_expired(error: Exception) -> None:
    if any(code in str(error) for code in EXPIRED_CODES):
        raise StaleCredentialsError(f"the credentials have expired: {_shown(error)}") from error


def _shown(error: Exception) -> str:
    """The first line of a client's message, without its debug dump."""
    return str(error).strip().partition("\n")[0][:300]


class S3Store(ObjectStore):
    """Objects in one bucket. parts_above_bytes, part_bytes: where uploads in parts begin, and their size."""

    def __init__(
        self,
        bucket: str,
        settings: StorageSettings,
        deadline_s: float,
        parts_above_bytes: int = PARTS_ABOVE_BYTES,
        part_bytes: int = PART_BYTES,
    ) -> None:
        self.url, self._deadline_s = f"s3://{bucket}", deadline_s
        self._access = resolve(bucket, settings)
        self._first_timeout_s = deadline_s / 2  # so that a try which stalls leaves time for another
        self._engine = make_engine(self._access, self._first_timeout_s)
        self._engine_generation = self._access.credentials.generation
        self._parts_above_bytes, self._part_bytes = parts_above_bytes, part_bytes
        self._parts_lock = threading.Lock()
        self._parts: PartsUploader | None = None
        self._has_parts: bool | None = None

    def _pick(self, number: int, deadline: Deadline, num_bytes: int = 0) -> Engine:
        """The shared client for a first try of usual size with time for a second one.

        Else a fresh one, on new connections, with the time that is left.
        """
        is_usual = num_bytes / SLOWEST_BYTES_PER_S < self._first_timeout_s <= deadline.remaining_s
        if number == 0 and is_usual:
            return self._usual_engine()
        return make_engine(self._access, max(deadline.remaining_s, _SHORTEST_TIMEOUT_S))

    def _usual_engine(self) -> Engine:
        generation = self._access.credentials.generation
        if generation != self._engine_generation:  # the old one would use the old credentials for some minutes more
            self._engine, self._engine_generation = make_engine(self._access, self._first_timeout_s), generation
        return self._engine

    @contextmanager
    def _translated(self, key: str) -> Iterator[None]:
        """As `translated`; where the credentials are refused for their age, the next try has those of now."""
        try:
            with translated(self.url, key):
                yield
        except StaleCredentialsError:
            self._access.credentials.renew()
            raise
        except StoreDenied as error:
            if not self._access.credentials.renew_after_refusal():
                raise
            raise TransientError(f"the credentials were replaced: {error}") from error

    def _retry(self, key: str, deadline: Deadline, operation: Callable[[Engine], Any]) -> Any:
        check_process()

        def once(number: int) -> Any:
            with self._translated(key):
                return operation(self._pick(number, deadline))

        return retry(f"{self.url}/{key}", deadline, once)

    def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        return bytes(self._read_checked(key, offset, length))

    def read_piece(self, key: str, offset: int, into: memoryview) -> memoryview:
        return memoryview(self._read_checked(key, offset, len(into), into))

    def _read_checked(
        self, key: str, offset: int, length: int | None, into: memoryview | None = None
    ) -> bytes | memoryview:
        check_process()
        where, deadline = f"{self.url}/{check_key(key)}", Deadline(self._deadline_s)
        if length == 0 or (length is None and offset) or min(offset, length or 0) < 0:
            length = check_range(where, self._num_bytes(key, deadline), offset, length)
        deadline.allow(length or 0)
        return self._read(key, offset, length, deadline, into)

    def _read(
        self, key: str, offset: int, length: int | None, deadline: Deadline, into: memoryview | None = None
    ) -> bytes | memoryview:
        if length == 0:
            return b""
        reading = RangeRead(f"{self.url}/{key}", key, offset, length, into)

        def once(number: int) -> None:
            with self._translated(key):
                reading.go_on(self._pick(number, deadline, length or 0))

        retry(reading, deadline, once)
        return reading.data()

    def info(self, key: str) -> ObjectInfo:
        return ObjectInfo(key, self._num_bytes(check_key(key), Deadline(self._deadline_s)))

    def _num_bytes(self, key: str, deadline: Deadline) -> int:
        return int(self._head(key, deadline)["size"])

    def version(self, key: str) -> str:
        found = self._head(check_key(key), Deadline(self._deadline_s))
        told = found["e_tag"], found["version"], found["size"], found["last_modified"].isoformat()
        return " ".join(map(str, told))

    def _head(self, key: str, deadline: Deadline) -> Any:
        return self._retry(key, deadline, lambda engine: obstore.head(engine, key))

    def create(self, key: str, data: BytesLike) -> None:
        check_process()
        check_key(key)
        view, tried = as_view(data), False
        deadline = Deadline(self._deadline_s)
        deadline.allow(len(view))
        put = self._choose_put(key, view, deadline)

        def once(number: int) -> None:
            nonlocal tried
            # After a try of unknown outcome the key may hold our own bytes: look before sending them again.
            if tried and self._is_ours(key, view, deadline):
                return
            try:
                put(number)
            except TakenError as error:
                self._judge_taken(key, view, tried, deadline, error)
            except TransientError:
                tried = True
                raise

        retry(f"{self.url}/{key}", deadline, once)

    def _choose_put(self, key: str, view: memoryview, deadline: Deadline) -> Callable[[int], object]:
        if len(view) > self._parts_above_bytes and self._honours_parts(key, deadline):
            uploader = self._uploader()
            return lambda number: uploader.put(key, view, deadline)
        if len(view) > MAX_PUT_BYTES:
            raise StoreDenied(
                f"{self.url}/{key}",
                value=f"{len(view)} bytes",
                expected=f"at most {MAX_PUT_BYTES} bytes on a server without conditional uploads in parts",
                remedy="write several smaller objects",
            )

        def put_whole(number: int) -> object:
            with self._translated(key):
                return obstore.put(
                    self._pick(number, deadline, len(view)), key, view, mode="create", use_multipart=False
                )

        return put_whole

    def _judge_taken(self, key: str, view: memoryview, tried: bool, deadline: Deadline, error: TakenError) -> None:
        """A conditional write was refused.

        Returns if the object there is our own, raises ObjectExists or TransientError.
        """
        try:
            if tried and self._is_ours(key, view, deadline):
                return
            self._num_bytes(key, deadline)
        except ObjectMissing:
            raise TransientError(f"another write to the key was in flight: {error}") from error  # 409: free after all
        raise ObjectExists(key) from error

    def _is_ours(self, key: str, view: memoryview, deadline: Deadline) -> bool:
        """Whether the object holds exactly these bytes; False where there is none."""
        try:
            if self._num_bytes(key, deadline) != len(view):
                return False
        except ObjectMissing:
            return False
        for start in range(0, len(view), _COMPARE_BYTES):
            stop = min(start + _COMPARE_BYTES, len(view))
            if self._read(key, start, stop - start, deadline) != view[start:stop]:
                return False
        return True

    def _uploader(self) -> PartsUploader:
        if self._parts is None:
            self._parts = PartsUploader(self._access, self._first_timeout_s, self._part_bytes)
        return self._parts

    def _honours_parts(self, key: str, deadline: Deadline) -> bool:
        """Whether uploads in parts are create-only: known of AWS, tried once beside `key` elsewhere."""
        if not self._parts_lock.acquire(timeout=deadline.remaining_s):
            raise DeadlineError(f"{self.url}/{key}: still waiting for a trial upload at the deadline")
        try:
            if self._has_parts is None:
                folder = key[: key.rfind("/") + 1]
                self._has_parts = self._access.is_aws or self._uploader().honours_condition(folder, deadline)
            return self._has_parts
        finally:
            self._parts_lock.release()

    def creates_large_objects_in_parts(self, folder: str = "") -> bool | None:
        return self._uploader().honours_condition(folder, Deadline(self._deadline_s))

    def uploads(self, prefix: str = "") -> tuple[Upload, ...]:
        return tuple(self._uploader().unfinished(prefix, Deadline(self._deadline_s)))

    def drop_upload(self, upload: Upload) -> None:
        self._uploader().drop(upload, Deadline(self._deadline_s))

    def writer(self, key: str) -> ObjectWriter:
        return S3Writer(self, check_key(key))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        check_process()
        folder = prefix.rpartition("/")[0]  # obstore's prefixes end at a segment
        deadline, found = Deadline(self._deadline_s), dict[str, int]()

        def once(number: int) -> None:
            offset = max(found, default=None)
            with self._translated(prefix):
                engine = self._pick(number, deadline)
                for page in obstore.list(engine, folder or None, offset=offset, chunk_size=_LIST_PAGE):
                    found.update((entry["path"], entry["size"]) for entry in page)
                    deadline.restart()

        retry(f"{self.url}/{prefix}", deadline, once)
        keys = sorted(key for key in found if key.startswith(prefix) and not key.endswith(TEMPORARY_SUFFIX))
        yield from (ObjectInfo(key, found[key]) for key in keys)

    def children(self, prefix: str = "") -> Iterator[str]:
        folder = prefix.rpartition("/")[0]
        deadline = Deadline(self._deadline_s)
        found = self._retry(prefix, deadline, lambda engine: obstore.list_with_delimiter(engine, folder or None))
        names = [f"{each.rstrip('/')}/" for each in found["common_prefixes"]]
        names += [entry["path"] for entry in found["objects"] if not entry["path"].endswith(TEMPORARY_SUFFIX)]
        yield from sorted(name for name in names if name.startswith(prefix))

    def delete(self, key: str) -> None:
        try:
            self._retry(check_key(key), Deadline(self._deadline_s), lambda engine: obstore.delete(engine, key))
        except ObjectMissing:
            return


class S3Writer(ObjectWriter):
    """Collects chunks in an unnamed local file, then creates the object from it: nothing is on the server before."""

    def __init__(self, store: S3Store, key: str) -> None:
        self._store, self._key = store, key
        with self._reported():
            self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by abort()

    def write(self, chunk: BytesLike) -> None:
        with self._reported():
            self._file.write(as_view(chunk))

    def commit(self) -> None:
        with self._reported():
            self._file.flush()
            # Left to the collector: a failed create's traceback still holds views of it.
            mapped = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ) if self._file.tell() else b""
        self._store.create(self._key, memoryview(mapped))
        self.abort()

    def abort(self) -> None:
        with suppress(OSError):  # what it could not write is not needed any more
            self._file.close()

    @contextmanager
    def _reported(self) -> Iterator[None]:
        """A full or missing local disk is told as that."""
        try:
            yield
        except OSError as error:
            where = f"{self._store.url}/{self._key}"
            raise StoreError(f"{where}: its local file below {_temporary_folder()}: {error}") from error


def _temporary_folder() -> str:
    """Where local files go; `TMPDIR` chooses."""
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        return "TMPDIR"
