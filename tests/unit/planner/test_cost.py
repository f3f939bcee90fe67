"""Prices, scaling laws, costs, and the field's rules of thumb held against the example jobs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cli.plan import make_plan
from phalanx.cli.plan_search import candidate_of
from phalanx.core.errors import PhalanxError
from phalanx.planner.cost import dollars, run_cost
from phalanx.planner.gpus import find_gpu
from phalanx.planner.job_search import model_shape, new_search, run_shape
from phalanx.planner.prices import load_prices
from phalanx.planner.rules import RULES, judge
from phalanx.planner.scaling_law import BESIROGLU_2024, HOFFMANN_2022, SCALING_LAWS, ScalingLaw, law_named
from phalanx.spec import load_job

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
PRICES = load_prices()


def test_every_price_has_a_date_an_origin_and_a_range():
    assert set(PRICES.gpu) >= {"A100", "H100", "H200", "B200"}
    for price in PRICES.gpu.values():
        low, high = price.usd_per_hour
        assert 0 < low <= price.middle <= high and price.origin and price.as_of.startswith("202")


@pytest.mark.parametrize("suffix", ["toml", "json"])
def test_own_file_takes_precedence_kind_by_kind(tmp_path, suffix):
    path = tmp_path / f"prices.{suffix}"
    if suffix == "toml":
        text = '[site]\npue = 1.05\n[gpu.h100]\nusd_per_hour = [2, 2.5]\nwatts = 650\nas_of = "2026"\norigin = "ours"\n'
    else:
        ours = {"usd_per_hour": [2, 2.5], "watts": 650, "as_of": "2026", "origin": "ours"}
        text = json.dumps({"site": {"pue": 1.05}, "gpu": {"h100": ours}})
    path.write_text(text)
    prices = load_prices(path)
    assert prices.of("H100-80").middle == 2.25 and prices.of("A100-40") == PRICES.of("a100")
    assert prices.site.pue == 1.05 and prices.site.host_watts_per_gpu_watt == PRICES.site.host_watts_per_gpu_watt


_H100 = '[gpu.H100]\nusd_per_hour = {}\nwatts = {}\nas_of = "2026"\norigin = "x"\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[gpu.H100\n", "a readable TOML or JSON"),
        ("gpu = 3\n", r"tables \[site\] and \[gpu.KIND\]"),
        ("[site]\npeu = 1.1\n", "site.peu"),
        ("[site]\npue = 0.5\n", "site.pue is 0.5: expected a number from 1 to 100"),
        ("[gpu.H100]\nwatts = 700\n", "gpu.H100: expected usd_per_hour: two numbers from 0"),
        ("[gpu]\nH100 = 3\n", "gpu.H100 is 3: expected a table with usd_per_hour, watts, as_of, origin"),
        ("[site]\npeu = 1.1\n", "site.peu is 1.1: expected only the keys host_watts_per_gpu_watt, pue"),
        ("wat = 1\n", "wat is 1: expected only the keys site, gpu"),
        ('[site]\npue = "1.2"\n', "site.pue is '1.2': expected a number"),
        ("[site]\npue = true\n", "site.pue is True: expected a number"),
        (_H100.format('["2", "3"]', 700), r"gpu.H100.usd_per_hour.0 is '2': expected two numbers"),
        (_H100.format("[2]", 700), r"gpu.H100.usd_per_hour.* expected two numbers"),
        (_H100.format("[1, 2, 3]", 700), "expected two numbers"),
        (_H100.format('"3"', 700), "gpu.H100.usd_per_hour is '3': expected two numbers"),
        (_H100.format("[1, 2]", "nan"), r"gpu.H100.watts is nan: expected a number above 0"),
        (_H100.format("[1, 2]", 700).replace('"2026"', "2026-11-01"), "as_of is .*: expected a date as text"),
        ('[gpu.H100]\nusd_per_hour = 3\nwatts = 7\nas_of = "2026"\norigin = "x"\n', "gpu.H100.usd_per_hour"),
        (_H100.format("[-2, 2]", 700), r"gpu.H100.usd_per_hour.0 is -2"),
        (_H100.format("[5, 2]", 700), "the lowest price first"),
        (_H100.format("[nan, nan]", 700), r"gpu.H100.usd_per_hour.0 is nan"),
        (_H100.format("[1, inf]", 700), r"gpu.H100.usd_per_hour.1 is inf"),
        (_H100.format("[1, 2]", "inf"), r"gpu.H100.watts is inf"),
        ("[site]\npue = inf\n", "site.pue is inf"),
        (_H100.format("[1, 2]", 700).replace("H100", "H1OO"), "gpu is 'H1OO': expected each of A100"),
        (_H100.format("[1, 2]", 700) + _H100.format("[1, 2]", 700).replace("H100", "H100-80"), "once at most"),
        (None, "a readable TOML or JSON"),
    ],
)
def test_price_file_that_is_wrong_is_refused_in_one_line(tmp_path, text, said):
    path = tmp_path / "prices.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(PhalanxError, match=said) as caught:
        load_prices(path)
    told = str(caught.value)
    assert "\n" not in told and not any(word in told for word in ("Input should", "Value error", "Field required"))


def test_kind_without_a_price_names_those_that_have_one():
    with pytest.raises(PhalanxError, match=r"A100, H100.*\[gpu.MI250X\]"):
        PRICES.of("MI250X-64")


def test_hoffmanns_law_gives_the_papers_model():
    # Hoffmann et al. 2022, section 3.3: this approach gives 40 B parameters for Gopher's budget of 5.76e23. Equation 10
    # prints the coefficients rounded, within a percent of the loss.
    assert HOFFMANN_2022.best_split(5.76e23)[0] == pytest.approx(40e9, rel=0.02)
    rounded = ScalingLaw(1.69, 406.4, 0.34, 410.7, 0.28)
    assert HOFFMANN_2022.loss(70e9, 1.4e12) == pytest.approx(rounded.loss(70e9, 1.4e12), rel=0.01)


def test_the_refit_wants_about_twenty_tokens_for_each_parameter():
    # Besiroglu et al. 2024, section 4: their optimum agrees with the ratio of 20 that was used for Chinchilla.
    parameters, tokens = BESIROGLU_2024.best_split(5.76e23)
    assert 15 < tokens / parameters < 30


@given(st.sampled_from(list(SCALING_LAWS.values())), st.floats(1e8, 1e13), st.floats(1e9, 1e14))
def test_tokens_to_a_loss_are_those_that_give_it(law, parameters, tokens):
    assert law.tokens_to(law.loss(parameters, tokens), parameters) == pytest.approx(tokens, rel=1e-3)


@given(st.sampled_from(list(SCALING_LAWS.values())), st.floats(1e19, 1e27), st.floats(0.5, 2))
def test_best_split_spends_the_budget_and_beats_other_splits(law, operations, other):
    parameters, tokens = law.best_split(operations)
    assert 6 * parameters * tokens == pytest.approx(operations)
    assert law.loss(parameters, tokens) <= law.loss(parameters * other, tokens / other) + 1e-9


def test_a_loss_below_the_floor_and_an_unknown_law_are_refused():
    with pytest.raises(PhalanxError, match="take a larger model"):
        HOFFMANN_2022.tokens_to(1.9, 1e9)
    with pytest.raises(PhalanxError, match="one of hoffmann-2022, besiroglu-2024"):
        law_named("chinchilla")


def test_energy_of_gpus_alone_is_that_of_a_published_run(tmp_path):
    # Luccioni et al. 2022, section 4.2: 1,082,990 GPU-hours of A100 at 400 W are 433,196 kWh.
    path = tmp_path / "bare.toml"
    path.write_text("[site]\npue = 1\nhost_watts_per_gpu_watt = 0\n")
    hours = 1_082_990 / 384
    cost = run_cost(hours * 3600, 1.0, 384, "A100-80", load_prices(path))
    assert cost.gpu_hours == pytest.approx(1_082_990) and cost.energy_mwh == pytest.approx(433.196)


def test_cost_grows_with_interruptions_and_keeps_the_training_days():
    calm = run_cost(1e12, 1e6, 1024, "H100-80", PRICES)
    rough = run_cost(1e12, 1e6, 1024, "H100-80", PRICES, ettr=0.8)
    assert rough.training_days == calm.training_days == pytest.approx(1e6 / 86_400)
    assert (
        rough.usd.middle == pytest.approx(calm.usd.middle / 0.8) and rough.usd.low < rough.usd.middle < rough.usd.high
    )


@pytest.mark.parametrize("wrong", [{"tokens": 0}, {"tokens_per_s": -1.0}, {"gpus": 0}, {"ettr": 1.2}, {"load": 0}])
def test_figures_that_cannot_be_are_refused(wrong):
    given = {"tokens": 1e9, "tokens_per_s": 1e6, "gpus": 8, "gpu": "H100", "prices": PRICES, **wrong}
    with pytest.raises(PhalanxError, match=next(iter(wrong))):
        run_cost(**given)


@pytest.mark.parametrize(("usd", "said"), [(5.4, "$5"), (36_300, "$36.3K"), (2.94e6, "$2.94M"), (1.2e9, "$1.2B")])
def test_dollars_are_said_in_their_size(usd, said):
    assert dollars(usd) == said


def judged(number, example, gpu, tokens=None):
    """Rule `number` against an example planned on its GPUs as it stands; tokens: None for the example's."""
    job = load_job(EXAMPLES / f"{example}.toml", [f"cluster.gpu={gpu}"], None, check_world=True)
    plan, kind, run = make_plan(job, job.cluster.world_size), find_gpu(gpu), run_shape(job)
    search = new_search(job, model_shape(job), run, job.cluster.world_size, kind)
    estimate = search.estimate(candidate_of(plan.layout, run))
    return judge(
        RULES[number],
        tokens=tokens or plan.tokens_per_step * job.training.steps,
        flops_per_token=plan.full.model,
        gpus=job.cluster.world_size,
        gpu=gpu,
        peak_tflops=kind.bf16_tflops,
        tokens_per_s=estimate.tokens_per_s,
        prices=PRICES,
        ettr=0.95,
    )


@pytest.mark.parametrize(("number", "example", "gpu"), [(0, "8b-64gpu", "A100-80"), (3, "1t-8192gpu", "H100-80")])
def test_rule_of_thumb_holds_within_a_factor_of_two(number, example, gpu):
    verdict = judged(number, example, gpu)
    assert verdict.possible and verdict.within_two and verdict.said.startswith("within a factor of 2")


@pytest.mark.parametrize(
    ("number", "example", "gpu", "tokens"),
    [(1, "70b-512gpu", "A100-80", None), (2, "405b-4096gpu", "H100-80", 10e12)],
)
def test_rule_of_thumb_beyond_the_peak_is_called_impossible_with_the_own_figure(number, example, gpu, tokens):
    verdict = judged(number, example, gpu, tokens)
    assert not verdict.possible and verdict.days_at_peak > 1.3 * verdict.rule.days[1]
    assert verdict.said.startswith("impossible") and f"{verdict.plan.wall_days:.0f} days" in verdict.said


def test_70b_rule_holds_for_the_tokens_that_two_weeks_allow():
    verdict = judged(1, "70b-512gpu", "A100-80", tokens=200e9)
    assert verdict.possible and verdict.within_two


def test_failures_of_the_rule_are_held_against_measured_rates():
    verdict = judged(2, "405b-4096gpu", "H100-80", 10e12)
    assert verdict.network_failures == pytest.approx(35 * 50 / 54 / 4, rel=0.01)
    assert "8 network failures in 50 days, within a factor of 2 of 2-5" in verdict.said
    assert "62 gpu failures in 50 days, measured rates contradict 5-10" in verdict.said
