"""What a client shows: its certificate, and a token that is read again when its file changes."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import grpc

from phalanx.core.errors import PhalanxError
from phalanx.rpc.config import Credentials
from phalanx.rpc.files import read_bytes
from phalanx.rpc.pki import check_pair, read_certificate

_REMEDY = "run `phalanx up`, which makes it, or correct the client's context"


class TokenFile:
    """The token in a file; whoever replaces the file changes the token of the next call. No repr shows it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._seen: tuple[int, int, int] | None = None
        self._token = ""

    def read(self) -> str:
        """The token; raises PhalanxError when the file cannot be read or is empty."""
        try:
            state = os.stat(self._path)  # noqa: PTH116 - one call for each request
        except OSError as error:
            raise PhalanxError(str(self._path), expected=f"a token ({error.strerror})", remedy=_REMEDY) from error
        seen = (state.st_mtime_ns, state.st_ino, state.st_size)
        with self._lock:
            if seen != self._seen:
                self._token = _token(self._path)
                self._seen = seen
            return self._token


def _token(path: Path) -> str:
    token = read_bytes(path, "a token", _REMEDY).strip()
    if not token or not token.isascii() or any(byte <= 32 for byte in token):
        raise PhalanxError(str(path), expected="one token", remedy=_REMEDY)
    return token.decode()


def channel_credentials(credentials: Credentials) -> grpc.ChannelCredentials:
    """For a channel over mTLS; raises PhalanxError when a file cannot be read or does not hold what it should."""
    for path in (credentials.ca, credentials.cert):
        read_certificate(path)  # gRPC would fill stderr with words of its own
    check_pair(credentials.cert, credentials.key, "the key of this client", _REMEDY)
    return grpc.ssl_channel_credentials(
        read_bytes(credentials.ca, "the certificate of the cluster's authority", _REMEDY),
        read_bytes(credentials.key, "the key of this client", _REMEDY),
        read_bytes(credentials.cert, "the certificate of this client", _REMEDY),
    )
