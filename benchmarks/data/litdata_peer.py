"""litdata's side of `local.py`, run by the Python of an environment that has it: chunks of its own from the same
tokens, then, for each line on standard input, one shuffled pass in this process (0 workers); samples/s by the clock and
by CPU time on standard output.

python benchmarks/data/litdata_peer.py TOKENS.bin FOLDER
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import numpy as np
import torch
from litdata import StreamingDataLoader, StreamingDataset, TokensLoader
from litdata.streaming.cache import Cache

SEQ_LEN, BATCH, DOCUMENT = 2048, 16, 700


def write(tokens: np.ndarray, folder: Path) -> None:
    """Tokens as 16-bit tensors, the least that litdata can be asked to move."""
    shutil.rmtree(folder, ignore_errors=True)
    cache = Cache(str(folder), chunk_bytes=64 << 20, item_loader=TokensLoader(block_size=SEQ_LEN))
    for number, start in enumerate(range(0, len(tokens) - DOCUMENT, DOCUMENT)):
        cache[number] = torch.from_numpy(tokens[start : start + DOCUMENT].view(np.int16).copy())
    cache.done()
    cache.merge()


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[2])
    if not (folder / "index.json").exists():
        write(np.memmap(sys.argv[1], dtype=np.uint16, mode="r"), folder)
    data = StreamingDataset(str(folder), item_loader=TokensLoader(block_size=SEQ_LEN), shuffle=True, drop_last=True)
    print("ready", flush=True)
    for _ in sys.stdin:
        start, cpu, count = time.perf_counter(), time.process_time(), 0
        for batch in StreamingDataLoader(data, batch_size=BATCH, num_workers=0, shuffle=True):
            count += len(batch)
        print(count / (time.perf_counter() - start), count / (time.process_time() - cpu), flush=True)


if __name__ == "__main__":
    main()
