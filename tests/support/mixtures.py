"""Jobs of two sources, `web` with three parts of the tokens and `code` with one."""

from __future__ import annotations

from pathlib import Path

from support.jobs import PREPARE, run_cli, write_corpus, write_job

SOURCES = """
[data.sources.web]
url = "{web}/train"
weight = 3
[data.sources.code]
url = "{code}/train"
weight = 1
"""


def second_corpus(folder: Path, corpus: str) -> str:
    """URL of another corpus below `folder`, with the tokenizer of `corpus`."""
    url = (folder / "data").as_uri()
    tokenizer = corpus.removeprefix("file://") + "/tokenizer.json"
    text = write_corpus(folder / "text", 40, seed=2)
    finished = run_cli(["data", "prepare", text, "--out", url, "--tokenizer", tokenizer, *PREPARE[2:]])
    assert finished.code == 0, finished.err
    return url


def mixed_job(folder: Path, corpus: str, code: str, *, steps: int = 6, more: str = "") -> Path:
    """As `write_job`, of two sources. more: TOML after it, which begins in the table of `code`."""
    folder.mkdir(exist_ok=True)
    path = write_job(folder, corpus, steps=steps)
    lines = [line for line in path.read_text().splitlines() if not line.startswith("train = ")]
    path.write_text("\n".join(lines) + "\n" + SOURCES.format(web=corpus, code=code) + more)
    return path
