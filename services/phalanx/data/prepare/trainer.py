"""`python -m phalanx.data.prepare.trainer`: trains a tokenizer for `training`.

In: a line of JSON (what to train), then each text as its length (uint64, little endian) and its bytes, then the length
END. Out: the bytes of tokenizer.json behind their length, and nothing where anything failed. It ends at once, whatever
it is doing, when its standard input does.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from typing import BinaryIO

from phalanx.data.prepare.tokenizer import train_tokenizer
from phalanx.data.prepare.training import END, LENGTH


def main() -> int:
    """The exit code of the process."""
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever else is printed is no answer
    stream = sys.stdin.buffer
    order = json.loads(stream.readline())
    trained = train_tokenizer(_texts(stream), order["vocab_size"], order["eos_token"])
    answer.write(LENGTH.pack(len(trained)) + trained)
    answer.close()
    return 0


def _texts(stream: BinaryIO) -> Iterator[bytes]:
    """The texts that come; once they are complete, a thread waits for the end of whoever sent them."""
    while (length := LENGTH.unpack(_exactly(stream, LENGTH.size))[0]) != END:
        yield _exactly(stream, length)
    threading.Thread(target=_exactly, args=(stream, 1), name="phalanx-parent", daemon=True).start()


def _exactly(stream: BinaryIO, num_bytes: int) -> bytes:
    data = stream.read(num_bytes)
    if len(data) < num_bytes:  # nobody waits for an answer any more
        os._exit(1)
    return data


if __name__ == "__main__":
    sys.exit(main())
