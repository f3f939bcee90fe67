"""A network between two processes that a test can cut: nothing gets through, and nobody is told."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_CHUNK = 65536


class Network:
    """TCP proxies that are cut and mended together. What was sent while it was cut arrives afterwards, as TCP would
    have it.
    """

    def __init__(self) -> None:
        self._is_open = threading.Event()
        self._is_open.set()
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        self._is_closed = False

    def before(self, upstream: str) -> str:
        """The address of a proxy before `upstream`."""
        listener = socket.create_server(("127.0.0.1", 0))
        self._keep(listener)
        threading.Thread(target=self._accept, args=(listener, upstream), daemon=True).start()
        return f"127.0.0.1:{listener.getsockname()[1]}"

    def cut(self) -> None:
        """From now on every byte waits, and so does every new connection."""
        self._is_open.clear()

    def mend(self) -> None:
        """Everything goes on."""
        self._is_open.set()

    def close(self) -> None:
        """Ends all connections."""
        self._is_closed = True
        self._is_open.set()
        with self._lock:
            for each in self._sockets:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
                each.close()

    def _keep(self, each: socket.socket) -> None:
        with self._lock:
            self._sockets.append(each)

    def _accept(self, listener: socket.socket, upstream: str) -> None:
        host, _, port = upstream.rpartition(":")
        while not self._is_closed:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            self._keep(near)
            threading.Thread(target=self._connect, args=(near, (host, int(port))), daemon=True).start()

    def _connect(self, near: socket.socket, upstream: tuple[str, int]) -> None:
        self._is_open.wait()
        try:
            far = socket.create_connection(upstream, timeout=10)
        except OSError:
            near.close()
            return
        far.settimeout(None)
        self._keep(far)
        for source, target in ((near, far), (far, near)):
            threading.Thread(target=self._pump, args=(source, target), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(_CHUNK):
                self._is_open.wait()
                target.sendall(data)
        with suppress(OSError):
            self._is_open.wait()
            target.shutdown(socket.SHUT_WR)


@contextmanager
def network() -> Iterator[Network]:
    """A network that is whole, until a test cuts it."""
    made = Network()
    try:
        yield made
    finally:
        made.close()
