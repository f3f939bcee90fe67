"""What is learnt from: `[data]`, one split or several sources by weight."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Annotated, Literal

from pydantic import Field

from phalanx.spec.keys import URL_PATTERN, Mark, Section, key

DIGEST_PATTERN = r"^sha256:[0-9a-f]{64}$"
SINGLE = "train"


class DataSource(Section):
    """One of several training splits (instead of `data.train`), under a name of yours. Windows are dealt out by the
    weights, which are shares of tokens: any numbers, divided by their sum. A window belongs to one source.
    """

    url: str = key(
        Mark.FREE, "URL of the split to train on (the folder that holds its manifest.json).", pattern=URL_PATTERN
    )
    weight: float = key(
        Mark.JOURNALED,
        "Share of the tokens, in proportion to the other sources' weights; 0 for none yet.",
        unit="parts",
        ge=0,
    )
    digest: str | None = key(
        Mark.IDENTITY,
        "Digest that the split must have; left out, it is taken from its manifest.",
        None,
        pattern=DIGEST_PATTERN,
    )
    epochs: float | None = key(
        Mark.IDENTITY,
        "Passes over the source after which it has run out; none: it repeats for ever.",
        None,
        unit="epochs",
        gt=0,
    )
    when_out: Literal["share", "stop"] = key(
        Mark.IDENTITY,
        "Once it has run out: the others share its weight in proportion, or the run ends.",
        "share",
    )


class MixtureStage(Section):
    """Weights that hold from a step on, until the next of these tables; NAME is for people. `phalanx data mix` changes
    them while the job runs.
    """

    from_step: int = key(Mark.JOURNALED, "First step that is read with these weights.", unit="steps", ge=2)
    weights: dict[str, Annotated[float, Field(ge=0)]] = key(
        Mark.JOURNALED, "A weight for every source, by its name: `{ web = 0.3, code = 0.7 }`.", unit="parts"
    )


class Data(Section):
    """The tokens: folders that `phalanx data prepare` or `data import` wrote."""

    train: str | None = key(
        Mark.FREE,
        "URL of the split to train on (the folder that holds its manifest.json); or there are sources, below.",
        None,
        pattern=URL_PATTERN,
    )
    held_out: str | None = key(Mark.FREE, "URL of the split to evaluate on.", None, pattern=URL_PATTERN)
    train_digest: str | None = key(
        Mark.IDENTITY,
        "Digest that the training split must have; left out, it is taken from its manifest.",
        None,
        pattern=DIGEST_PATTERN,
    )
    held_out_digest: str | None = key(
        Mark.FREE, "Digest that the held-out split must have.", None, pattern=DIGEST_PATTERN
    )
    document_mask: bool = key(
        Mark.IDENTITY, "Whether attention, positions and targets stop at document boundaries inside a window.", True
    )
    shuffle_block_shards: int = key(
        Mark.IDENTITY, "Shards whose documents are shuffled together.", 4, unit="shards", gt=0
    )
    sources: dict[str, DataSource] = Field(default_factory=dict)
    mixture: dict[str, MixtureStage] = Field(default_factory=dict)

    @property
    def is_mixture(self) -> bool:
        """Whether `sources` say what is read, instead of `train`."""
        return bool(self.sources)

    @property
    def training(self) -> dict[str, DataSource]:
        """The sources that are read, by name in the order in which they are numbered; a single split is one of the
        weight 1, called `train`.
        """
        if self.sources:
            return dict(sorted(self.sources.items()))
        assert self.train is not None, "checks see to it"
        return {SINGLE: DataSource(url=self.train, weight=1.0, digest=self.train_digest)}

    def url_key(self, source: str) -> str:
        """The key of the job file that holds the URL of a source."""
        return f"{self.key_of(source)}.url" if self.sources else "data.train"

    def key_of(self, source: str) -> str:
        """The table or key of the job file that names a source."""
        return f"data.sources.{source}" if self.sources else "data.train"


def exact(weight: float) -> Fraction:
    """A number of the job file as it was written: the shortest decimal that reads back as it."""
    return Fraction(repr(weight))


def exact_weights(weights: Mapping[str, float]) -> dict[str, Fraction]:
    """As `exact`, by name."""
    return {name: exact(weight) for name, weight in weights.items()}
