"""What the page shows of runs that have more to tell: experts, the job's own metrics, float16's overflows."""

from __future__ import annotations

import math

import numpy as np
import pytest
from looking import short_run, wait_step

from phalanx.api.agent.v1 import record_pb2 as record_pb
from phalanx.core.expert_load import ExpertLoad
from phalanx.monitor.testing import started

NUM_LAYERS, NUM_EXPERTS, NUM_STEPS = 60, 256, 40
CHARTS = ("experts", "idle", "balance", "scale", "heat")
PIXEL = """([layer, expert]) => {
  const { canvas } = phalanx.further.heat;
  return [canvas.width, canvas.height, ...canvas.getContext("2d").getImageData(expert, layer, 1, 1).data];
}"""


def counts() -> np.ndarray:
    """Even but for one expert with 4 times the mean and one without a token, both of layer 7."""
    found = np.full((NUM_LAYERS, NUM_EXPERTS), 100)
    found[7, 200], found[7, 30] = 400, 0
    return found


def steps_with_experts(told, first, last):
    for step in range(first, last + 1):
        yield told.progress(step, 3.0, experts=ExpertLoad(4.0 - step / 20, 1.5, 0.125, 0.02))


@pytest.fixture(scope="module")
def mixture(monitor):
    told = monitor.new_job("mixture", 100)
    monitor.tell([*started(told, 2), *steps_with_experts(told, 1, NUM_STEPS), told.heat(NUM_STEPS, counts())])
    monitor.wait_step(told, NUM_STEPS)
    return told


@pytest.fixture
def page(monitor, mixture, open_page):
    page = open_page(f"{monitor.url}#{mixture.job}")
    wait_step(page, NUM_STEPS)
    page.wait_for_selector("#heat:not([hidden])")
    return page


def points_drawn(page, name):
    """Points of each line of a chart, freshly drawn."""
    return page.evaluate(
        "(name) => { const { chart } = phalanx.further.sometimes.find(({ section }) => section.id === name);"
        " chart.draw(); return chart.kept.layers.map((layer) => layer.points.length); }",
        name,
    )


def test_page_of_a_mixture_draws_the_busiest_expert_and_the_mean_of_layers(page):
    assert [page.locator(f"#{name}").is_visible() for name in CHARTS] == [True, True, True, False, True]
    assert points_drawn(page, "experts") == [NUM_STEPS, NUM_STEPS], "two lines"
    assert page.inner_text("#experts output") == "2"
    assert page.inner_text("#balance output") == "0.02" and page.inner_text("#idle output") == "0.125"


def test_page_of_a_mixture_shows_every_expert_of_every_layer(page):
    wide, high, *even = page.evaluate(PIXEL, [0, 0])
    assert (wide, high) == (NUM_EXPERTS, NUM_LAYERS)
    busy, idle = (page.evaluate(PIXEL, [7, expert])[2:] for expert in (200, 30))
    assert sum(busy[:3]) > sum(even[:3]) > sum(idle[:3]), "bright is more, dark is less"
    assert page.evaluate(PIXEL, [8, 200])[2:] == even
    said = page.inner_text("#heat output")
    assert said.startswith("step 40: busiest layer 7, expert 200 ") and said.endswith(", 1 of 15360 idle")
    assert "busiest layer 7, expert 200" in page.get_attribute("#heat canvas", "aria-label")


def test_page_under_a_pointer_names_the_expert_and_its_load(page):
    page.locator("#heat canvas").scroll_into_view_if_needed()
    box = page.locator("#heat canvas").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 30.5 / NUM_EXPERTS, box["y"] + box["height"] * 7.5 / NUM_LAYERS)
    page.wait_for_function("document.querySelector('#heat output').textContent === 'layer 7, expert 30 0.00 x mean'")
    page.mouse.move(box["x"], box["y"] - 200)
    page.wait_for_function("document.querySelector('#heat output').textContent.startsWith('step 40')")


def test_page_of_a_mixture_with_dense_layers_leaves_these_blank(monitor, open_page):
    told = monitor.new_job("dense", 100)
    monitor.tell([*started(told, 2), *steps_with_experts(told, 1, 3), told.heat(3, np.array([[0, 0], [0, 2], [1, 1]]))])
    page = open_page(f"{monitor.url}#{told.job}")
    page.wait_for_function("document.querySelector('#heat output').textContent.startsWith('step 3:')")
    assert page.inner_text("#heat output") == "step 3: busiest layer 1, expert 1 2.00 x mean, 1 of 4 idle"
    assert [page.evaluate(PIXEL, [layer, 0])[-1] for layer in range(3)] == [0, 255, 255]
    assert page.evaluate("phalanx.further.heat.name(0)") == "layer 0 has no experts"


def test_page_takes_a_new_picture_as_it_comes(monitor, open_page):
    told = monitor.new_job("pictures", 100)
    monitor.tell([*started(told, 2), *steps_with_experts(told, 1, 3), told.heat(1, np.array([[1, 3], [2, 2]]))])
    page = open_page(f"{monitor.url}#{told.job}")
    page.wait_for_function("document.querySelector('#heat output').textContent.startsWith('step 1:')")
    monitor.tell([*steps_with_experts(told, 4, 5), told.heat(5, np.array([[3, 1], [2, 2]]))])
    said = "step 5: busiest layer 0, expert 0 1.48 x mean, 0 of 4 idle"
    page.wait_for_function("(said) => document.querySelector('#heat output').textContent === said", arg=said)


def test_page_of_own_metrics_has_a_chart_of_each_with_gaps(monitor, mixture, open_page):
    told = monitor.new_job("metrics", 100)
    monitor.tell(short_run(told, [3.0] * 30))
    for step in (10, 20, 30):
        metrics = {"accuracy": step / 40, "odd": math.nan if step == 20 else 1.0, "<b>": 1.0}
        monitor.tell([told.record(evaluation=record_pb.Evaluation(step=step, loss=2.0, metrics=metrics))])
    page = open_page(f"{monitor.url}#{told.job}")
    wait_step(page, 30)
    page.wait_for_function(
        "globalThis.phalanx.run.evaluations.size === 3 && document.querySelectorAll('.metric').length === 3"
    )
    assert page.locator(".metric h2").all_text_contents() == ["<b>", "accuracy", "odd"]
    page.wait_for_function("document.querySelectorAll('.metric output')[1].textContent === '0.75'")
    accuracy, odd = (f"phalanx.further.metrics.get('{name}')" for name in ("accuracy", "odd"))
    assert page.evaluate(f"Array.from({accuracy}.series.step.subarray(0, 3))") == [10, 20, 30]
    assert page.evaluate(f"{accuracy}.bounds") == [1, 30], "the steps of the whole run, as all charts have them"
    assert page.evaluate(f"{odd}.draw() ?? {odd}.kept.layers[0].points.map(({{ gap }}) => gap)") == [True, True]
    assert not page.locator("#heat").is_visible() and not page.locator("#experts").is_visible()
    page.evaluate("(job) => { location.hash = job; }", mixture.job)
    wait_step(page, NUM_STEPS)
    assert page.locator(".metric").count() == 0, "those of the other run"
    assert page.evaluate("phalanx.span.charts.length") == 9


def test_page_of_many_own_metrics_shows_no_more_than_sixteen(monitor, open_page):
    told = monitor.new_job("manymetrics", 100)
    monitor.tell(short_run(told, [3.0] * 5))
    metrics = {f"m{number:02}": 1.0 for number in range(40)}
    monitor.tell([told.record(evaluation=record_pb.Evaluation(step=5, loss=2.0, metrics=metrics))])
    page = open_page(f"{monitor.url}#{told.job}")
    page.wait_for_function("document.querySelectorAll('.metric').length === 16")


def test_page_of_overflows_shows_the_scale_and_no_incident(monitor, open_page):
    told = monitor.new_job("overflows", 100)
    overflows = [
        told.record(overflow=record_pb.Overflow(step=step, loss=3.0, loss_scale=2.0 ** (17 - step)))
        for step in range(1, 5)
    ]
    monitor.tell(
        [*started(told, 2), *overflows, *(told.progress(step, 2.9, loss_scale=8192.0) for step in range(5, 21))]
    )
    page = open_page(f"{monitor.url}#{told.job}")
    wait_step(page, 20)
    assert page.locator("#scale").is_visible() and page.inner_text("#scale output") == "8192"
    assert page.evaluate("Array.from(phalanx.run.series.columns.loss_scale.subarray(0, 5))") == [
        65536, 32768, 16384, 8192, 8192,
    ]  # fmt: skip
    assert page.inner_text("#tile-incidents") == "0"
    assert page.inner_text("#overflows") == "4 updates left out"
