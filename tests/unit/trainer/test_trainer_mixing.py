"""What follows from a job file with several sources and from its journal: weights by step, ends that are foreseen."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.datasets import job_tables, write_dataset

from phalanx.lineage.plan import MixtureChange
from phalanx.spec import Job, parse_job
from phalanx.stream.sources import source_of_shards
from phalanx.trainer.mixing import JobReading, mixture_of

BATCH, SEQ_LEN = 4, 16
TOKENS = {"code": 400, "web": 1600}


def make(folder: Path = Path("/nowhere"), *, steps: int = 100, **data: Any) -> Job:
    sources = {
        name: {"url": f"file://{folder}/{name}/train", "weight": weight, **data.pop(name, {})}
        for name, weight in (("web", 3), ("code", 1))
    }
    more = {"data": {"sources": sources, **data}}
    return parse_job(job_tables(f"file://{folder}/store", None, steps=steps, more=more))


def parts(*numbers: int) -> tuple[Fraction, ...]:
    return tuple(Fraction(number, sum(numbers)) for number in numbers)


def test_stages_hold_from_their_step_and_changes_of_the_journal_until_the_next_stage() -> None:
    job = make(mixture={"late": {"from_step": 51, "weights": {"web": 1, "code": 4}}})
    changes = [MixtureChange(100, (("code", "5"),)), MixtureChange(300, (("web", "0"),))]
    mixture = mixture_of(job, TOKENS, None, changes)
    at = [mixture.weights_at(position) for position in (0, 99, 100, 199, 200, 299, 300)]
    assert at == [parts(1, 3)] * 2 + [parts(5, 3)] * 2 + [parts(4, 1)] * 2 + [parts(1, 0)]


def test_change_of_the_journal_at_the_position_of_a_stage_is_laid_over_it() -> None:
    job = make(mixture={"late": {"from_step": 51, "weights": {"web": 1, "code": 4}}})
    mixture = mixture_of(job, TOKENS, None, [MixtureChange(200, (("web", "6"),))])
    assert mixture.weights_at(200) == parts(4, 6)


@pytest.mark.parametrize(
    "more, steps, told, last",
    [
        ({}, 100, [], None),
        ({"code": {"epochs": 2.0}}, 100, ["source code runs out at step 51: the others share its weight"], None),
        ({"code": {"epochs": 2.0}}, 40, [], None),
        ({"code": {"epochs": 2.0, "when_out": "stop"}}, 100, ["runs out at step 51", "ends after step 50 of 100"], 50),
        (
            {"code": {"epochs": 1.0}, "web": {"epochs": 1.0}},
            100,
            ["source code runs out at step 26: the others", "source web runs out at step 32", "ends after step 31 of"],
            31,
        ),
        ({"code": {"epochs": 0.01}}, 100, ["source code runs out at step 1: the others share"], None),
    ],
)
def test_sources_that_run_out_are_known_before(
    tmp_path: Path, more: dict[str, Any], steps: int, told: list[str], last: int | None
) -> None:
    job = make(steps=steps, **more)
    mixture = mixture_of(job, TOKENS)
    reading = JobReading(job, tuple(_Named(name) for name in TOKENS), None)  # type: ignore[arg-type]
    found = reading.foretold(mixture)
    assert len(found) == len(told) and all(part in sentence for part, sentence in zip(told, found, strict=True)), found
    assert reading.last_step(mixture) == last


class _Named:
    """A source of which only the name matters."""

    def __init__(self, name: str) -> None:
        self.name = name


def test_shards_are_numbered_through_all_sources_and_reports_name_theirs(tmp_path: Path) -> None:
    for seed, name in enumerate(("code", "web"), 1):
        write_dataset(f"file://{tmp_path}/{name}", num_shards=3 + seed, seed=seed, held_out=False)
    reading = JobReading.of(make(tmp_path), None)
    assert [(source.name, source.first_shard) for source in reading.sources] == [("code", 0), ("web", 4)]
    assert source_of_shards(reading.sources, np.array([0, 3, 4, 8])).tolist() == [0, 0, 1, 1]
    assert [reading.key_of(shard, "t.tar") for shard in (3, 4)] == ["code/t.tar", "web/t.tar"]
    told = reading.told_of(reading.mixture([MixtureChange(40, (("code", "3"),))]), 40)
    assert told == {"step": 11, "parts": {"code": 0.5, "web": 0.5}, "foretold": []}
    epochs = reading.epochs(reading.mixture(), 40)
    tokens = {source.name: source.split.num_tokens for source in reading.sources}
    assert epochs == pytest.approx({"code": 10 * SEQ_LEN / tokens["code"], "web": 30 * SEQ_LEN / tokens["web"]})
