"""How far the sources of a fork were read when it began: from its origin's job file, journal and checkpoint. Free of
torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from phalanx.lineage import ForkedMixture, Lineage, Manifest
from phalanx.lineage.plan import mixture_changes
from phalanx.spec import Job
from phalanx.stream.manifest import Split, open_split
from phalanx.stream.mixture import Mixture
from phalanx.trainer.caching import copies_folder
from phalanx.trainer.mixing import mixture_of
from phalanx.trainer.places import store_at


def forked_mixture(
    job: Job, splits: Mapping[str, Split], origin_job: Job, origin: Lineage, checkpoint: Manifest
) -> ForkedMixture | None:
    """Where the sources of `job` stand: a source goes on where the origin's source of the same data stood, whatever the
    two are called. None where both read one split.

    splits: of `job`, by name.
    """
    record = origin.read_job()
    earlier = record.origin if record is not None else None
    was_mixture = origin_job.data.is_mixture or (earlier is not None and earlier.mixture is not None)
    if not (job.data.is_mixture or was_mixture):
        return None
    digests: Mapping[str, str] = record.identity["data_digests"] if record is not None else {}
    names = list(origin_job.data.training)
    by_digest = {digests[name]: number for number, name in enumerate(names) if name in digests}
    folder = copies_folder(job)
    tokens = {name: _tokens(origin_job, name, digests.get(name), splits, folder) for name in names}
    changes = mixture_changes(origin.journal(checkpoint.attempt))
    mixture = mixture_of(origin_job, tokens, earlier, changes)
    position = checkpoint.loader.position
    standing = mixture.standing(position)
    if standing is None or not _goes_on(job, splits, origin_job, digests, by_digest):
        return ForkedMixture(position, _named(splits, by_digest, mixture, position), {})
    start, given, change = standing
    numbers = {name: by_digest[split.digest] for name, split in splits.items()}
    return ForkedMixture(
        start,
        {name: given[number] for name, number in numbers.items()},
        {name: str(change.weights[number]) for name, number in numbers.items()},
    )


def _tokens(
    origin_job: Job, name: str, digest: str | None, splits: Mapping[str, Split], node_folder: Path | None
) -> int:
    """Tokens of an epoch of a source of the origin, which matter only where it may run out."""
    known = {split.digest: split.num_tokens for split in splits.values()}
    source = origin_job.data.training[name]
    if digest in known or source.epochs is None:
        return known.get(digest or "", 1)
    return open_split(store_at(origin_job, source.url), digest, node_folder).num_tokens


def _goes_on(
    job: Job, splits: Mapping[str, Split], origin_job: Job, digests: Mapping[str, str], by_digest: Mapping[str, int]
) -> bool:
    """Whether the fork's job file says of the mixture what its origin's did."""
    weights = {splits[name].digest: each.weight for name, each in job.data.training.items()}
    before = {digests.get(name, ""): each.weight for name, each in origin_job.data.training.items()}
    same_batch = job.training.global_batch_size == origin_job.training.global_batch_size
    is_same = weights.keys() == by_digest.keys() and weights == before
    return is_same and same_batch and _stages(job, splits) == _stages(origin_job, digests)


def _stages(job: Job, digest_of: Mapping[str, Split] | Mapping[str, str]) -> dict[int, dict[str, float]]:
    """The stages by step, their weights by the digest of the source."""

    def digest(name: str) -> str:
        found = digest_of.get(name, "")
        return found if isinstance(found, str) else found.digest

    return {
        stage.from_step: {digest(name): weight for name, weight in stage.weights.items()}
        for stage in job.data.mixture.values()
    }


def _named(
    splits: Mapping[str, Split], by_digest: Mapping[str, int], mixture: Mixture, position: int
) -> dict[str, int]:
    counts = mixture.counts(position)
    return {name: counts[by_digest[split.digest]] if split.digest in by_digest else 0 for name, split in splits.items()}
