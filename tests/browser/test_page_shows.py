"""What the page shows of a run: figures, tables, lineage, what happens now, and what nobody has to look at."""

from __future__ import annotations

import re
import urllib.error
import urllib.request

import pytest
from looking import losses, short_run, wait_step
from page_kit import running_monitor

from phalanx.api.agent.v1 import record_pb2 as record_pb
from phalanx.monitor.testing import run_with_recovery, started, steps

DASH = "\u2013"
HOSTILE = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"

# Of each colour to that of the cards, as WCAG 2.2 defines it.
CONTRAST = """(names) => {
  const style = getComputedStyle(document.documentElement);
  const linear = (part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  const light = (name) => {
    const digits = style.getPropertyValue(name).trim().slice(1), size = digits.length / 3;
    const [r, g, b] = [0, 1, 2].map((i) => digits.slice(i * size, (i + 1) * size).padEnd(2, digits[i]));
    const parts = [r, g, b].map((each) => linear(parseInt(each, 16) / 255));
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  };
  const card = light("--card") + 0.05;
  return names.map((name) => { const own = light(name) + 0.05; return Math.max(own, card) / Math.min(own, card); });
}"""


@pytest.fixture(scope="module")
def recovered(monitor):
    """A run of 500 steps that lost a node at 300, told to its end."""
    told = monitor.new_job("recovered")
    monitor.tell(run_with_recovery(told.job, 500, told))
    monitor.wait_step(told, 500)
    return told


@pytest.fixture
def page(monitor, recovered, open_page):
    page = open_page(f"{monitor.url}#{recovered.job}")
    wait_step(page, 500)
    return page


def table(page, name):
    """The rows of a table, each as the texts of its cells."""
    return [row.locator("td").all_inner_texts() for row in page.locator(f"#{name} tbody tr").all()]


def test_page_of_a_run_shows_state_progress_and_figures(page):
    page.wait_for_function("document.getElementById('steps').textContent.includes('of 500')")
    assert page.inner_text("#state") == "running"
    assert page.inner_text("#steps").replace("\u00a0", " ") == "step 500 of 500 · 100 %"
    assert page.evaluate("document.getElementById('progress').value") == 1
    assert 1.9 < float(page.inner_text("#tile-loss")) < 2.4
    assert 2.0 < float(page.inner_text("#tile-evaluation")) < 2.5
    assert page.inner_text("#more-evaluation") == "at step 500"
    assert page.inner_text("#tile-speed").split() == ["131", "k"]
    assert page.inner_text("#tile-step-time").split() == ["500", "ms"]
    split = page.inner_text("#more-step-time").replace("\u00a0", " ")
    assert split == "84 % computing, 10 % communication, 2.0 % data"
    told = page.get_attribute("#more-step-time", "title").replace("\u00a0", " ")
    assert told.startswith("2.0 % data, 28 % forward, 52 % backward, 10 % communication, 4.0 % optimizer")
    assert page.inner_text("#tile-saved") == "step 500"
    assert page.inner_text("#tile-attempt") == "2"
    assert int(page.inner_text("#tile-incidents")) >= 2
    assert page.title() == f"running 500/500 {DASH} Phalanx"


def test_page_of_a_run_shows_events_newest_first(page):
    items = page.locator("#events li").all_inner_texts()
    assert "committed" in items[0] and "attempt 2, step 500" in items[0]
    assert any("recovering" in item and "node loss: node-b is not heard" in item for item in items)
    assert "by somebody" in items[-1]
    assert len(items) == page.evaluate("phalanx.run.events.length")


def test_page_of_a_run_shows_incidents_with_who_and_what(page):
    rows = table(page, "incidents")
    assert any(row[:4] == ["301", "node loss", "node-b", "node-b is not heard"] for row in rows)
    assert any(row[1] == "not a number" for row in rows)
    page.locator("#incidents button").first.click()
    low, high = page.evaluate("phalanx.span.range")
    assert high - low == 100


def test_page_of_ranks_shows_each_live_and_the_bad_ones_first(monitor, open_page):
    told = monitor.new_job("ranks")
    monitor.tell([*started(told, 4), *steps(told, 1, 40, slow=3.0)])
    page = open_page(f"{monitor.url}#{told.job}")
    wait_step(page, 40)
    page.wait_for_function("document.querySelector('#ranks tr.bad') !== null")
    rows = table(page, "ranks")
    assert [row[0] for row in rows] == ["3", "0", "1", "2"]
    assert [row[1] for row in rows] == ["node-b", "node-a", "node-a", "node-b"]
    assert "median rank" in rows[0][-1]
    assert [cell.replace("\u00a0", " ") for cell in rows[1][6:9]] == ["84 %", "10 %", "6.0 %"]
    monitor.tell([told.phase("save", 41, 2)])
    page.wait_for_function(
        "document.querySelectorAll('#ranks tbody tr')[3].cells[2].textContent === 'save'", timeout=2000
    )
    monitor.tell([told.record(1, ended=record_pb.Ended(signal=9))])
    page.wait_for_function(
        "[...document.querySelectorAll('#ranks tr.bad')].some((row) => row.textContent.includes('signal 9'))"
    )


def test_page_shows_gpus_of_an_exporter(page):
    page.wait_for_function("document.querySelectorAll('#gpus tbody tr').length === 2")
    first = [" ".join(cell.split()) for cell in table(page, "gpus")[0]]
    assert first[:9] == [
        "node-a",
        "0",
        "NVIDIA H100 80GB HBM3",
        "97 %",
        "60 GiB of 80 GiB",
        "61 °C",
        "612 W",
        "1980 MHz",
        "none",
    ]
    assert "2 GPUs" in page.inner_text("#gpu-sources")


def test_page_shows_lineage_with_checkpoints_and_what_was_abandoned(page):
    titles = page.locator("#lineage .saved title").all_text_contents()
    assert sorted(titles) == [f"checkpoint of step {step}: live" for step in (100, 200, 300, 400, 500)]
    assert page.locator("#lineage .parent").count() == 1
    assert page.locator("#lineage line.dead").count() == 1, "step 301 was done again"
    label = page.get_attribute("#lineage", "aria-label")
    assert "attempt 2 from step 300 of attempt 1 to step 500, 2 checkpoints" in label


def test_page_of_a_recovery_says_what_happens_and_why(monitor, open_page):
    told = monitor.new_job("dying")
    monitor.tell(short_run(told, [3.0] * 20))
    page = open_page(f"{monitor.url}#{told.job}")
    wait_step(page, 20)
    assert page.locator("#now").is_hidden()
    cause = record_pb.Cause(
        kind=record_pb.CAUSE_KIND_PROCESS_DEATH, rank=1, message="killed by SIGKILL", node_id="node-b"
    )
    monitor.tell(
        [told.event("recovering", "recovering", attempt=1, step=20, cause=cause, message="attempt 2 from step 0")]
    )
    page.wait_for_selector("#now:not([hidden])")
    said = page.inner_text("#now")
    assert "process death, rank 1 on node-b at step 20: killed by SIGKILL → attempt 2 from step 0" in said
    assert page.inner_text("#state") == "recovering"
    assert page.inner_text("#tile-left") == DASH
    monitor.tell(started(told, 2, attempt=2))
    page.wait_for_selector(".state.running")
    assert page.locator("#now").is_hidden()


def test_page_of_hostile_texts_shows_them_as_text(monitor, open_page):
    told = monitor.new_job("hostile")
    cause = record_pb.Cause(kind=record_pb.CAUSE_KIND_ERROR, rank=0, message=HOSTILE, node_id=HOSTILE)
    monitor.tell(
        [*short_run(told, [3.0] * 5), told.event("failed", "failed", step=3, attempt=1, cause=cause, message=HOSTILE)]
    )
    page = open_page(f"{monitor.url}#{told.job}")
    page.wait_for_selector("#now.failed:not([hidden])")
    assert HOSTILE in page.inner_text("#now")
    assert HOSTILE in page.inner_text("#events") and HOSTILE in page.inner_text("#incidents")
    assert page.locator("main img, main script, p img, p script").count() == 0
    assert "taken" not in page.title()


def test_page_keeps_its_policy_and_asks_nobody_else(monitor, recovered, open_page):
    page = open_page("about:blank", bypass_csp=False)
    said, asked = [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{monitor.url}#{recovered.job}")
    page.wait_for_selector(".state.running")
    page.wait_for_selector("#gpus tbody tr")
    page.hover("#loss canvas")
    page.wait_for_selector("#loss output:has-text('step')")
    assert said == []
    assert len(asked) > 10 and all(url.startswith(monitor.url) for url in asked)


def test_page_for_a_screen_reader_names_what_it_shows(page):
    unnamed = page.evaluate(
        "[...document.querySelectorAll('canvas, svg, select, input, progress, button, [role=region]')].filter((each) =>"
        " !each.getAttribute('aria-label') && !each.closest('label') && !each.textContent.trim())"
        ".map((each) => each.outerHTML)"
    )
    assert unnamed == []
    assert page.locator("th:not([scope=col])").count() == 0 and page.locator("th").count() > 20
    assert page.locator("th", has_text=re.compile(r"^$")).count() == 0
    assert page.locator("#link[aria-live], #now[aria-live]").count() == 2


def test_page_with_a_keyboard_reads_zooms_and_resets(page):
    page.focus("#loss canvas")
    page.keyboard.press("ArrowLeft")
    page.wait_for_function("/^step 49\\d: /.test(document.querySelector('#loss output').textContent)")
    page.keyboard.press("+")
    assert page.evaluate("phalanx.span.range[0]") > 200
    page.keyboard.press("Escape")
    assert page.evaluate("phalanx.span.range") is None


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_in_each_scheme_has_text_of_enough_contrast(monitor, recovered, open_page, scheme):
    page = open_page(f"{monitor.url}#{recovered.job}", color_scheme=scheme)
    wait_step(page, 500)
    names = ["--ink", "--quiet", "--train", "--incident", "--held-out", "--warn"]
    ratios = dict(zip(names, page.evaluate(CONTRAST, names), strict=True))
    assert min(ratios.values()) >= 4.2, ratios
    assert min(ratios["--ink"], ratios["--quiet"]) >= 4.5, ratios


def test_page_in_the_dark_looks_otherwise(monitor, recovered, open_page):
    pictures, grounds = [], []
    for scheme in ("light", "dark"):
        page = open_page(f"{monitor.url}#{recovered.job}", color_scheme=scheme)
        wait_step(page, 500)
        pictures.append(page.screenshot())
        grounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert pictures[0] != pictures[1]
    assert grounds == ["rgb(243, 244, 247)", "rgb(16, 19, 25)"]


def test_page_beyond_loopback_asks_a_password_and_tells_how_to_begin(tmp_path, open_page):
    (tmp_path / "password").write_text("sesame\n")
    with running_monitor(tmp_path, page="0.0.0.0:0", page_password=str(tmp_path / "password")) as monitor:
        port = re.search(r"page at 0\.0\.0\.0:(\d+)", monitor.log())[1]
        url = f"http://127.0.0.1:{port}/"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(url, timeout=10)
        page = open_page(url, http_credentials={"username": "any", "password": "sesame"})
        page.wait_for_selector("#empty:not([hidden])")
        assert "phalanx job submit" in page.inner_text("#empty")
        assert page.locator("main").is_hidden()
        told = monitor.new_job("first")
        monitor.tell(short_run(told, [3.0, 2.0, 1.0]))
        wait_step(page, 3)
        assert page.locator("#empty").is_hidden() and page.locator("main").is_visible()
        assert page.evaluate("location.hash") == f"#{told.job}"


def test_page_of_a_run_that_nobody_heard_of_waits_for_it(monitor, recovered, open_page):
    page = open_page(f"{monitor.url}#projects/default/jobs/later")
    page.wait_for_selector("#now:not([hidden])")
    assert "projects/default/jobs/later" in page.inner_text("#now")
    told = monitor.new_job("later")
    monitor.tell([*short_run(told, [4.0]), *losses(told, [3.0], 2)])
    wait_step(page, 2)
    assert page.locator("#runs").input_value() == told.job
