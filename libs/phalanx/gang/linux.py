"""What the gang asks of Linux directly: death with the parent, the number of threads, network interfaces, evidence of
the out-of-memory killer.
"""

from __future__ import annotations

import ctypes
import fcntl
import ipaddress
import os
import signal
import socket
import struct
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_SIOCGIFADDR = 0x8915


def die_with_parent(parent_pid: int, signum: int = signal.SIGKILL) -> None:
    """Ask for `signum` when the thread that started this process ends; ends now if `parent_pid` is gone already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    if os.getppid() != parent_pid:
        os._exit(128 + signal.SIGKILL)


def thread_names() -> list[str]:
    """The kernel's names of this process's threads, C threads included."""
    tasks = Path("/proc/self/task")
    return [(task / "comm").read_text().strip() for task in tasks.iterdir()]


def interface_addresses() -> list[tuple[str, str]]:
    """Names of the network interfaces that are up, each with an address that it carries, IPv4 first."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("16s16x8x", name.encode()[:15])
            with suppress(OSError):  # it has no IPv4 address
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                found.append((name, socket.inet_ntoa(answer[20:24])))
    with suppress(OSError):  # a kernel without IPv6
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            found.append((name, str(ipaddress.IPv6Address(int(digits, 16)))))
    return found


def oom_kills() -> int | None:
    """How often the out-of-memory killer struck in this process's memory cgroup (v2 or v1); None where the kernel does
    not say.
    """
    for counter in _oom_counters():
        try:
            lines = counter.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


def _oom_counters() -> list[Path]:
    root, paths = Path("/sys/fs/cgroup"), []
    try:
        groups = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for group in groups:
        _, controllers, path = group.split(":", 2)
        inside = path.lstrip("/")
        if controllers == "":
            paths += [root / inside / "memory.events", root / "memory.events"]
        elif "memory" in controllers.split(","):
            paths += [root / "memory" / inside / "memory.oom_control", root / "memory" / "memory.oom_control"]
    return paths
