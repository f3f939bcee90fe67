"""A store that misbehaves on purpose: wraps a real one and injects faults into chosen calls, for tests of what is
built on stores.

store = FaultyStore(real, [fail_after(on("create", "manifest.json"), StoreError("reply lost"))])
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

from phalanx.core.digest import BytesLike
from phalanx.objects.base import ObjectInfo, ObjectStore, ObjectWriter, Upload


@dataclass(frozen=True, slots=True)
class Call:
    """One operation.

    Number: counts all operations of the store from 0. operation: read, info, version, create, commit, list, children,
    delete, uploads or drop_upload; where streams are numbered too also open, write and abort.
    """

    number: int
    operation: str
    key: str


Result = TypeVar("Result")
When = Callable[[Call], bool]
Hook = Callable[[Call], None]


def _nothing(call: Call) -> None:
    """The hook that does nothing."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to the calls that `when` picks.

    Hooks around the real operation (raising fails the call), and the reply of a read.
    """

    when: When
    before: Hook = _nothing
    after: Hook = _nothing
    reply: Callable[[bytes], bytes] = bytes


def on(operation: str, key_part: str = "", nth: int | None = None) -> When:
    """Picks calls of `operation` whose key contains `key_part`; with `nth` only the nth of them, from 0."""
    seen, lock = [0], threading.Lock()

    def picks(call: Call) -> bool:
        if call.operation != operation or key_part not in call.key:
            return False
        with lock:
            seen[0] += 1
            return nth is None or seen[0] - 1 == nth

    return picks


def number_is(number: int) -> When:
    """Picks the store's operation with this number, whatever it is."""
    return lambda call: call.number == number


def _raises(error: BaseException) -> Hook:
    def hook(call: Call) -> None:
        raise error

    return hook


def fail_before(when: When, error: BaseException) -> Fault:
    """The call fails and the store never sees it."""
    return Fault(when, before=_raises(error))


def fail_after(when: When, error: BaseException) -> Fault:
    """The store does it, the reply is lost."""
    return Fault(when, after=_raises(error))


def delay(when: When, wait: Callable[[], object]) -> Fault:
    """The call begins only when `wait()` returns: an event's wait, a barrier, a sleep."""

    def hook(call: Call) -> None:
        wait()

    return Fault(when, before=hook)


def short_read(when: When, num_bytes: int) -> Fault:
    """A read returns only its first `num_bytes` bytes.

    A store that breaks its contract, as a reader's digest check must find.
    """
    return Fault(when, reply=lambda data: data[:num_bytes])


def corrupt_read(when: When, byte: int, flip: int = 1) -> Fault:
    """A read returns with bits `flip` of one byte inverted."""

    def spoiled(data: bytes) -> bytes:
        return data[:byte] + bytes([data[byte] ^ flip]) + data[byte + 1 :]

    return Fault(when, reply=spoiled)


def _kill(call: Call) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_before(when: When) -> Fault:
    """SIGKILL to this process just before the store sees the call."""
    return Fault(when, before=_kill)


def kill_after(when: When) -> Fault:
    """SIGKILL to this process just after the store did it."""
    return Fault(when, after=_kill)


class FaultyStore(ObjectStore):
    """`store` with `faults`; `calls` is what was asked of it. `within` keeps faults, numbers and full keys. streams: a
    streamed object's opening, chunks and end are operations too, not its commit alone.
    """

    def __init__(self, store: ObjectStore, faults: Sequence[Fault] = (), *, streams: bool = False) -> None:
        self.url, self._streams = store.url, streams
        self._store, self._faults = store, tuple(faults)
        self._lock = threading.Lock()
        self.calls: list[Call] = []

    def run(self, operation: str, key: str, act: Callable[[], Result]) -> Result:
        """`act()` as the operation `operation` on `key`, with the faults that pick it."""
        with self._lock:
            call = Call(len(self.calls), operation, key)
            self.calls.append(call)
        faults = [fault for fault in self._faults if fault.when(call)]
        for fault in faults:
            fault.before(call)
        result = act()
        for fault in faults:
            fault.after(call)
            if isinstance(result, bytes):
                result = cast(Result, fault.reply(result))
        return result

    def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        return self.run("read", key, lambda: self._store.read(key, offset, length))

    def info(self, key: str) -> ObjectInfo:
        return self.run("info", key, lambda: self._store.info(key))

    def version(self, key: str) -> str:
        return self.run("version", key, lambda: self._store.version(key))

    def create(self, key: str, data: BytesLike) -> None:
        self.run("create", key, lambda: self._store.create(key, data))

    def writer(self, key: str) -> ObjectWriter:
        opened = self.in_stream("open", key, lambda: self._store.writer(key))
        return _FaultyWriter(self, opened, key)

    def in_stream(self, operation: str, key: str, act: Callable[[], Result]) -> Result:
        """`act()` as a step of a streamed object, numbered where streams are."""
        return self.run(operation, key, act) if self._streams else act()

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        yield from self.run("list", prefix, lambda: [*self._store.list(prefix)])

    def children(self, prefix: str = "") -> Iterator[str]:
        yield from self.run("children", prefix, lambda: [*self._store.children(prefix)])

    def delete(self, key: str) -> None:
        self.run("delete", key, lambda: self._store.delete(key))

    def creates_large_objects_in_parts(self, folder: str = "") -> bool | None:
        return self._store.creates_large_objects_in_parts(folder)

    def uploads(self, prefix: str = "") -> tuple[Upload, ...]:
        return self.run("uploads", prefix, lambda: self._store.uploads(prefix))

    def drop_upload(self, upload: Upload) -> None:
        self.run("drop_upload", upload.key, lambda: self._store.drop_upload(upload))


class _FaultyWriter(ObjectWriter):
    def __init__(self, store: FaultyStore, writer: ObjectWriter, key: str) -> None:
        self._store, self._writer, self._key = store, writer, key

    def write(self, chunk: BytesLike) -> None:
        self._store.in_stream("write", self._key, lambda: self._writer.write(chunk))

    def commit(self) -> None:
        self._store.run("commit", self._key, lambda: self._writer.commit())

    def abort(self) -> None:
        self._store.in_stream("abort", self._key, self._writer.abort)
