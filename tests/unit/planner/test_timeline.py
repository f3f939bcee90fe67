"""Pictures of a simulated pipeline step."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from phalanx.planner.pipeline import StageCosts, simulate
from phalanx.planner.timeline import seconds, svg, terminal

SVG = "{http://www.w3.org/2000/svg}"


def a_run(schedule="1f1b", pp=4, per_rank=1, micro_batches=8):
    return simulate(schedule, pp, per_rank, micro_batches, StageCosts.even(pp * per_rank, 0.1, 0.1, 0.1))


def test_terminal_shows_each_rank_and_its_gaps():
    lines = terminal(a_run(), width=66 + 2).splitlines()
    assert lines[0].startswith("1f1b: 4 pipeline ranks, 8 micro-batches, 3.3 s, 27.3% bubble")
    assert lines[2].startswith("0 00112233..") and lines[5].startswith("3 ......00aaaa11bbbb")
    assert sum(line.count(".") for line in lines[2:]) == round(0.2727 * 4 * 66)


@pytest.mark.parametrize("width", [10, 30, 60, 200])
@pytest.mark.parametrize("schedule", ["gpipe", "zbv"])
def test_terminal_keeps_to_its_width(width, schedule):
    drawn = terminal(a_run(schedule, per_rank=2 if schedule == "zbv" else 1), width=width)
    assert all(len(line) <= width for line in drawn.splitlines())
    assert ("W" in drawn.replace("W weights", "")) == (schedule == "zbv" and width > 24)


def test_svg_has_a_box_for_each_action_inside_the_picture():
    drawn = ElementTree.fromstring(svg(a_run("dualpipev", per_rank=2), width=900))
    boxes = [each for each in drawn.iter(f"{SVG}rect") if each.find(f"{SVG}title") is not None]
    assert len(boxes) == sum(len(rank.intervals) for rank in a_run("dualpipev", per_rank=2).ranks)
    for box in boxes:
        assert float(box.get("x")) >= 0 and float(box.get("x")) + float(box.get("width")) <= 900
    titles = {box.find(f"{SVG}title").text for box in boxes}
    assert "forward, stage 7, micro-batch 0" in titles


def test_svg_of_a_very_long_step_draws_neighbours_as_one():
    drawn = svg(a_run("gpipe", pp=4, micro_batches=1000))
    assert len(drawn) < 20_000 and "1000 x forward, stage 3" in drawn
    ElementTree.fromstring(drawn)


@pytest.mark.parametrize(("value", "said"), [(12.34, "12.3 s"), (0.0456, "45.6 ms"), (7.8e-5, "78 us")])
def test_durations_are_said_in_their_unit(value, said):
    assert seconds(value) == said
