"""A misbehaving HTTP server before a real one: forwards each request and spoils the reply as a test says."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

STALL_S = 30.0


@dataclass
class Spoiler:
    """What to do with one request.

    refuse: answer this status without forwarding, with `code` as S3 writes its errors, if there is one.
    lose_reply: forward, then hang up. cut_body: send that many bytes of the reply, then hang up.
    shorten: honestly answer a range of that many bytes. other_start: answer a range that begins that many bytes later.
    stall: never answer. hold_reply: forward, then never answer. drop_header: forward without this header.
    """

    refuse: int = 0
    code: str = ""
    lose_reply: bool = False
    cut_body: int = -1
    shorten: int = -1
    other_start: int = 0
    stall: bool = False
    hold_reply: bool = False
    drop_header: str = ""


Choose = Callable[[str, str, int], Spoiler | None]
ChooseByHeaders = Callable[[str, str, int, Mapping[str, str]], Spoiler | None]


def spoil_nothing(method: str, path: str, number: int) -> Spoiler | None:
    """The choice of a proxy that behaves."""


@dataclass
class Proxy:
    """Endpoint of the proxy, the requests it saw as (method, path, range header), and the test's choice of spoilers,
    by the request's headers too where it needs them.

    mark: only requests whose path contains it are seen and spoiled, so that stragglers of another test change nothing.
    """

    endpoint: str = ""
    mark: str = ""
    choose: Choose = spoil_nothing
    choose_by_headers: ChooseByHeaders | None = None
    seen: list[tuple[str, str, str]] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def restart(self, mark: str) -> None:
        """Lets go of stalled requests and begins anew, for a test whose keys contain `mark`."""
        with self.lock:
            self.released.set()
            self.released = threading.Event()
            self.mark, self.choose, self.seen = mark, spoil_nothing, []
            self.choose_by_headers = None

    def spoiler(self, method: str, path: str, headers: Mapping[str, str]) -> tuple[Spoiler, threading.Event]:
        """What to do with a request, and when a stalled one ends."""
        with self.lock:
            if self.mark not in path:
                return Spoiler(), self.released
            number = sum(method == seen for seen, _, _ in self.seen)
            self.seen.append((method, path, headers.get("range", "")))
            if self.choose_by_headers is not None:
                return self.choose_by_headers(method, path, number, headers) or Spoiler(), self.released
            return self.choose(method, path, number) or Spoiler(), self.released


@contextmanager
def proxying(upstream: str) -> Iterator[Proxy]:
    """Runs a proxy before the server at `upstream`.

    `choose(method, path, number of earlier requests with this method)`.
    """
    proxy = Proxy()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(proxy, urlsplit(upstream).netloc))
    server.daemon_threads = True
    proxy.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.released.set()
        server.shutdown()
        server.server_close()
        thread.join()


def _handler(proxy: Proxy, upstream: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            """Nothing: tests look at `seen`."""

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            spoiler, released = proxy.spoiler(self.command, self.path, self.headers)
            if spoiler.stall:
                released.wait(STALL_S)
                self.close_connection = True
                return
            if spoiler.refuse:
                told = f"<?xml version='1.0'?><Error><Code>{spoiler.code}</Code></Error>" if spoiler.code else ""
                self._answer(spoiler.refuse, [("content-length", str(len(told)))], told.encode())
                return
            if "range" in self.headers:
                start, stop = self.headers["range"].removeprefix("bytes=").split("-")
                stop = str(int(start) + spoiler.shorten - 1) if spoiler.shorten >= 0 else stop
                self.headers.replace_header("range", f"bytes={int(start) + spoiler.other_start}-{stop}")
            del self.headers[spoiler.drop_header]
            status, headers, reply = self._forward(body)
            if spoiler.hold_reply:
                released.wait(STALL_S)
            if spoiler.lose_reply or spoiler.hold_reply:
                self.close_connection = True
                return
            self._answer(status, headers, reply if spoiler.cut_body < 0 else reply[: spoiler.cut_body])
            self.close_connection = spoiler.cut_body >= 0

        def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
            connection = http.client.HTTPConnection(upstream, timeout=30)
            headers = {k: v for k, v in self.headers.items() if k.lower() not in ("connection", "host")} | {
                "host": upstream
            }
            connection.request(self.command, self.path, body or None, headers)
            reply = connection.getresponse()
            data = reply.read()
            kept = [
                (k, v)
                for k, v in reply.getheaders()
                if k.lower() not in ("connection", "transfer-encoding", "content-length")
            ]
            length = reply.getheader("content-length") if self.command == "HEAD" else str(len(data))
            connection.close()
            return reply.status, [*kept, ("content-length", length or "0")], data

        def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
            self.send_response_only(status)
            for name, value in headers:
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)
            self.wfile.flush()

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _serve  # noqa: N815

    return Handler
