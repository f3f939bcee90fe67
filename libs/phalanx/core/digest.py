"""Digests as strings that carry their algorithm: `sha256:` names identities, `xxh3:` finds damage in bulk bytes.

A digest that a person or a link relies on (job, dataset, tokenizer, code, manifest) is SHA-256. Bulk bytes (shards,
tensors, tokens) are guarded against damage, not against an adversary, by XXH3 with 128 bits, which runs at memory
speed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import xxhash

BytesLike = bytes | bytearray | memoryview


def sha256(data: BytesLike) -> str:
    """Digest of `data` for identities, as `sha256:<64 hex digits>`."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def xxh3(data: BytesLike) -> str:
    """Digest of `data` against damage, as `xxh3:<32 hex digits>` (XXH3, 128 bits, seed 0)."""
    return f"xxh3:{xxhash.xxh3_128_hexdigest(data)}"


def canonical_json(value: Mapping[str, Any]) -> bytes:
    """The one byte form of a JSON object, digested and stored: sorted keys, no spaces, UTF-8, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def digest_of(value: Mapping[str, Any]) -> str:
    """SHA-256 over the canonical JSON of `value`."""
    return sha256(canonical_json(value))
