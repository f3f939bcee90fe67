"""Uploads in parts whose last call creates the object only if the key is free.

That call is CompleteMultipartUpload with If-None-Match, which obstore lacks, so this goes through botocore. Not every
server honours the condition: some let a second upload overwrite the first. `honours_condition` finds out by trying it
on a temporary object.
"""

from __future__ import annotations

import logging
import uuid
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from phalanx.objects.base import TEMPORARY_SUFFIX, StoreDenied, StoreError, Upload
from phalanx.objects.retry import (
    Deadline,
    DeadlineError,
    StaleCredentialsError,
    TransientError,
    by_deadline,
    in_background,
    result_by,
    retry,
)
from phalanx.objects.s3_client import S3Access, make_botocore
from phalanx.objects.s3_credentials import EXPIRED_CODES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PART_BYTES, MAX_PARTS = 16 * 2**20, 10_000
_NUM_THREADS = 8  # requests at once, of all objects: more of them only take turns, and hold a part each
_log = logging.getLogger(__name__)


class TakenError(Exception):
    """The server refused a conditional write: the key is taken, or another write to it is in flight."""


@contextmanager
def translated(where: str) -> Iterator[None]:
    """Turns botocore's errors into ours."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except ClientError as error:
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        if status in (409, 412):
            raise TakenError(str(error)) from error
        if error.response.get("Error", {}).get("Code") in EXPIRED_CODES:
            raise StaleCredentialsError(f"the credentials have expired: {error}") from error
        if status in (401, 403):
            raise StoreDenied(
                where, expected=f"permission to write ({error})", remedy="check the credentials and the bucket's policy"
            ) from error
        if status >= 500 or status in (0, 404, 408, 429):  # 404: the upload is gone, another try begins a new one
            raise TransientError(str(error)) from error
        raise StoreError(f"{where}: {error}") from error
    except BotoCoreError as error:
        raise TransientError(str(error)) from error


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="phalanx-parts")


class PartsUploader:
    """Uploads in parts to one bucket. timeout_s: the longest silence of one request; the caller's deadline bounds all.

    The client's time-outs bound a silence, not a request that trickles: each is waited for until the deadline, no
    longer.
    """

    def __init__(self, access: S3Access, timeout_s: float, part_bytes: int = PART_BYTES) -> None:
        self._bucket, self._where = access.bucket, f"s3://{access.bucket}"
        self._part_bytes = part_bytes
        self._access, self._timeout_s = access, timeout_s
        self._client = make_botocore(access, timeout_s)
        self._generation = access.credentials.generation
        self._threads = _threads()

    def _request(self, operation: str, key: str, **arguments: Any) -> Any:
        with self._translated():
            return getattr(self._client, operation)(Bucket=self._bucket, Key=key, **arguments)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """As `translated`; credentials that have expired are looked for again, and the next try has those of now."""
        credentials = self._access.credentials
        if credentials.generation != self._generation:
            self._client, self._generation = make_botocore(self._access, self._timeout_s), credentials.generation
        try:
            with translated(self._where):
                yield
        except StaleCredentialsError:
            credentials.renew()
            raise

    def put(self, key: str, data: memoryview, deadline: Deadline) -> None:
        """Creates the object in one try.

        TransientError: it may exist now. Raises TakenError, StoreDenied, StoreError.
        """
        upload = by_deadline(deadline, lambda: self._request("create_multipart_upload", key))
        named: dict[str, Any] = {"key": key, "UploadId": upload["UploadId"]}
        try:
            parts = {"Parts": self._upload(named, data, deadline)}
            by_deadline(
                deadline,
                lambda: self._request("complete_multipart_upload", **named, IfNoneMatch="*", MultipartUpload=parts),
            )
        except BaseException:
            with suppress(TransientError):  # then it goes on in the background
                by_deadline(deadline, lambda: self._free("abort_multipart_upload", **named))
            raise

    def _upload(self, named: dict[str, Any], data: memoryview, deadline: Deadline) -> list[dict[str, Any]]:
        part_bytes = max(self._part_bytes, -(-len(data) // MAX_PARTS))
        starts = range(0, len(data), part_bytes)

        def upload_part(index: int) -> dict[str, Any]:
            body = bytes(data[starts[index] : starts[index] + part_bytes])

            def once(_: int) -> dict[str, Any]:
                reply = self._request("upload_part", **named, PartNumber=index + 1, Body=body)
                return {"PartNumber": index + 1, "ETag": reply["ETag"]}

            return retry(f"{self._where}/{named['key']} part {index + 1}", deadline, once)

        threads = self._threads
        futures = [threads.submit(upload_part, index) for index in range(len(starts))]
        try:
            return [result_by(deadline, future) for future in futures]
        finally:
            # Parts that arrive after the upload was aborted would stay behind.
            left = wait([future for future in futures if not future.cancel()], deadline.remaining_s).not_done
            if left and self._threads is threads:
                self._threads = _threads()  # requests that trickle past their deadline must not hold up the next upload

    def unfinished(self, prefix: str, deadline: Deadline) -> list[Upload]:
        """The uploads to keys with this prefix that were begun and neither completed nor aborted."""
        found: list[Upload] = []
        marks: dict[str, str] = {}
        while True:
            page = self._retried(f"{prefix}: listing uploads", deadline, partial(self._listed, prefix, marks))
            found += [Upload(each["Key"], each["UploadId"]) for each in page.get("Uploads", ())]
            if not page.get("IsTruncated"):
                return found
            marks = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}
            deadline.restart()

    def drop(self, upload: Upload, deadline: Deadline) -> None:
        """Aborts an upload; one that is not there any more is no error."""
        from botocore.exceptions import ClientError

        def once() -> None:
            try:
                self._client.abort_multipart_upload(Bucket=self._bucket, Key=upload.key, UploadId=upload.upload_id)
            except ClientError as error:
                if error.response.get("Error", {}).get("Code") != "NoSuchUpload":
                    with self._translated():
                        raise

        self._retried(f"{upload.key}: dropping an upload", deadline, once)

    def _listed(self, prefix: str, marks: dict[str, str]) -> Any:
        with self._translated():
            return self._client.list_multipart_uploads(Bucket=self._bucket, Prefix=prefix, **marks)

    def _retried(self, what: str, deadline: Deadline, act: Callable[[], Any]) -> Any:
        return retry(f"{self._where}/{what}", deadline, lambda _: by_deadline(deadline, act))

    def _free(self, operation: str, key: str, **arguments: Any) -> None:
        """Has the server drop what is no longer needed; where that fails the bucket's lifecycle rule has to."""
        try:
            self._request(operation, key, **arguments)
        except (TakenError, TransientError, StoreDenied, StoreError) as error:
            _log.info("%s/%s: something stays behind, %s failed: %s", self._where, key, operation, error)

    def honours_condition(self, folder: str, deadline: Deadline) -> bool:
        """Whether the server keeps the first of two objects when the second comes in parts under If-None-Match."""
        key = f"{folder}{uuid.uuid4().hex}{TEMPORARY_SUFFIX}"

        def once(_: int) -> bool:
            by_deadline(deadline, lambda: self._request("put_object", key, Body=b"first"))
            try:
                self.put(key, memoryview(b"second"), deadline)
            except TakenError:
                return True
            except DeadlineError:
                raise
            except StoreError as error:
                _log.info("%s: no conditional upload in parts: %s", self._where, error)
            return False

        try:
            return retry(f"{self._where}: trying an upload in parts", deadline, once)
        finally:
            in_background(lambda: self._free("delete_object", key))
