"""`[data]` with several sources: what is refused, what belongs to the identity, what may change when, exact weights."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from spec_samples import changed

from phalanx.core.errors import PhalanxError, Problems
from phalanx.spec import Job, parse_job
from phalanx.spec.changes import When, changes, require_forkable, require_resumable
from phalanx.spec.data import exact
from phalanx.spec.effects import without_effect
from phalanx.spec.job import plain
from phalanx.spec.source import apply_overrides
from phalanx.spec.toml import toml_text

DIGEST = "sha256:" + "a" * 64
BASE: dict[str, Any] = {
    "job": {"name": "mixed", "storage": "memory://store"},
    "model": {"preset": "tiny"},
    "data": {
        "sources": {
            "web": {"url": "memory://web", "weight": 0.7},
            "code": {"url": "memory://code", "weight": 0.3, "epochs": 4.0},
        },
        "mixture": {"anneal": {"from_step": 90, "weights": {"web": 0.1, "code": 0.9}}},
    },
    "training": {"seq_len": 16, "steps": 100, "global_batch_size": 8},
    "optimizer": {"lr": 1e-3},
}


def raw(**changes: Any) -> dict[str, Any]:
    """The base with values at `a__b__c`; None removes a key."""
    return changed(BASE, **changes)


def job(**changed: Any) -> Job:
    return parse_job(raw(**changed))


@pytest.mark.parametrize(
    "changed, key, told",
    [
        ({"data__train": "memory://other"}, "data.train", "none beside [data.sources.NAME]"),
        ({"data__train_digest": DIGEST}, "data.train_digest", "none beside [data.sources.NAME]"),
        ({"data__sources": None}, "data.train", "a value, and has none"),
        ({"data__sources": None, "data__train": "memory://web"}, "data.mixture", "none without [data.sources.NAME]"),
        ({"data__sources__Web": {"url": "memory://x", "weight": 1}}, "data.sources.Web", "lower-case letters"),
        ({"data__sources__web__weight": -0.1}, "data.sources.web.weight", "at least 0"),
        ({"data__sources__web__weight": None}, "data.sources.web.weight", "a value, and has none"),
        ({"data__sources__web__wieght": 1.0}, "data.sources.web.wieght", "data.sources.web.weight?"),
        ({"data__sources__web__url": "web"}, "data.sources.web.url", "a URL: file://"),
        ({"data__sources__web__digest": "x"}, "data.sources.web.digest", "sha256: and 64"),
        ({"data__sources__code__epochs": 0.0}, "data.sources.code.epochs", "above 0"),
        ({"data__sources__code__when_out": "wait"}, "data.sources.code.when_out", "'share' or 'stop'"),
        ({"data__sources__web__url": "memory://code"}, "data.sources.code.url", "another split than that of web"),
        ({"data__held_out": "memory://web"}, "data.held_out", "another split than data.train"),
        ({"data__mixture__anneal__weights": {"web": 1.0}}, "data.mixture.anneal.weights", "without code"),
        ({"data__mixture__anneal__weights__books": 1.0}, "data.mixture.anneal.weights", "for books"),
        ({"data__mixture__anneal__weights": {"web": 0.0, "code": 0.0}}, "data.mixture.anneal.weights", "above 0"),
        ({"data__mixture__anneal__weights__web": -1.0}, "data.mixture.anneal.weights.web", "at least 0"),
        ({"data__mixture__anneal__from_step": 1}, "data.mixture.anneal.from_step", "at least 2"),
        (
            {"data__mixture__late": {"from_step": 90, "weights": {"web": 1.0, "code": 1.0}}},
            "data.mixture.late.from_step",
            "another step than that of data.mixture.anneal",
        ),
        (
            {"data__sources__web__weight": 0.0, "data__sources__code__weight": 0.0},
            "data.sources.web.weight",
            "above 0 for one source",
        ),
        ({"training__global_batch_size": 1_000_001}, "training.global_batch_size", "with several sources"),
    ],
)
def test_mixture_that_cannot_be_is_refused_with_the_key(changed: dict[str, Any], key: str, told: str) -> None:
    with pytest.raises(Problems) as caught:
        job(**changed)
    lines = [str(problem) for problem in caught.value.problems]
    assert any(line.startswith(key) and told in line for line in lines), lines


def test_several_mistakes_are_told_at_once() -> None:
    with pytest.raises(Problems) as caught:
        job(data__train="memory://x", data__sources__web__weight=-1.0, data__mixture__anneal__from_step=0)
    keys = {problem.where for problem in caught.value.problems}
    assert {"data.sources.web.weight", "data.mixture.anneal.from_step"} <= keys


def test_sources_are_numbered_by_name_and_a_single_split_is_one_of_them() -> None:
    assert list(job().data.training) == ["code", "web"]
    single = job(data__sources=None, data__mixture=None, data__train="memory://x", data__train_digest=DIGEST)
    ((name, source),) = single.data.training.items()
    assert (name, source.url, source.digest, source.weight) == ("train", "memory://x", DIGEST, 1.0)
    assert single.data.key_of("train") == "data.train" and job().data.url_key("web") == "data.sources.web.url"


@pytest.mark.parametrize("number, value", [(0.1, Fraction(1, 10)), (0.7, Fraction(7, 10)), (1e-7, Fraction(1, 10**7))])
def test_weight_is_the_decimal_that_was_written(number: float, value: Fraction) -> None:
    assert exact(number) == value


def test_identity_holds_names_weights_limits_and_digests_but_not_places() -> None:
    digests = {"web": DIGEST, "code": DIGEST.replace("a", "b")}
    base = job().identity_digest(digests)
    assert job(data__sources__web__url="memory://moved").identity_digest(digests) == base
    assert job(data__sources__web__digest=DIGEST).identity_digest(digests) == base
    others = [
        job(data__sources__web__weight=0.6).identity_digest(digests),
        job(data__sources__code__epochs=5.0).identity_digest(digests),
        job(data__sources__code__when_out="stop").identity_digest(digests),
        job(data__mixture__anneal__from_step=80).identity_digest(digests),
        job().identity_digest({**digests, "web": DIGEST.replace("a", "c")}),
    ]
    assert len({base, *others}) == len(others) + 1
    with pytest.raises(PhalanxError, match=r"data\.sources\.web\.digest"):
        job(data__sources__web__digest=DIGEST).identity_digest({**digests, "web": DIGEST.replace("a", "c")})


def test_identity_of_a_job_of_one_split_says_nothing_of_sources() -> None:
    single = job(data__sources=None, data__mixture=None, data__train="memory://x")
    assert single.identity()["data"].keys() == {"document_mask", "shuffle_block_shards"}


def test_what_may_change_when() -> None:
    found = changes(job(), job(data__sources__web__url="memory://moved"))
    assert [(each.key, each.when) for each in found] == [("data.sources.web.url", When.RESUME)]
    found = changes(job(), job(data__sources__web__weight=0.5, data__mixture__anneal__weights__web=0.3))
    assert {each.when for each in found} == {When.JOURNAL}
    added = job(data__sources__books={"url": "memory://b", "weight": 1.0}, data__mixture=None)
    with pytest.raises(Problems, match=r"data\.sources\.books\.weight.*fork the job"):
        require_resumable(job(data__mixture=None), added)
    require_forkable(job(), added)


def test_override_reaches_a_source() -> None:
    found = parse_job(apply_overrides(raw(), ["data.sources.web.weight=2", "data.sources.web.url=memory://123"]))
    assert found.data.sources["web"].weight == 2 and found.data.sources["web"].url == "memory://123"


def test_resolved_job_file_reads_back_as_itself() -> None:
    assert parse_job(apply_overrides(plain(job()), [])) == job()
    assert "[data.sources.web]" in toml_text(plain(job())) and "[data.mixture.anneal.weights]" in toml_text(
        plain(job())
    )


def test_settings_of_sources_without_effect_are_told() -> None:
    late = job(data__mixture__anneal__from_step=101, data__sources__web__when_out="stop")
    told = without_effect(late, late.layout(1))
    assert any(each.startswith("data.mixture.anneal has no effect") for each in told)
    assert any(each.startswith("data.sources.web.when_out has no effect") for each in told)
    zero = job(data__mixture=None, data__sources__web__weight=0.0)
    assert any(each.startswith("data.sources.web has no effect") for each in without_effect(zero, zero.layout(1)))
