"""A browser, a monitor that the tests of a session share, and pages of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator

import pytest
from page_kit import Monitor, exporter, running_monitor
from playwright.sync_api import Browser, Page, sync_playwright

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
VIEWPORT = {"width": 1400, "height": 1300}


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Chromium without a window; skips where there is none."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no chromium on this machine (Debian: apt-get install chromium)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, headless=True, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def monitor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Monitor]:
    """One for all tests that kill nothing; each tells of a job of its own."""
    with exporter() as dcgm, running_monitor(tmp_path_factory.mktemp("monitor"), dcgm=dcgm) as running:
        yield running


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens an address in a window of its own; fails at the end on what its scripts raised."""
    contexts, errors = [], []

    def opened(url: str, **options: object) -> Page:
        context = browser.new_context(**{"bypass_csp": True, "viewport": VIEWPORT, **options})  # type: ignore[arg-type]
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(45_000)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(url)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not errors, errors
