"""Tiny datasets as `data prepare` leaves them, and registered jobs that read them, without a tokenizer's work."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from phalanx.core.digest import canonical_json, sha256
from phalanx.lineage import Lineage
from phalanx.objects import ObjectStore, open_store
from phalanx.spec import Job, parse_job
from phalanx.stream.manifest import ShardEntry, encode_manifest, ids_key, index_key, tar_key
from phalanx.stream.shards import ShardBuilder, token_dtype
from phalanx.trainer.places import job_store

TOKENIZER = b'{"a": "tokenizer"}'
DIGEST = sha256(b"a digest")


def document_lengths(num_shards: int = 6, seed: int = 1) -> list[list[int]]:
    """Lengths of documents, shard by shard: about 240 tokens a shard."""
    draw = random.Random(seed)
    return [[draw.randint(5, 75) for _ in range(6)] for _ in range(num_shards)]


def write_split(
    store: ObjectStore,
    lengths: Sequence[Sequence[int]],
    *,
    is_held_out: bool = False,
    tokenizer: bytes = TOKENIZER,
    vocab_size: int = 300,
    seed: int = 1,
) -> str:
    """Writes a split folder with random tokens; returns the digest of its manifest."""
    draw, entries = np.random.default_rng(seed), []
    for number, documents in enumerate(lengths):
        builder = ShardBuilder(f"t-{number:08d}", token_dtype(vocab_size), member_bytes=256)
        for k, length in enumerate(documents):
            builder.add(f"{number}/{k}.txt", draw.integers(1, vocab_size, length))
        built = builder.finish()
        index, ids = built.index.encode(), canonical_json({"ids": list(built.document_ids)})
        for key, data in ((tar_key, built.tar), (index_key, index), (ids_key, ids)):
            store.create(key(built.name), data)
        entries.append(ShardEntry.of(built, index, ids))
    manifest = encode_manifest(
        entries,
        name="held_out" if is_held_out else "train",
        is_held_out=is_held_out,
        tokenizer_digest=sha256(tokenizer),
        vocab_size=vocab_size,
        eos_id=0,
        recipe={"made_by": "a test", "seed": seed},
    )
    store.create("manifest.json", manifest)
    return sha256(manifest)


def write_dataset(url: str, *, num_shards: int = 6, seed: int = 1, held_out: bool = True) -> str:
    """A dataset folder: tokenizer, `train` and `held_out`; returns the URL."""
    root = open_store(url)
    root.create("tokenizer.json", TOKENIZER)
    write_split(root.within("train"), document_lengths(num_shards, seed), seed=seed)
    if held_out:
        write_split(root.within("held_out"), [[9, 8], [7]], is_held_out=True, seed=seed)
    return url


def job_tables(
    storage: str,
    train: str | None,
    name: str = "tiny",
    *,
    steps: int = 10,
    more: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """The tables of a small job file: sequences of 16 tokens, batches of 4. train: None where `more`, keys by section,
    names sources.
    """
    tables: dict[str, dict[str, Any]] = {
        "job": {"name": name, "storage": storage},
        "model": {"preset": "tiny"},
        "data": {"shuffle_block_shards": 2, **({} if train is None else {"train": train})},
        "training": {"seq_len": 16, "steps": steps, "global_batch_size": 4},
        "optimizer": {"lr": 1e-3},
        "parallel": {"local_batch_size": 2},
    }
    for section, keys in (more or {}).items():
        tables[section] = {**tables.get(section, {}), **keys}
    return tables


def make_job(storage: str, train: str, name: str = "tiny", **options: Any) -> Job:
    """The job of `job_tables`."""
    return parse_job(job_tables(storage, train, name, **options))


def open_attempt(job: Job) -> int:
    """Opens the next attempt of a job; its number."""
    lineage = Lineage(job_store(job))
    return lineage.open_attempt(code_digest=DIGEST, identity_digest=DIGEST, placement={}).number
