"""HTTP for a browser over the monitor's own methods: files of the page, answers as JSON, what is new as an event
stream.

Read only. On a loopback address it asks for nothing, as whoever is on the machine may look; elsewhere it wants the
password of a file (HTTP Basic, any user). A request under another host name than the page's own is refused, so that no
foreign page reads this one through a name that it made point here.
"""

from __future__ import annotations

import base64
import hmac
import ipaddress
import json
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import Protocol
from urllib.parse import parse_qs, urlsplit

from google.protobuf.message import Message

from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.monitor.web.plain_json import plain
from phalanx.rpc import NotFound
from phalanx.rpc.config import split_address

LOG = logging.getLogger(__name__)
MAX_STREAMS = 64
REQUEST_DEADLINE_S = 30.0
_END_S = 0.1  # how long its end may wait
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Source(Protocol):
    """What the page asks; the monitor's methods, each answer a message of its contract."""

    def list_runs(self) -> Message:
        """ListRunsResponse."""
        ...

    def get_run(self, job: str, max_points: int) -> Message:
        """GetRunResponse. Raises PhalanxError for a job that is not known."""
        ...

    def watch_run(self, job: str, after_version: int) -> Iterator[Message]:
        """WatchRunResponse by WatchRunResponse, until closed."""
        ...

    def list_gpus(self) -> Message:
        """ListGpusResponse."""
        ...


@dataclass(frozen=True, slots=True)
class _Settings:
    """What every request is held against. password: None asks for none."""

    source: Source
    hosts: frozenset[str]
    password: str | None = field(repr=False)
    streams: threading.BoundedSemaphore


class Page:
    """The page at an address, served until closed."""

    def __init__(self, source: Source, address: str, password_file: Path | None = None) -> None:
        """Raises PhalanxError when the port is in use, or the address is not loopback and no password is given."""
        host, port = split_address(address, "options.page")
        password = _password(host, password_file)
        settings = _Settings(source, _own_names(host), password, threading.BoundedSemaphore(MAX_STREAMS))
        handler = type("Handler", (_Handler,), {"settings": settings})
        try:
            self._server = _Server((host, port), handler)
        except OSError as error:
            raise PhalanxError(
                "options.page",
                value=address,
                expected=f"an address that is free and this machine's ({error.strerror})",
                remedy="end what listens there, or choose another port",
            ) from error
        self.address = f"{host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(_END_S,), name="page", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends it; open streams end at their next message."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def handle_error(self, request: object, client_address: object) -> None:
        if isinstance(sys.exception(), (ConnectionError, TimeoutError)):
            LOG.debug("a browser left", exc_info=True)
        else:
            LOG.exception("a request of the page failed")


class _Handler(BaseHTTPRequestHandler):
    """One request. `settings` is set on the class that a `Page` makes of this one."""

    settings: _Settings
    protocol_version = "HTTP/1.1"
    timeout = REQUEST_DEADLINE_S

    def do_GET(self) -> None:
        if not self._is_admitted():
            return
        url = urlsplit(self.path)
        query = {key: values[-1] for key, values in parse_qs(url.query).items()}
        try:
            self._route(url.path, query)
        except NotFound as error:
            self._send(HTTPStatus.NOT_FOUND, "application/json", _json({"error": str(error)}))
        except PhalanxError as error:
            self._send(HTTPStatus.BAD_REQUEST, "application/json", _json({"error": str(error)}))
        except OutsideError as error:
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, "application/json", _json({"error": str(error)}))

    def _route(self, path: str, query: Mapping[str, str]) -> None:
        source = self.settings.source
        answers: dict[str, Callable[[], Message]] = {
            "/api/runs": source.list_runs,
            "/api/gpus": source.list_gpus,
            "/api/run": lambda: source.get_run(_required(query, "job"), _number(query, "max_points", 0)),
        }
        if path in answers:
            self._send(HTTPStatus.OK, "application/json", _json(plain(answers[path]())))
        elif path == "/api/watch":
            self._stream(_required(query, "job"), self._after(query))
        else:
            self._file("page.html" if path == "/" else path.removeprefix("/assets/"))

    def _after(self, query: Mapping[str, str]) -> int:
        """A browser that comes back says where it was in a header of its own."""
        last = self.headers.get("Last-Event-ID", "")
        return int(last) if last.isascii() and last.isdigit() else _number(query, "after", 0)

    def _file(self, name: str) -> None:
        known = {each.name: each for each in resources.files(__package__).joinpath("assets").iterdir()}
        if name not in known:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", b"there is nothing of that name\n")
            return
        self._send(HTTPStatus.OK, _TYPES[Path(name).suffix], known[name].read_bytes())

    def _stream(self, job: str, after_version: int) -> None:
        if not self.settings.streams.acquire(blocking=False):
            self._send(HTTPStatus.TOO_MANY_REQUESTS, "text/plain", f"{MAX_STREAMS} pages are open already\n".encode())
            return
        try:
            changes = self.settings.source.watch_run(job, after_version)
            first = next(changes, None)  # a job that is not known is refused before the stream begins
            self._start(HTTPStatus.OK, "text/event-stream", {"Connection": "close"})
            for change in chain(() if first is None else (first,), changes):
                data = plain(change)
                self.wfile.write(b"id: %d\ndata: %s\n\n" % (data["version"], _json(data)))
                self.wfile.flush()
        finally:
            self.close_connection = True
            self.settings.streams.release()

    def _is_admitted(self) -> bool:
        name = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        if self.settings.hosts and name not in self.settings.hosts:
            self._send(HTTPStatus.FORBIDDEN, "text/plain", b"open the page under its own address\n")
            return False
        if self.settings.password is not None and not self._knows_password(self.settings.password):
            self._send(
                HTTPStatus.UNAUTHORIZED,
                "text/plain",
                b"the page's password is needed\n",
                {"WWW-Authenticate": 'Basic realm="phalanx"'},
            )
            return False
        return True

    def _knows_password(self, password: str) -> bool:
        kind, _, given = self.headers.get("Authorization", "").partition(" ")
        try:
            _, _, said = base64.b64decode(given, validate=True).decode().partition(":")
        except ValueError:
            return False
        return kind == "Basic" and hmac.compare_digest(said.encode(), password.encode())

    def _send(self, status: HTTPStatus, kind: str, body: bytes, more: Mapping[str, str] | None = None) -> None:
        self._start(status, kind, {"Content-Length": str(len(body)), **(more or {})})
        self.wfile.write(body)

    def _start(self, status: HTTPStatus, kind: str, more: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": f"{kind}; charset=utf-8", **_HEADERS, **more}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        LOG.debug(format, *arguments)


def _json(value: object) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def _required(query: Mapping[str, str], key: str) -> str:
    if key not in query:
        raise PhalanxError(f"query {key}", expected="a value", remedy=f"add ?{key}=...")
    return query[key]


def _number(query: Mapping[str, str], key: str, default: int) -> int:
    text = query.get(key, str(default))
    if not (text.isascii() and text.isdigit()):
        raise PhalanxError(f"query {key}", value=text, expected="a whole number", remedy="correct it")
    return int(text)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _own_names(host: str) -> frozenset[str]:
    """Names under which a loopback page may be asked; a page for others has names that only its user knows, and a
    password.
    """
    return frozenset({"localhost", "127.0.0.1", "[::1]", host}) if _is_loopback(host) else frozenset()


def _password(host: str, file: Path | None) -> str | None:
    if file is None:
        if _is_loopback(host):
            return None
        raise PhalanxError(
            "options.page",
            value=host,
            expected="a loopback address, or a password beside it",
            remedy="name a file (mode 0600) with the page's password in options.page_password",
        )
    try:
        password = file.read_text().strip()
    except OSError as error:
        raise PhalanxError(
            str(file), expected=f"the page's password ({error.strerror})", remedy="check options.page_password"
        ) from error
    if not password:
        raise PhalanxError(str(file), expected="the page's password, not an empty file", remedy="write one")
    return password
