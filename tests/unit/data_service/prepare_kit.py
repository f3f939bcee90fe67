"""The preparation told plainly: one document after the other in one process, for its tests to compare with."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from corpus_builders import SETTINGS, WORDS

from phalanx.data.prepare import PrepareSettings, Source, rules
from phalanx.data.prepare.tokenizer import load_tokenizer, train_tokenizer
from phalanx.objects import ObjectStore
from phalanx.stream.shards import ShardBuilder


def given_tokenizer(folder: Path) -> Path:
    """A small tokenizer.json."""
    file = folder / "tokenizer.json"
    file.write_bytes(train_tokenizer(iter([" ".join(WORDS).encode()]), 300, SETTINGS.eos_token))
    return file


@dataclass
class Expected:
    """What a preparation must give: the bytes of tars and indices by key, counts, records and bytes read."""

    shards: dict[str, bytes]
    ids: dict[str, list[str]]
    counts: dict[str, int]
    documents_read: int
    bytes_read: int


def expected(source: Source, settings: PrepareSettings) -> Expected:
    """The dataset of `source`, made in the simplest way; settings: with a given tokenizer."""
    tokenizer = load_tokenizer(settings.tokenizer.read_bytes(), settings.eos_token)
    builders: dict[str, list[ShardBuilder]] = {"train": [], "held_out": []}
    counts: Counter[str] = Counter(dict.fromkeys((*rules.DROPPED, *rules.MENDED, rules.LONG), 0))
    seen, documents_read, bytes_read = set(), 0, 0
    for raw in source.documents():
        if settings.max_bytes is not None and bytes_read + raw.num_bytes > settings.max_bytes:
            break
        documents_read, bytes_read = documents_read + 1, bytes_read + raw.num_bytes
        text = rules.clean(raw, counts, settings.lengths)
        if text is None:
            continue
        digest = hashlib.sha256(text).digest()
        if digest in seen:
            counts[rules.DUPLICATE] += 1
            continue
        seen.add(digest)
        name = "held_out" if int.from_bytes(digest[:8], "big") < settings.held_out_fraction * 2.0**64 else "train"
        split = builders[name]
        if not split or split[-1].num_tokens >= settings.shard_tokens:
            split.append(ShardBuilder(f"{name}-{len(split):08d}", tokenizer.dtype))
        split[-1].add(rules.clean_id(raw.id, counts), tokenizer.encode([text])[0])
    built = {f"{name}/{b.name}": b.finish() for name, split in builders.items() for b in split}
    tars = {f"{key}.tar": shard.tar for key, shard in built.items()}
    indices = {f"{key}.index.safetensors": shard.index.encode() for key, shard in built.items()}
    ids = {key: list(shard.document_ids) for key, shard in built.items()}
    return Expected(tars | indices, ids, dict(counts), documents_read, bytes_read)


def objects(store: ObjectStore) -> dict[str, bytes]:
    """All objects of a store by key."""
    return {found.key: store.read(found.key) for found in store.list()}


def shards(store: ObjectStore) -> dict[str, bytes]:
    """Tars and indices of a dataset by key."""
    kept = (".tar", ".index.safetensors")
    return {key: data for key, data in objects(store).items() if key.endswith(kept)}


def mixed_corpus(folder: Path, num_files: int = 12) -> Path:
    """Text files, JSON lines with and without ids, odd documents, and copies across all of them."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(num_files):
        words = [WORDS[(number * 5 + k * (number + 2)) % len(WORDS)] for k in range(20 + number * 11 % 60)]
        (folder / f"a{number:02d}.txt").write_text(f"{number % 9} " + " ".join(words[: 30 + number % 9]))
        (folder / f"c{number:02d}.md").write_bytes((folder / f"a{number:02d}.txt").read_bytes())
    lines = [f'{{"text": "line {number % 50} of many words, {WORDS[number % 15]}"}}' for number in range(150)]
    lines[3], lines[70] = "{broken", ""
    lines[5] = '{"text": "with an id of its own", "id": "mine\\ud800"}'
    lines[120] = '{"text": 7}'
    (folder / "b.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "d_empty.txt").write_bytes(b"")
    (folder / "d_latin.txt").write_bytes(b"caf\xe9")
    (folder / "d_crlf.txt").write_bytes(b"one\r\ntwo")
    return folder


def with_tokenizer(folder: Path, **changes: object) -> PrepareSettings:
    """Settings of the tests with a given tokenizer."""
    return replace(SETTINGS, tokenizer=given_tokenizer(folder), **changes)


def flat(lists: dict[str, list[str]]) -> list[str]:
    """All ids, in order."""
    return list(chain.from_iterable(lists.values()))
