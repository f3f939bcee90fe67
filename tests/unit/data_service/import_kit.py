"""What the import tests share: a dataset's documents read back, short settings."""

from __future__ import annotations

import json
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
