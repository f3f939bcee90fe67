"""Reads GPUs again and again: one thread for each exporter, or one for this machine's driver where none is named.

What does not answer is a state of that source, shown and counted; the others go on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from phalanx.monitor.gpus import GpuBoard
from phalanx.monitor.options import Options
from phalanx.monitor.receive.dcgm import ScrapeError, Target, fetch, read, targets_of
from phalanx.monitor.receive.nvml import NoGpu, read_gpus

LOG = logging.getLogger(__name__)
NVML = "nvml"


def scrape(target: Target, deadline_s: float, gpus: GpuBoard) -> None:
    """One scrape of one exporter."""
    source = f"dcgm-exporter {target}"
    try:
        found = read(fetch(target, deadline_s), target.host)
    except ScrapeError as error:
        gpus.put_failure(source, str(error))
        return
    bad = f", {found.num_bad_lines} lines not understood" if found.num_bad_lines else ""
    gpus.put(source, found.gpus, f"{len(found.gpus)} GPUs{bad}", found.num_bad_lines)


def read_driver(gpus: GpuBoard) -> None:
    """One reading of this machine's GPUs."""
    try:
        found = read_gpus()
    except NoGpu as error:
        gpus.put_failure(NVML, str(error), is_failure=False)
        return
    gpus.put(NVML, found, f"{len(found)} GPUs")


@contextmanager
def start_sources(options: Options, gpus: GpuBoard) -> Iterator[None]:
    """All sources, read every `scrape_every_s` until the block is left. Raises PhalanxError for what is no target."""
    stop = threading.Event()
    work: list[Callable[[], None]] = [
        partial(scrape, target, options.scrape_deadline_s, gpus) for target in targets_of(options.dcgm)
    ]
    if not work and options.nvml:
        work.append(partial(read_driver, gpus))
    threads = [
        threading.Thread(target=_repeat, args=(each, options.scrape_every_s, stop), name="gpus", daemon=True)
        for each in work
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(options.scrape_deadline_s + 1)


def _repeat(work: Callable[[], None], every_s: float, stop: threading.Event) -> None:
    while not stop.is_set():
        try:
            work()
        except Exception:
            LOG.exception("reading GPUs failed")
        stop.wait(every_s)
