"""`python -m phalanx.data.prepare.training`: trains a tokenizer in a process of its own.

The trainer is native code that looks at no signal for minutes; a process can be killed. In: a line of JSON (what to
train), then each text as its length (uint64, little endian) and its bytes, then the length END. Out: the bytes of
tokenizer.json behind their length, and nothing where anything failed. It ends at once, whatever it is doing, when its
standard input does.
"""

from __future__ import annotations

import json
import os
import selectors
import struct
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import BinaryIO, Self

from phalanx.core.errors import OutsideError
from phalanx.data.prepare import processes
from phalanx.data.prepare.tokenizer import train_tokenizer

_LENGTH = struct.Struct("<Q")
_END = (1 << 64) - 1
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
            trainer.send(_LENGTH.pack(len(text)))
            trainer.send(text)
        trainer.send(_LENGTH.pack(_END))
        trainer.flush()
        return trainer.result()


class _Trainer:
    """The process, as a context manager that kills it on the way out."""

    def __init__(self) -> None:
        self._process = processes.start("phalanx.data.prepare.training", {})
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
        if len(found) < _LENGTH.size or _LENGTH.unpack_from(found)[0] != len(found) - _LENGTH.size:
            raise self._died()
        return bytes(found[_LENGTH.size :])

    def _died(self) -> OutsideError:
        how = processes.how_it_ended(processes.end(self._process), "a smaller --vocab-size or --max-bytes needs less")
        return OutsideError(f"{self._named} died: {how}")


def main() -> int:
    """The exit code of the process."""
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever else is printed is no answer
    stream = sys.stdin.buffer
    order = json.loads(stream.readline())
    trained = train_tokenizer(_texts(stream), order["vocab_size"], order["eos_token"])
    answer.write(_LENGTH.pack(len(trained)) + trained)
    answer.close()
    return 0


def _texts(stream: BinaryIO) -> Iterator[bytes]:
    """The texts that come; once they are complete, a thread waits for the end of whoever sent them."""
    while (length := _LENGTH.unpack(_exactly(stream, _LENGTH.size))[0]) != _END:
        yield _exactly(stream, length)
    threading.Thread(target=_exactly, args=(stream, 1), name="phalanx-parent", daemon=True).start()


def _exactly(stream: BinaryIO, num_bytes: int) -> bytes:
    data = stream.read(num_bytes)
    if len(data) < num_bytes:  # nobody waits for an answer any more
        os._exit(1)
    return data


if __name__ == "__main__":
    sys.exit(main())
