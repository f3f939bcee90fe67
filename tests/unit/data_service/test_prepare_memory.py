"""Reading holds a document and a buffer, making a chunk, writing a shard: never a file, a piece or the input."""

import gzip
import json
import os
import subprocess
import sys
import tracemalloc
import weakref
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from corpus_builders import SETTINGS, tar_bytes
from tokenizers import Tokenizer, models, pre_tokenizers

from phalanx.data.prepare import making, source_of
from phalanx.data.prepare.making import TOKENIZER_KEY, Task, WorkOrder
from phalanx.data.prepare.tokenizer import TokenizerFacts
from phalanx.data.prepare.writer import SplitWriter
from phalanx.objects import open_store

NUM_DOCUMENTS, DOCUMENT_BYTES = 900, 80_000
MIB = 2**20
READER = """
import sys
from pathlib import Path
from phalanx.data.prepare.sources import source_of
import phalanx.data.prepare.inputs.parquet
def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
num_bytes, before = 0, peak()
for document in source_of(sys.argv[1]).documents():
    num_bytes += len(document.text)
print(num_bytes, peak() - before)
"""


def _text(number):
    """Letters that compress little, all different."""
    return np.random.default_rng(number).integers(97, 113, DOCUMENT_BYTES, np.uint8).tobytes()


def _write_lines(path):
    with path.open("wb") as file, zstandard.ZstdCompressor(1).stream_writer(file) as packed:
        for number in range(NUM_DOCUMENTS):
            packed.write(json.dumps({"text": _text(number).decode()}).encode() + b"\n")


def _write_tar(path):
    with path.open("wb") as file, zstandard.ZstdCompressor(1).stream_writer(file) as packed:
        for number in range(NUM_DOCUMENTS):
            member = tar_bytes([(f"{number}.txt", _text(number))])
            packed.write(member[: 512 + -(-DOCUMENT_BYTES // 512) * 512])
        packed.write(bytes(1024))


def _write_parquet(path):
    """All rows in one row group, in pages of 16 rows."""
    texts = [_text(number).decode() for number in range(NUM_DOCUMENTS)]
    pq.write_table(
        pa.table({"text": texts}), path, compression="zstd", row_group_size=NUM_DOCUMENTS, write_batch_size=16
    )


@pytest.mark.parametrize(
    ("name", "write", "limit_bytes"),
    [
        ("a.jsonl.zst", _write_lines, 16 * MIB),
        ("a.tar.zst", _write_tar, 16 * MIB),
        ("a.parquet", _write_parquet, 60 * MIB),  # Arrow's memory pool keeps what it once had
    ],
)
def test_reading_large_file_takes_memory_of_a_buffer(tmp_path, name, write, limit_bytes):
    write(tmp_path / name)
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", READER, str(tmp_path / name)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=100)
    num_bytes, grown = map(int, done.stdout.split())
    assert num_bytes == NUM_DOCUMENTS * DOCUMENT_BYTES and grown < limit_bytes


def _words_tokenizer():
    """Bytes of a tokenizer of whole words, many times as fast as BPE."""
    tokenizer = Tokenizer(models.WordLevel({SETTINGS.eos_token: 0, "[UNK]": 1}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([SETTINGS.eos_token])
    return tokenizer.to_str().encode()


def _peak_of_making(folder, name, num_documents, document_bytes):
    """Python's and numpy's peak while one piece, a packed file that cannot be cut, becomes small chunks; how many."""
    chance = np.random.default_rng(0)
    with gzip.open(folder / name, "wb", 1) as file:
        for _ in range(num_documents):
            letters = chance.choice([*b"abcdefgh "], document_bytes).astype(np.uint8).tobytes()
            file.write(json.dumps({"text": letters.decode()}).encode() + b"\n")
    source, store = source_of(folder / name), open_store(f"file://{folder}/{name}.out")
    store.create(TOKENIZER_KEY, _words_tokenizer())
    (piece,) = source.pieces()
    maker = WorkOrder(store.url, source, SETTINGS.eos_token).maker(store)
    with mock.patch.multiple(making, PART_BYTES=making.PART_BYTES >> 6, PART_RECORDS=making.PART_RECORDS >> 6):
        tracemalloc.start()
        maker.make(Task(0, piece))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak, len(list(store.list("chunks/")))


@pytest.mark.parametrize(("num_documents", "document_bytes"), [(60, 5000), (2200, 40)])
def test_making_chunks_takes_no_more_memory_for_a_larger_piece(tmp_path, num_documents, document_bytes):
    """Of long documents bytes bound a chunk, of short ones their number."""
    _peak_of_making(tmp_path, "first.jsonl.gz", num_documents, document_bytes)
    small, few = _peak_of_making(tmp_path, "small.jsonl.gz", num_documents, document_bytes)
    large, many = _peak_of_making(tmp_path, "large.jsonl.gz", num_documents * 4, document_bytes)
    assert many > 2 * few > 2 and large < small * 1.1
    assert making.PART_BYTES <= 8 * MIB


def test_split_writer_keeps_no_chunk_alive_for_a_document_of_it():
    """A held-out split gets few documents of each chunk, and a member waits for a million tokens' bytes."""
    writer = SplitWriter(open_store("memory://"), "held_out", TokenizerFacts("sha256:0", 300, 0), 1 << 24)
    tokens = np.arange(1 << 16, dtype=np.uint16)
    chunk = weakref.ref(tokens)
    writer.add("a", tokens[5:9])
    del tokens
    assert chunk() is None and writer.num_tokens == 4
