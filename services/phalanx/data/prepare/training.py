"""Trains a tokenizer in a process of its own (`trainer`), which an interrupt ends at once.

The trainer is native code that looks at no signal for minutes; a process can be killed.
"""

from __future__ import annotations

import json
import os
import selectors
import struct
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Self

from phalanx.core.errors import OutsideError
from phalanx.data.prepare import processes

LENGTH = struct.Struct("<Q")
END = (1 << 64) - 1
_WRITE_BYTES, _READ_BYTES = 1 << 16, 1 << 20
_PATIENCE_S = 300.0  # without a byte taken
_POLL_S = 0.5


def train_apart(texts: Iterable[bytes], vocab_size: int, eos_token: str) -> bytes:
    """What `train_tokenizer` gives, trained by another process; an interrupt ends both at once.

    Raises what `texts` raise, and OutsideError where the process dies or takes no text for five minutes.
    """
    with _Trainer() as trainer:
        trainer.send(json.dumps({"vocab_size": vocab_size, "eos_token": eos_token}).encode() + b"\n")
        for text in texts:
            trainer.send(LENGTH.pack(len(text)))
            trainer.send(text)
        trainer.send(LENGTH.pack(END))
        trainer.flush()
        return trainer.result()


class _Trainer:
    """The process, as a context manager that kills it on the way out."""

    def __init__(self) -> None:
        self._process = processes.start("phalanx.data.prepare.trainer", {})
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self._output = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._input, False)
        self._named = f"the process that trains the tokenizer ({self._process.pid})"
        self._unsent = bytearray()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        processes.end(self._process)

    def send(self, data: bytes) -> None:
        """Hands bytes over, now or with later ones."""
        self._unsent += data
        if len(self._unsent) >= _WRITE_BYTES:
            self.flush()

    def flush(self) -> None:
        """Waits until the process took all; raises OutsideError where it takes nothing or died."""
        waiting = memoryview(bytes(self._unsent))
        self._unsent.clear()
        with selectors.DefaultSelector() as selector:
            selector.register(self._input, selectors.EVENT_WRITE)
            deadline = time.monotonic() + _PATIENCE_S
            while waiting:
                if selector.select(_POLL_S):
                    taken = self._write(waiting)
                    waiting, deadline = waiting[taken:], time.monotonic() + _PATIENCE_S
                elif time.monotonic() > deadline:
                    raise OutsideError(f"{self._named} took no text for {_PATIENCE_S:.0f} s")

    def _write(self, data: memoryview) -> int:
        try:
            return os.write(self._input, data)
        except BlockingIOError:
            return 0
        except BrokenPipeError as error:
            raise self._died() from error

    def result(self) -> bytes:
        """The bytes of tokenizer.json, once it is trained; raises OutsideError where the process died."""
        found = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(self._output, selectors.EVENT_READ)
            while True:
                if not selector.select(_POLL_S):  # a signal may have gone to another thread: look for it
                    continue
                data = os.read(self._output, _READ_BYTES)
                if not data:
                    break
                found += data
        if len(found) < LENGTH.size or LENGTH.unpack_from(found)[0] != len(found) - LENGTH.size:
            raise self._died()
        return bytes(found[LENGTH.size :])

    def _died(self) -> OutsideError:
        how = processes.how_it_ended(processes.end(self._process), "a smaller --vocab-size or --max-bytes needs less")
        return OutsideError(f"{self._named} died: {how}")
