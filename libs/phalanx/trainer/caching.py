"""Where the ranks of a node share what they fetch, as the job file has it. Free of torch."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from phalanx.spec import Job
from phalanx.stream.manifest import Split
from phalanx.stream.node_cache import GIB, NodeCache, make_private
from phalanx.stream.pieces import block_bytes


def node_cache(job: Job, splits: Iterable[Split]) -> NodeCache | None:
    """The cache through which the ranks of this node read `splits`; None where the job wants none, or none is remote.

    Raises PhalanxError where it can't be used, or is too small for the largest block of each of them together.
    """
    remote = [split for split in splits if not split.url.startswith("file:")]
    if not (remote and job.cluster.cache_gib):
        return None
    cache = NodeCache(_folder(job), int(job.cluster.cache_gib * GIB))
    blocks = job.data.shuffle_block_shards
    urls = ", ".join(split.url for split in remote)
    needed = sum(block_bytes(split, blocks) for split in remote)
    cache.require(
        needed, f"as much as the largest block of {blocks} shards (data.shuffle_block_shards) holds of {urls}"
    )
    return cache


def copies_folder(job: Job) -> Path | None:
    """Where the ranks of this node share the shard tables of remote manifests (`node_folder` of `open_split`): in the
    job's cache folder. None, below TMPDIR, where it names none or has no cache.
    """
    named = _named_folder(job)
    return named.resolve() / "objects" if named is not None and job.cluster.cache_gib else None


def code_folder(job: Job) -> Path:
    """Where the packed code of jobs is laid out for the ranks of this node; it is made, for this user alone. Raises
    PhalanxError where it can't be used.
    """
    folder = (_named_folder(job) or _common_folder()) / "code"
    make_private(folder)
    return folder


def _folder(job: Job) -> Path:
    return _named_folder(job) or _common_folder() / "pieces"


def _common_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"phalanx-{os.getuid()}"


def _named_folder(job: Job) -> Path | None:
    folder = job.cluster.cache_folder
    return None if folder is None else Path(folder).expanduser().absolute()
