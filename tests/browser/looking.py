"""What a test sees of a chart: where it has which ink, and how a hand reaches a step of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from playwright.sync_api import Browser, Page

from phalanx.monitor.testing import Told, started

LOSS, SPEED, NORM, TIME, RATE = range(5)
_INK = """([index, name, from, to]) => {
  const chart = phalanx.charts[index], { canvas } = chart;
  chart.draw();
  const colour = getComputedStyle(canvas).getPropertyValue(name).trim();
  const wanted = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  const left = Math.round(chart.xOf(from)), width = Math.max(1, Math.round(chart.xOf(to)) - left);
  const { data } = canvas.getContext("2d").getImageData(left, 0, width, canvas.height);
  let count = 0, top = canvas.height, bottom = 0;
  for (let i = 0; i < data.length; i += 4) {
    if (data[i + 3] < 128 || wanted.some((each, j) => Math.abs(each - data[i + j]) > 40)) continue;
    const y = Math.floor(i / 4 / width);
    count += 1;
    top = Math.min(top, y);
    bottom = Math.max(bottom, y);
  }
  return [count, top, bottom];
}"""


@dataclass(frozen=True, slots=True)
class Ink:
    """Pixels of one colour. top, bottom: their rows, from the upper edge."""

    count: int
    top: int
    bottom: int


def ink(page: Page, name: str, from_step: float, to_step: float, chart: int = LOSS) -> Ink:
    """Pixels of the colour of that name between two steps, freshly drawn."""
    return Ink(*page.evaluate(_INK, [chart, name, from_step, to_step]))


def place(page: Page, step: float, chart: int = LOSS) -> tuple[float, float]:
    """Where on the page a step is, at half height."""
    left, top = page.evaluate(
        "([i, step]) => { const { canvas } = phalanx.charts[i]; canvas.scrollIntoView({ block: 'center' });"
        " const box = canvas.getBoundingClientRect();"
        " return [box.left + phalanx.charts[i].xOf(step), box.top + box.height / 2]; }",
        [chart, step],
    )
    return left, top


def drag(page: Page, from_step: float, to_step: float, chart: int = LOSS) -> None:
    """Draws the pointer over a chart."""
    page.mouse.move(*place(page, from_step, chart))
    page.mouse.down()
    page.mouse.move(*place(page, to_step, chart), steps=5)
    page.mouse.up()


def wait_step(page: Page, step: int) -> None:
    """Until the page has a step, and has drawn it."""
    page.wait_for_function(
        "(step) => { const run = globalThis.phalanx?.run; return run?.series.last('step') === step && !run.frame"
        " && phalanx.charts[0].series === run.series && phalanx.charts[0].drawn && !phalanx.charts[0].frame; }",
        arg=step,
    )


def steps_of(page: Page) -> list[int]:
    """The steps that the page holds."""
    return page.evaluate("Array.from(phalanx.run.series.step.subarray(0, phalanx.run.series.length))")


def browser_cpu_s(browser: Browser) -> dict[int, float]:
    """Processor time that each process of the browser has used until now, in seconds by its pid."""
    session = browser.new_browser_cdp_session()
    try:
        found = session.send("SystemInfo.getProcessInfo")["processInfo"]
    finally:
        session.detach()
    return {int(process["id"]): float(process["cpuTime"]) for process in found}


def used_since_s(browser: Browser, before: dict[int, float]) -> float:
    """Processor time that the browser has used since `before`, by the processes that it has now, in seconds."""
    return sum(used_s - before.get(pid, 0.0) for pid, used_s in browser_cpu_s(browser).items())


def losses(told: Told, values: Iterable[float | None], first: int = 1) -> Iterator[Any]:
    """Steps of these losses, told by rank 0 alone; None is not a number."""
    for step, loss in enumerate(values, first):
        yield told.progress(step, loss, norm=None if loss is None else 1.0)


def short_run(told: Told, values: Iterable[float | None], world_size: int = 2) -> Iterator[Any]:
    """An attempt that has done steps of these losses."""
    yield told.event("submitted", "queued", actor="somebody")
    yield from started(told, world_size)
    yield from losses(told, values)
