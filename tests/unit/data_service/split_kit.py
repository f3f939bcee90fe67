"""Small datasets written with the shard format alone, so that what looks at data is tested without preparing any."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from phalanx.core.digest import canonical_json, sha256
from phalanx.data.prepare.tokenizer import train_tokenizer
from phalanx.stream.manifest import ShardEntry, encode_manifest, ids_key, index_key, tar_key
from phalanx.stream.shards import ShardBuilder, token_dtype

EOS = "<|endoftext|>"
WORDS = [
    "the",
    "line",
    "holds",
    "when",
    "one",
    "falls",
    "naïve",
    "Überfluß",
    "東京",
    "🙂",
    "steps",
    "forward",
    "\n\n",
    "def",
    "f(x):",
    "return",
    "x\t",
]


def texts_of(seed: int, count: int, most_words: int = 40) -> list[str]:
    """Texts of uneven length, each with a word of its own."""
    choose = random.Random(seed)
    return [
        f"no{seed}x{number} " + " ".join(choose.choices(WORDS, k=choose.randint(1, most_words)))
        for number in range(count)
    ]


def tokenizer_bytes(texts: list[str], vocab_size: int = 400) -> bytes:
    """A byte-level tokenizer trained on texts."""
    return train_tokenizer((text.encode() for text in texts), vocab_size, EOS)


def write_dataset(
    folder: Path,
    texts: list[str],
    tokenizer: bytes,
    *,
    per_shard: int = 10,
    member_bytes: int = 400,
    name: str = "train",
    ids: list[str] | None = None,
) -> str:
    """A dataset with one split; the URL of the split. ids: default doc/<number>.txt."""
    split = folder / name
    split.mkdir(parents=True)
    (folder / "tokenizer.json").write_bytes(tokenizer)
    library = Tokenizer.from_str(tokenizer.decode())
    library.encode_special_tokens = True
    vocab_size, eos_id = library.get_vocab_size(), library.token_to_id(EOS)
    ids = ids or [f"doc/{number}.txt" for number in range(len(texts))]
    entries = []
    for first in range(0, len(texts), per_shard):
        builder = ShardBuilder(f"{name}-{len(entries):08d}", token_dtype(vocab_size), member_bytes)
        for document_id, text in zip(ids[first : first + per_shard], texts[first : first + per_shard], strict=True):
            tokens = [*library.encode(text, add_special_tokens=False).ids, eos_id]
            builder.add(document_id, np.array(tokens))
        built = builder.finish()
        index, listed = built.index.encode(), canonical_json({"ids": list(built.document_ids)})
        for key, data in ((tar_key, built.tar), (index_key, index), (ids_key, listed)):
            (split / key(built.name)).write_bytes(data)
        entries.append(ShardEntry.of(built, index, listed))
    manifest = encode_manifest(
        entries,
        name=name,
        is_held_out=name == "held_out",
        tokenizer_digest=sha256(tokenizer),
        vocab_size=vocab_size,
        eos_id=eos_id,
        recipe={},
    )
    (split / "manifest.json").write_bytes(manifest)
    return f"file://{split}"
