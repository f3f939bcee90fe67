"""Small corpora and a store that dies, for the preparation's tests."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from support.words import WORDS

from phalanx.data.prepare import PrepareSettings, source_of
from phalanx.data.prepare.inputs.documents import DEFAULT_FIELDS
from phalanx.objects.base import ScopedStore

SETTINGS = PrepareSettings(vocab_size=300, held_out_fraction=0.2, shard_tokens=600)


def write_corpus(folder: Path, num_documents: int = 60) -> Path:
    """A folder tree of texts, all different, of uneven length."""
    for number in range(num_documents):
        file = folder / f"part{number % 3}" / f"v1.{number}_doc.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        words = [WORDS[(number * 7 + k * (number + 1)) % len(WORDS)] for k in range(5 + number * 13 % 90)]
        file.write_text(f"{number} " + " ".join(words))
    return folder


class Killed(BaseException):
    """Stands for the end of the process."""


class DyingStore(ScopedStore):
    """A store below a prefix after whose n-th create the process dies: the object is there, the reply never comes."""

    def __init__(self, store, prefix, creates_left):
        super().__init__(store, prefix)
        self._left = creates_left

    def create(self, key, data):
        super().create(key, data)
        self._count()

    def _count(self):
        self._left[0] -= 1
        if not self._left[0]:
            raise Killed

    def within(self, prefix):
        return DyingStore(self._store, self._prefix + prefix, self._left)


RECORDS = [{"id": f"r{number}/v1.{number}", "text": f"record {number}: the line holds"} for number in range(9)]


def json_lines(records=RECORDS):
    """Records as the bytes of a .jsonl file."""
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def tar_bytes(members, form=tarfile.GNU_FORMAT):
    """A tar of (name, bytes) pairs in the given format."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def parquet_bytes(columns, row_group_size=None, **options):
    """A parquet file of a table, or of columns by name."""
    table, buffer = columns if isinstance(columns, pa.Table) else pa.table(columns), io.BytesIO()
    pq.write_table(table, buffer, row_group_size=row_group_size, **options)
    return buffer.getvalue()


def packed(name, data):
    """`data` packed as the name's suffix says."""
    if name.lower().endswith((".gz", ".tgz")):
        return gzip.compress(data)
    return zstandard.compress(data) if name.endswith(".zst") else data


def write_file(folder, name, data):
    """Writes a file below `folder`, its folders too; returns its path."""
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    return file


def found_in(*inputs, fields=DEFAULT_FIELDS):
    """(id, text) of every document of the inputs, text decoded where it can be."""
    documents = source_of(inputs, fields).documents()
    return [(each.id, each.text.decode() if isinstance(each.text, bytes) else each.text) for each in documents]
