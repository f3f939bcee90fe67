"""The monitor's own settings, `[options]` of its configuration file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Options:
    """page: host:port of the page, "" for none; page_password: file with its password, needed beyond loopback.

    dcgm: addresses of dcgm-exporters, host[:port] separated by commas. scrape_every_s, scrape_deadline_s: of each of
    them, and of the machine's own GPUs, which are read (`nvml`) where no exporter is named.
    webhook: file with the URL to which incidents are posted.
    max_runs: whose measurements are kept. save_every_s: how often they are written to the database.
    """

    page: str = ""
    page_password: Path | None = None
    dcgm: str = ""
    nvml: bool = True
    scrape_every_s: float = 10.0
    scrape_deadline_s: float = 3.0
    webhook: Path | None = None
    max_runs: int = 1000
    save_every_s: float = 0.5
