"""Reading holds a document and a buffer, never a file: the peak of a process that reads files far larger than that."""

import json
import os
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from corpus_builders import tar_bytes

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
