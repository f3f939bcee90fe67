"""What the page shows of checkpoints: the newest one, what saving costs, and the lineage as a picture."""

from __future__ import annotations

import itertools
import re

import pytest
from looking import losses, short_run, wait_step

from phalanx.monitor.testing import started

DASH = "\u2013"
NUM_ATTEMPTS, STEPS_AN_ATTEMPT = 200, 5


def text(page, name):
    return page.inner_text(f"#{name}").replace("\u00a0", " ")


def marks(page, of=""):
    """The titles of the checkpoints in the lineage, from left to right in each line."""
    return page.locator(f"#lineage .saved{of} title").all_text_contents()


@pytest.fixture(scope="module")
def saving(monitor):
    """Attempt 1 saves 10, 20 (damaged) and 30 (pinned); attempt 2 goes on from 10 and saves 40."""
    told = monitor.new_job("saving", 50)
    monitor.tell(short_run(told, [3.0] * 35))
    for step in (10, 20, 30):
        monitor.tell(told.saved(step, 0.5))
    monitor.tell([*started(told, 2, attempt=2, start_step=10), *losses(told, [2.0] * 35, 11)])
    monitor.tell(told.saved(30, None, num_skipped=1))
    monitor.tell(told.saved(40, 0.25, num_skipped=1))
    put = monitor.checkpoints.put
    put(told.job, 1, 10, num_bytes=1 << 30, pinned=True)
    put(told.job, 1, 20, "damaged", num_bytes=1 << 30)
    put(told.job, 1, 30, "dead", num_bytes=1 << 30, pinned=True)
    put(told.job, 2, 40, num_bytes=3 << 29)
    monitor.wait_step(told, 45)
    return told


@pytest.fixture
def page(monitor, saving, open_page):
    page = open_page(f"{monitor.url}#{saving.job}")
    wait_step(page, 45)
    page.wait_for_function("document.querySelector('#lineage .damaged') !== null")
    return page


def test_page_of_a_run_that_saves_shows_the_newest_checkpoint_and_its_cost(page):
    page.wait_for_function("document.getElementById('more-saved').textContent.includes('GiB')")
    assert text(page, "tile-saved") == "step 40"
    assert re.fullmatch(r"\d+ (s|min) ago, 1.5 GiB", text(page, "more-saved"))
    assert "5 steps behind, attempt 2" in page.get_attribute("#more-saved", "title")
    assert (text(page, "tile-stall"), text(page, "more-stall")) == ("250 ms", "1 skipped")


def test_page_open_lets_the_newest_checkpoint_grow_older_by_itself(page):
    before = text(page, "more-saved")
    page.evaluate("phalanx.run.pause()")
    page.wait_for_function("(before) => document.getElementById('more-saved').textContent !== before", arg=before)


def test_page_of_a_new_commit_shows_it(monitor, open_page):
    told = monitor.new_job("commits", 50)
    monitor.tell([*short_run(told, [3.0] * 20), *told.saved(20, 0.125)])
    page = open_page(f"{monitor.url}#{told.job}")
    page.wait_for_function("document.getElementById('tile-saved').textContent === 'step 20'")
    monitor.tell([*losses(told, [3.0] * 5, 21), *told.saved(25, 0.0625)])
    page.wait_for_function("document.getElementById('tile-saved').textContent === 'step 25'")
    assert text(page, "tile-stall") == "63 ms" and text(page, "more-stall") == "none skipped"


def test_page_of_a_run_without_a_save_shows_none(monitor, open_page):
    told = monitor.new_job("unsaved", 50)
    monitor.tell(short_run(told, [3.0] * 5))
    page = open_page(f"{monitor.url}#{told.job}")
    wait_step(page, 5)
    assert [text(page, f"{kind}-{name}") for name in ("saved", "stall") for kind in ("tile", "more")] == [DASH, ""] * 2


def test_lineage_tells_live_abandoned_damaged_and_pinned_checkpoints_apart(page):
    assert marks(page) == [
        "checkpoint of step 10: live, pinned",
        "checkpoint of step 20: damaged",
        "checkpoint of step 30: abandoned, pinned",
        "checkpoint of step 40: live",
    ]
    assert page.locator("#lineage circle.live").count() == 2
    assert page.locator("#lineage circle.dead").count() == 1
    assert page.locator("#lineage path.damaged").count() == 1
    assert page.locator("#lineage rect.pinned").count() == 2
    assert page.locator("#lineage path.parent").count() == 1
    legend = page.inner_text("#lineage-legend")
    assert legend.split() == ["live", "abandoned", "damaged", "pinned", "parent"]


def test_lineage_for_a_screen_reader_says_the_same(page):
    assert page.get_attribute("#lineage", "aria-label") == (
        "attempt 2 from step 10 of attempt 1 to step 45, 1 checkpoints; "
        "attempt 1 from the beginning to step 35, 3 checkpoints, damaged 20, pinned 10, 30"
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_lineage_in_each_scheme_draws_every_kind_in_a_colour_of_its_own(monitor, saving, open_page, scheme):
    page = open_page(f"{monitor.url}#{saving.job}", color_scheme=scheme)
    page.wait_for_function("document.querySelector('#lineage .damaged') !== null")
    strokes = page.evaluate(
        "['circle.live', 'circle.dead', 'path.damaged', 'rect.pinned', 'path.parent'].map((each) =>"
        " getComputedStyle(document.querySelector(`#lineage ${each}`)).stroke)"
    )
    assert len(set(strokes)) == 5, strokes
    assert page.evaluate("getComputedStyle(document.querySelector('#lineage circle.dead')).fill") == page.evaluate(
        "getComputedStyle(document.querySelector('#lineage').closest('section')).backgroundColor"
    )


def test_lineage_of_many_attempts_stays_small_and_keeps_the_newest_apart(monitor, open_page):
    """200 attempts, every third of which loses what it did: old ones share a line."""
    told = monitor.new_job("many", NUM_ATTEMPTS * STEPS_AN_ATTEMPT)
    monitor.tell([told.event("submitted", "queued", actor="somebody")])
    step = 0
    for attempt in range(1, NUM_ATTEMPTS + 1):
        monitor.tell(started(told, 1, attempt=attempt, start_step=step))
        monitor.tell(losses(told, [2.0], step + STEPS_AN_ATTEMPT))
        if attempt % 3:
            step += STEPS_AN_ATTEMPT
            monitor.tell(told.saved(step))
    monitor.wait_step(told, step)
    page = open_page(f"{monitor.url}#{told.job}")
    page.wait_for_function(f"globalThis.phalanx?.run?.attempts.length === {NUM_ATTEMPTS}")
    page.wait_for_function("document.querySelectorAll('#lineage .name').length > 0")
    names = page.locator("#lineage .name").all_text_contents()
    assert len(names) == 24 and f"attempts 1{DASH}177" in names and "attempt 200" in names
    assert page.locator("#lineage *").count() < 400
    label = page.get_attribute("#lineage", "aria-label")
    assert label.startswith("attempt 200 from step") and len(label) < 4000
    assert f"attempts 1{DASH}177 from the beginning" in label and "118 of them live" in label
    boxes = [box.bounding_box() for box in page.locator("#lineage .name").all()]
    tops = sorted(box["y"] for box in boxes)
    assert min(after - before for before, after in itertools.pairwise(tops)) > 10, "names don't overlap"
    newest = next(box for box, name in zip(boxes, names, strict=True) if name == "attempt 200")
    assert newest["y"] == tops[0], "the newest is on top"
