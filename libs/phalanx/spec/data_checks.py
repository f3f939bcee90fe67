"""Rules over several keys of `[data]`: one split or named sources, and weights for all of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from phalanx.spec.data import Data
from phalanx.spec.finding import Finding

if TYPE_CHECKING:
    from phalanx.spec.job import Job

MAX_BATCH = 1_000_000
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
_SPLITS = ("data.train", "data.sources")


def data_findings(job: Job) -> Iterator[Finding]:
    """Every broken rule of `[data]`."""
    data = job.data
    yield from _which(data)
    yield from _names(data)
    yield from _held_out(data)
    yield from _weights(data)
    yield from _stages(data)
    if data.sources and job.training.global_batch_size > MAX_BATCH:
        yield Finding(
            ("training.global_batch_size", "data.sources"),
            job.training.global_batch_size,
            f"at most {MAX_BATCH:,} windows with several sources",
            "lower it, or train on one split",
        )


def _which(data: Data) -> Iterator[Finding]:
    if data.train is None and not data.sources:
        yield Finding(
            _SPLITS,
            None,
            "a value, and has none",
            "set it in [data]: URL of the split to train on (the folder that holds its manifest.json); or name several "
            "in [data.sources.NAME]",
        )
    if data.train is not None and data.sources:
        yield Finding(
            _SPLITS, data.train, "none beside [data.sources.NAME]", "make it one of the sources, or drop them"
        )
    if data.train_digest is not None and data.sources:
        yield Finding(
            ("data.train_digest", "data.sources"),
            data.train_digest,
            "none beside [data.sources.NAME]",
            "write it as the digest of the source it belongs to",
        )
    if data.mixture and not data.sources:
        yield Finding(
            ("data.mixture", "data.sources"),
            ", ".join(data.mixture),
            "none without [data.sources.NAME]",
            "name the sources whose weights these are",
        )


def _names(data: Data) -> Iterator[Finding]:
    for name in data.sources:
        if not _NAME.fullmatch(name):
            yield Finding(
                (f"data.sources.{name}",),
                name,
                "a name of lower-case letters, digits, `-` and `_`, at most 63",
                "choose such a name",
            )
    seen: dict[str, str] = {}
    for name, source in data.sources.items():
        for what in {source.url.rstrip("/"), source.digest} - {None}:
            assert what is not None
            if what in seen:
                yield Finding(
                    (f"data.sources.{name}.url", f"data.sources.{seen[what]}.url", "data.sources"),
                    what,
                    f"another split than that of {seen[what]}",
                    "give the one source the weight of both",
                )
            else:
                seen[what] = name


def _held_out(data: Data) -> Iterator[Finding]:
    urls = [url.rstrip("/") for url in (data.train, *(each.url for each in data.sources.values())) if url is not None]
    digests = {data.train_digest, *(each.digest for each in data.sources.values())} - {None}
    same_url = data.held_out is not None and data.held_out.rstrip("/") in urls
    if same_url or data.held_out_digest in digests:
        key, value = ("data.held_out", data.held_out) if same_url else ("data.held_out_digest", data.held_out_digest)
        yield Finding(
            (key, *_SPLITS),
            value,
            "another split than data.train",
            "name the held-out split that `phalanx data prepare` wrote beside it",
        )


def _weights(data: Data) -> Iterator[Finding]:
    if data.sources and not any(source.weight for source in data.sources.values()):
        name = next(iter(data.sources))
        yield Finding(
            (f"data.sources.{name}.weight", "data.sources"),
            data.sources[name].weight,
            "a weight above 0 for one source at least, all of them are 0",
            "say how much of each is read",
        )


def _stages(data: Data) -> Iterator[Finding]:
    names, steps = set(data.sources), dict[int, str]()
    for stage, what in data.mixture.items():
        key = f"data.mixture.{stage}.weights"
        if names and set(what.weights) != names:
            missing, unknown = sorted(names - set(what.weights)), sorted(set(what.weights) - names)
            told = [f"without {', '.join(missing)}"] * bool(missing) + [f"for {', '.join(unknown)}"] * bool(unknown)
            yield Finding(
                (key, "data.sources"),
                f"weights {' and '.join(told)}",
                f"a weight for each of the sources {', '.join(sorted(names))}",
                "name them all; 0 reads none of a source",
            )
        elif not any(what.weights.values()):
            value = "all 0" if what.weights else "none"
            yield Finding((key,), value, "a weight above 0 for one source at least", "say how much of each is read")
        if what.from_step in steps:
            yield Finding(
                (f"data.mixture.{stage}.from_step", "data.mixture"),
                what.from_step,
                f"another step than that of data.mixture.{steps[what.from_step]}",
                "only one set of weights can hold from a step on",
            )
        steps.setdefault(what.from_step, stage)
