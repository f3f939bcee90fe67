"""Whether the objects that a manifest names are there, by their sizes: what a registration looks at. Bytes are checked
by `phalanx data verify`.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from phalanx.core.errors import PhalanxError
from phalanx.objects import ObjectMissing, ObjectStore
from phalanx.stream.manifest import Split, ids_key, index_key, tar_key

MOST_SHARDS = 256
_THREADS = 16


def require_objects(store: ObjectStore, split: Split) -> None:
    """Looks at the objects of all shards, or of `MOST_SHARDS` spread over a split of more. Raises PhalanxError that
    names the first one that is missing or of another size, and how many are.
    """
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="phalanx-presence") as threads:
        found = threads.map(lambda number: tuple(_problems(store, split, number)), _chosen(split.num_shards))
        problems = [problem for each in found for problem in each]
    if problems:
        raise PhalanxError(
            f"{store.url}/{problems[0]}",
            expected=f"the objects that the manifest names; of those looked at {len(problems)} are not as it says",
            remedy="bring them back, or prepare the dataset again; `phalanx data verify` names all of them",
        )


def _chosen(num_shards: int) -> list[int]:
    return sorted({round(number) for number in np.linspace(0, num_shards - 1, MOST_SHARDS).tolist()})


def _problems(store: ObjectStore, split: Split, number: int) -> Iterator[str]:
    entry = split.shard(number)
    for key, num_bytes in (
        (tar_key(entry.name), entry.num_bytes),
        (index_key(entry.name), None),
        (ids_key(entry.name), None),
    ):
        try:
            size = store.info(key).num_bytes
        except ObjectMissing:
            yield f"{key} (missing)"
            continue
        if num_bytes is not None and size != num_bytes:
            yield f"{key} ({size:,} bytes instead of {num_bytes:,})"
