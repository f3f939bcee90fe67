"""Uploads in parts whose last call creates the object only if the key is free.

That call is CompleteMultipartUpload with If-None-Match, which obstore lacks, so this goes through botocore. Not every
server honours the condition: some let a second upload overwrite the first. `honours_condition` finds out by trying it
on a temporary object.
"""

from __future__ import annotations

import logging
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from phalanx.objects.base import TEMPORARY_SUFFIX, StoreDenied, StoreError
from phalanx.objects.retry import Deadline, TransientError, retry
from phalanx.objects.s3_client import S3Access, make_botocore

if TYPE_CHECKING:
    from collections.abc import Iterator

PART_BYTES, MAX_PARTS = 16 * 2**20, 10_000
_NUM_THREADS = 4
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
        if status in (401, 403):
            raise StoreDenied(
                where, expected=f"permission to write ({error})", remedy="check the credentials and the bucket's policy"
            ) from error
        if status >= 500 or status in (0, 404, 408, 429):  # 404: the upload is gone, another try begins a new one
            raise TransientError(str(error)) from error
        raise StoreError(f"{where}: {error}") from error
    except BotoCoreError as error:
        raise TransientError(str(error)) from error


class PartsUploader:
    """Uploads in parts to one bucket."""

    def __init__(self, access: S3Access, timeout_s: float, part_bytes: int = PART_BYTES) -> None:
        self._bucket, self._where = access.bucket, f"s3://{access.bucket}"
        self._timeout_s, self._part_bytes = timeout_s, part_bytes
        self._client = make_botocore(access, timeout_s)

    def put(self, key: str, data: memoryview) -> None:
        """Creates the object in one try.

        TransientError: it may exist now. Raises TakenError, StoreDenied, StoreError.
        """
        with translated(self._where):
            upload_id = self._client.create_multipart_upload(Bucket=self._bucket, Key=key)["UploadId"]
        try:
            parts = self._upload(key, upload_id, data)
            with translated(self._where):
                self._client.complete_multipart_upload(
                    Bucket=self._bucket, Key=key, UploadId=upload_id, IfNoneMatch="*", MultipartUpload={"Parts": parts}
                )
        except BaseException:
            self._abort(key, upload_id)
            raise

    def _upload(self, key: str, upload_id: str, data: memoryview) -> list[dict[str, Any]]:
        part_bytes = max(self._part_bytes, -(-len(data) // MAX_PARTS))
        starts = range(0, len(data), part_bytes)

        def upload_part(index: int) -> dict[str, Any]:
            body = bytes(data[starts[index] : starts[index] + part_bytes])

            def once(_: int) -> dict[str, Any]:
                with translated(self._where):
                    reply = self._client.upload_part(
                        Bucket=self._bucket, Key=key, UploadId=upload_id, PartNumber=index + 1, Body=body
                    )
                return {"PartNumber": index + 1, "ETag": reply["ETag"]}

            return retry(f"{self._where}/{key} part {index + 1}", Deadline(2 * self._timeout_s), once)

        with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="phalanx-parts") as threads:
            futures = [threads.submit(upload_part, index) for index in range(len(starts))]
            try:
                return [future.result() for future in futures]
            except BaseException:
                threads.shutdown(cancel_futures=True)
                raise

    def _abort(self, key: str, upload_id: str) -> None:
        """Frees the parts; where that fails the bucket's lifecycle rule has to."""
        try:
            with translated(self._where):
                self._client.abort_multipart_upload(Bucket=self._bucket, Key=key, UploadId=upload_id)
        except (TakenError, TransientError, StoreDenied, StoreError) as error:
            _log.info("s3://%s/%s: the parts of a failed upload were not freed: %s", self._bucket, key, error)

    def honours_condition(self, folder: str) -> bool:
        """Whether the server keeps the first of two objects when the second comes in parts under If-None-Match."""
        key = f"{folder}{uuid.uuid4().hex}{TEMPORARY_SUFFIX}"

        def once(_: int) -> bool:
            with translated(self._where):
                self._client.put_object(Bucket=self._bucket, Key=key, Body=b"first")
            try:
                self.put(key, memoryview(b"second"))
            except TakenError:
                return True
            except StoreError as error:
                _log.info("%s: no conditional upload in parts: %s", self._where, error)
            return False

        try:
            return retry(f"{self._where}: trying an upload in parts", Deadline(2 * self._timeout_s), once)
        finally:
            try:
                with translated(self._where):
                    self._client.delete_object(Bucket=self._bucket, Key=key)
            except (TransientError, TakenError, StoreDenied, StoreError) as error:
                _log.info("%s/%s: a temporary object stays behind: %s", self._where, key, error)
