"""A switch in user space with slow links, and a network namespace at each of its ports: ranks of one machine that reach
each other only through it (Linux with /dev/net/tun; the kernel's own netem need not be there).

As a program, `python ethernet.py PORTS FRAMES`: makes the ports and moves frames between them until its standard input
ends. FRAMES: JSON, a list of [port, port, delay_s, bytes_per_s]: frames between those two, both ways, wait so long, and
leave one after the other at that rate (0: at once).
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import json
import os
import select
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 2, 0x1000
_CLONE_NEWNET = 0x40000000
_DEADLINE_S = 20.0
MTU = 9000


@dataclass(frozen=True, slots=True)
class SlowLink:
    """Between two ports. bytes_per_s: 0 for no limit."""

    one: int
    other: int
    delay_s: float = 0.0
    bytes_per_s: float = 0.0


def why_not() -> str | None:
    """Why this machine can't have such a switch; None where it can."""
    for program in ("unshare", "nsenter", "ip"):
        if shutil.which(program) is None:
            return f"no {program}"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "/dev/net/tun is not there for us"
    inside = subprocess.run(["unshare", "--map-root-user", "--net", "true"], capture_output=True)
    return None if inside.returncode == 0 else "no network namespaces for us"


def port_name(port: int) -> str:
    return f"port{port}"


def port_address(port: int) -> str:
    return f"10.77.0.{port + 1}"


@dataclass(frozen=True, slots=True)
class Namespaces:
    """What a rank needs to enter the namespace of its port. pids: a process in the namespace of each port."""

    pids: tuple[int, ...]

    def to_environ(self) -> dict[str, str]:
        return {"TEST_NAMESPACES": json.dumps(asdict(self))}

    @staticmethod
    def from_environ() -> Namespaces:
        return Namespaces(tuple(json.loads(os.environ["TEST_NAMESPACES"])["pids"]))

    def enter(self, port: int) -> None:
        """Moves this process there: it has no other network then."""
        with Path(f"/proc/{self.pids[port]}/ns/net").open() as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                error = ctypes.get_errno()
                raise OSError(error, os.strerror(error))


@contextmanager
def switched(num_ports: int, slow: Sequence[SlowLink] = ()) -> Iterator[Namespaces]:
    """Namespaces at ports 0 to num_ports - 1; port num_ports is in this process's own. Needs a network namespace in
    which this process is root.
    """
    with ExitStack() as stack:
        pids = tuple(stack.enter_context(_namespace()) for _ in range(num_ports))
        command = [sys.executable, __file__, str(num_ports + 1), json.dumps([astuple(each) for each in slow])]
        switch = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        stack.callback(switch.kill)
        assert switch.stdout is not None and switch.stdout.readline() == b"ready\n"
        for port, pid in enumerate(pids):
            _run("ip", "link", "set", port_name(port), "netns", str(pid))
            _open_port(port, "nsenter", f"--net=/proc/{pid}/ns/net")
        _open_port(num_ports)
        yield Namespaces(pids)


@contextmanager
def _namespace() -> Iterator[int]:
    with subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE) as holder:
        end_s, ours = time.monotonic() + _DEADLINE_S, Path("/proc/self/ns/net").readlink()
        while Path(f"/proc/{holder.pid}/ns/net").readlink() == ours:
            assert time.monotonic() < end_s and holder.poll() is None, "no namespace"
            select.select([], [], [], 0.01)
        try:
            yield holder.pid
        finally:
            holder.kill()


def _open_port(port: int, *inside: str) -> None:
    name = port_name(port)
    _run(*inside, "ip", "address", "add", f"{port_address(port)}/24", "dev", name)
    _run(*inside, "ip", "link", "set", name, "mtu", str(MTU), "up")
    _run(*inside, "ip", "link", "set", "lo", "up")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


def _mac(port: int) -> bytes:
    return bytes([2, 0, 0, 0, 0, port])


def _make_port(port: int) -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH", port_name(port).encode(), _IFF_TAP | _IFF_NO_PI))
    _run("ip", "link", "set", port_name(port), "address", _mac(port).hex(":"))
    return fd


class _Switch:
    def __init__(self, num_ports: int, slow: Sequence[SlowLink]) -> None:
        self._fds = [_make_port(port) for port in range(num_ports)]
        self._ports = {_mac(port): port for port in range(num_ports)}
        self._slow = {pair: link for link in slow for pair in ((link.one, link.other), (link.other, link.one))}
        self._free_s = dict.fromkeys(self._slow, 0.0)
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self._number = 0

    def run(self) -> None:
        """Until standard input ends."""
        sources = [sys.stdin.fileno(), *self._fds]
        while True:
            timeout_s = max(0.0, self._waiting[0][0] - time.monotonic()) if self._waiting else None
            readable = select.select(sources, [], [], timeout_s)[0]
            if sources[0] in readable:
                return
            for port, fd in enumerate(self._fds):
                if fd in readable:
                    self._take(port, fd)
            now_s = time.monotonic()
            while self._waiting and self._waiting[0][0] <= now_s:
                _, _, port, frame = heapq.heappop(self._waiting)
                self._give(port, frame)

    def _take(self, port: int, fd: int) -> None:
        for _ in range(64):
            try:
                frame = os.read(fd, 65536)
            except (BlockingIOError, OSError):  # none, or the port is not up yet
                return
            to = self._ports.get(frame[:6])
            for other in range(len(self._fds)) if to is None else (to,):
                if other != port:
                    self._pass(port, other, frame)

    def _pass(self, port: int, other: int, frame: bytes) -> None:
        link = self._slow.get((port, other))
        if link is None:
            self._give(other, frame)
            return
        leaves_s = max(time.monotonic(), self._free_s[port, other])
        leaves_s += len(frame) / link.bytes_per_s if link.bytes_per_s else 0.0
        self._free_s[port, other] = leaves_s
        self._number += 1
        heapq.heappush(self._waiting, (leaves_s + link.delay_s, self._number, other, frame))

    def _give(self, port: int, frame: bytes) -> None:
        with suppress(OSError):  # full or not up: a switch drops
            os.write(self._fds[port], frame)


if __name__ == "__main__":
    switch = _Switch(int(sys.argv[1]), [SlowLink(*each) for each in json.loads(sys.argv[2])])
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    switch.run()
