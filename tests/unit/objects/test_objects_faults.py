"""The fault injector does what it says, to the call it was told, and nothing else."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from phalanx.objects import ObjectMissing, StoreError, open_store
from phalanx.objects.faults import (
    Call,
    Fault,
    FaultyStore,
    corrupt_read,
    delay,
    fail_after,
    fail_before,
    kill_after,
    kill_before,
    number_is,
    on,
    short_read,
)
from phalanx.objects.memory import MemoryStore

ERROR = StoreError("injected")


def test_calls_are_numbered_with_full_keys_also_within() -> None:
    store = FaultyStore(MemoryStore())
    store.within("a").create("k", b"1")
    store.read("a/k")
    assert list(store.within("a").list())
    assert list(store.within("a").children())
    store.info("a/k")
    with store.writer("w") as writer:
        writer.commit()
    store.delete("a/k")
    operations = ["create a/k", "read a/k", "list a/", "children a/", "info a/k", "commit w", "delete a/k"]
    assert [f"{call.operation} {call.key}" for call in store.calls] == operations
    assert [call.number for call in store.calls] == list(range(7))


def test_fail_before_leaves_the_store_untouched() -> None:
    inner = MemoryStore()
    store = FaultyStore(inner, [fail_before(on("create", "k", nth=1), ERROR)])
    store.create("k1", b"")
    with pytest.raises(StoreError, match="injected"):
        store.create("k2", b"")
    with pytest.raises(ObjectMissing):
        inner.read("k2")
    store.create("k2", b"")


def test_fail_after_loses_only_the_reply() -> None:
    inner = MemoryStore()
    store = FaultyStore(inner, [fail_after(on("commit"), ERROR)])
    with pytest.raises(StoreError, match="injected"), store.writer("k") as writer:
        writer.write(b"whole")
        writer.commit()
    assert inner.read("k") == b"whole"


def test_number_picks_whatever_operation_it_is() -> None:
    store = FaultyStore(MemoryStore(), [fail_before(number_is(1), ERROR)])
    store.create("k", b"")
    with pytest.raises(StoreError):
        list(store.list())
    assert [info.key for info in store.list()] == ["k"]


def test_short_and_corrupt_reads_change_the_reply_only() -> None:
    inner = MemoryStore()
    inner.create("k", b"abcd")
    assert FaultyStore(inner, [short_read(on("read"), 2)]).read("k") == b"ab"
    assert FaultyStore(inner, [corrupt_read(on("read"), 1)]).read("k") == b"accd"
    assert inner.read("k") == b"abcd"


def test_delay_holds_the_call_until_released() -> None:
    arrived, released = threading.Event(), threading.Event()
    inner = MemoryStore()
    store = FaultyStore(
        inner, [Fault(on("create"), before=lambda call: arrived.set()), delay(on("create"), released.wait)]
    )
    thread = threading.Thread(target=store.create, args=("k", b""))
    thread.start()
    assert arrived.wait(10)
    assert list(inner.list()) == []
    released.set()
    thread.join(10)
    assert [info.key for info in inner.list()] == ["k"]


@pytest.mark.parametrize("make, is_there", [(kill_before, False), (kill_after, True)])
def test_kill_ends_the_process_at_that_call(tmp_path: Path, make: object, is_there: bool) -> None:
    inner = open_store(f"file://{tmp_path}")
    assert callable(make)
    store = FaultyStore(inner, [make(lambda call: call == Call(0, "create", "k"))])
    pid = os.fork()
    if pid == 0:
        store.create("k", b"")
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    assert [info.key for info in inner.list()] == (["k"] if is_there else [])
