"""What the import tests share: a dataset's documents read back, short settings."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phalanx.data.importing import ImportSettings, Understanding, import_tokens
from phalanx.data.prepare import PrepareReport
from phalanx.objects import ObjectStore, open_store
from phalanx.stream import open_split
from phalanx.stream.manifest import ids_key, tar_key
from phalanx.stream.shards import parse_shard

DIGEST = f"sha256:{'ab' * 32}"
EOS = 7


def settings(vocab_size: int = 50_000, shard_tokens: int = 1 << 14, **how: object) -> ImportSettings:
    """A tokenizer known by its digest; how: fields of Understanding."""
    return ImportSettings(
        how=Understanding(**how),  # type: ignore[arg-type]
        tokenizer_digest=DIGEST,
        vocab_size=vocab_size,
        eos_id=EOS,
        shard_tokens=shard_tokens,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """Documents of a split, by its tars alone: tokens one after the other, lengths, ids."""

    tokens: NDArray[np.int64]
    lengths: NDArray[np.int64]
    ids: list[str]


def read_back(out: ObjectStore, split: str = "train") -> Read:
    """All documents of a split, in the order of its shards."""
    store = out.within(split)
    tokens, lengths, ids = [], [], []
    opened = open_split(store)
    for shard in map(opened.shard, range(opened.num_shards)):
        for member in parse_shard(store.read(tar_key(shard.name))):
            tokens.append(member.tokens.astype(np.int64))
            lengths.append(np.diff(member.bounds.astype(np.int64), prepend=0))
        ids += json.loads(store.read(ids_key(shard.name)))["ids"]
    return Read(np.concatenate(tokens), np.concatenate(lengths), ids)


def imported(source: Path | str, out: Path, given: ImportSettings, workers: int = 2) -> tuple[PrepareReport, Read]:
    """The report, and what the dataset holds."""
    store = open_store(f"file://{out}")
    report = import_tokens([str(source)], store, given, workers=workers)
    return report, read_back(store)


def files_below(folder: Path) -> dict[str, bytes]:
    """Every file's bytes, by relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def rows_of(num_rows: int, longest: int = 60, seed: int = 3) -> list[NDArray[np.int64]]:
    """Rows of random ids, each ending with EOS."""
    generator = np.random.default_rng(seed)
    rows = [generator.integers(8, 50_000, int(length)) for length in generator.integers(1, longest, num_rows)]
    return [np.append(row[:-1], EOS) for row in rows]


def write_mds(folder: Path, rows: Sequence[NDArray[np.int64]], rows_a_shard: int = 20, **shard_fields: object) -> None:
    """An MDS dataset with one column `tokens` of int32."""
    folder.mkdir(parents=True)
    shards = []
    for first in range(0, len(rows), rows_a_shard):
        samples = [_mds_sample(row.astype("<i4")) for row in rows[first : first + rows_a_shard]]
        head = 4 * (len(samples) + 2)
        offsets = head + np.cumsum([0, *map(len, samples)])
        data = np.array([len(samples), *offsets], "<u4").tobytes() + b"".join(samples)
        name = f"shard.{len(shards):05d}.mds"
        (folder / name).write_bytes(data)
        raw = {"basename": name, "bytes": len(data), "hashes": {"sha1": hashlib.sha1(data).hexdigest()}}
        columns = {"column_names": ["tokens"], "column_encodings": ["ndarray:int32"], "column_sizes": [None]}
        shard = {**columns, "compression": None, "format": "mds", "hashes": ["sha1"], "raw_data": raw}
        shards.append({**shard, "samples": len(samples), "version": 2, "zip_data": None, **shard_fields})
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))


def _mds_sample(row: NDArray[np.integer]) -> bytes:
    value = bytes([1 << 2 | 2]) + np.array([len(row)], "<u4").tobytes() + row.tobytes()
    return np.array([len(value)], "<u4").tobytes() + value


def write_megatron(
    prefix: Path,
    rows: Sequence[NDArray[np.integer]],
    *,
    code: int = 8,
    dtype: str = "<u2",
    version: int = 1,
    bounds: Sequence[int] | None = None,
) -> None:
    """A Megatron dataset; each row is a sequence, and a document unless `bounds` says otherwise."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    lengths = np.array([len(row) for row in rows], "<i4")
    item = np.dtype(dtype).itemsize
    offsets = np.concatenate([[0], np.cumsum(lengths)])[:-1].astype("<i8") * item
    documents = np.array(range(len(rows) + 1) if bounds is None else bounds, "<i8")
    head = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", version, code, len(rows), len(documents))
    prefix.with_suffix(".idx").write_bytes(head + lengths.tobytes() + offsets.tobytes() + documents.tobytes())
    prefix.with_suffix(".bin").write_bytes(b"".join(row.astype(dtype).tobytes() for row in rows))
