"""The keys of a user's own code: `[code]`, `[loss]`, `[optimizer] class`, `[metrics.fn]`."""

from __future__ import annotations

from typing import Any

import pytest
from spec_samples import sample

from phalanx.core.errors import Problems
from phalanx.spec import Layout, parse_job
from phalanx.spec.changes import When, changes
from phalanx.spec.effects import without_effect
from phalanx.spec.job import plain

DIGEST = f"sha256:{'0' * 64}"
OWN: dict[str, Any] = {
    "loss__fn": "own.parts:loss",
    "loss__args": {"z": 0.1},
    "optimizer__class": "own:Lion",
    "optimizer__args": {"betas": [0.9, 0.99]},
    "metrics__fn": {"accuracy": "own.parts:accuracy"},
    "code__path": "/srv/own",
}


def test_own_parts_are_identity_but_metrics_and_code_are_not():
    plain_identity, identity = sample().identity(), sample(**OWN).identity()
    assert "loss" not in plain_identity and not {"class", "args"} & plain_identity["optimizer"].keys()
    assert identity["loss"] == {"fn": "own.parts:loss", "args": {"z": 0.1}}
    assert identity["optimizer"]["class"] == "own:Lion"
    assert sample(metrics__fn=OWN["metrics__fn"], code__path="/a").identity() == plain_identity


def test_own_parts_come_back_from_a_resolved_file_and_are_named():
    job = sample(**OWN)
    assert parse_job(plain(job)) == job
    assert job.own_names == {
        "loss.fn": "own.parts:loss",
        "optimizer.class": "own:Lion",
        "metrics.fn.accuracy": "own.parts:accuracy",
    }


def test_digest_of_code_is_recorded_with_the_placement_where_there_is_one():
    assert "code" not in sample(**OWN).placement(1)
    assert sample(code__digest=DIGEST).placement(1)["code"] == {"digest": DIGEST}


@pytest.mark.parametrize(
    ("changed", "when"),
    [
        ({"loss__args": {"z": 0.2}}, When.FORK),
        ({"optimizer__class": "own:Sgd"}, When.NEVER),
        ({"metrics__fn": {"top": "own:top"}}, When.RESUME),
        ({"code__digest": DIGEST}, When.RESUME),
    ],
)
def test_own_part_may_change_on_its_occasion(changed: dict[str, Any], when: When):
    assert {change.when for change in changes(sample(**OWN), sample(**{**OWN, **changed}))} == {when}


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"loss__fn": "own"}, "loss.fn is 'own': expected package.module:function"),
        ({"optimizer__class": "own.Lion"}, "optimizer.class is 'own.Lion': expected package.module:Class"),
        ({"metrics__fn": {"accuracy": "own"}}, "metrics.fn.accuracy is 'own': expected package.module:function"),
        ({"metrics__fn": {"loss": "own:x"}}, "names that no figure of Phalanx has, not 'loss'"),
        ({"metrics__fn": {"Top 5": "own:x"}}, "names of lower-case letters, digits and `_`, at most 63, not 'Top 5'"),
        (
            {"metrics__fn": {f"m{number}": "own:x" for number in range(17)}},
            "expected at most 16 names, not 17; leave some out",
        ),
        ({"code__digest": "abc"}, "code.digest is 'abc': expected sha256:"),
        ({"code__on_change": "ask"}, "code.on_change is 'ask': expected 'keep', 'take' or 'refuse'"),
    ],
)
def test_own_part_of_another_form_is_one_line(changed: dict[str, Any], told: str):
    with pytest.raises(Problems) as refused:
        sample(**changed)
    assert told in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"loss__args": {"z": 1}}, "loss.args has no effect, because loss.fn is not set"),
        ({"optimizer__args": {"z": 1}}, "optimizer.args has no effect, because optimizer.class is not set"),
        ({**OWN, "optimizer__beta1": 0.8}, "optimizer.beta1 has no effect, because optimizer.class"),
        ({"metrics__fn": OWN["metrics__fn"]}, "metrics.fn has no effect, because nothing is evaluated"),
        ({"code__on_change": "take"}, "code.on_change has no effect, because code.path is not set"),
    ],
)
def test_own_key_without_effect_is_told(changed: dict[str, Any], told: str):
    assert any(each.startswith(told) for each in without_effect(sample(**changed), Layout()))


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ({"class": "own.Model"}, "model.class is 'own.Model': expected package.module:Class"),
        ({"class": 3}, "model.class is 3: expected text in quotes"),
        (
            {"clas": "own:Model"},
            "model.clas is 'own:Model': expected a key that the job file knows; did you mean model.",
        ),
    ],
)
@pytest.mark.parametrize("args", [{"num_layers": 4, "dim": 8}, {"dim": "wide"}, {}])
def test_class_of_another_form_is_one_line_whatever_its_arguments(
    model: dict[str, Any], args: dict[str, Any], told: str
):
    with pytest.raises(Problems) as refused:
        sample(model={**model, "args": args})
    assert str(refused.value).startswith(told) and "\n" not in str(refused.value)
