"""A corpus prepared once through the command line, and one fork server for all runs in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.jobs import run_cli, user_model_path, write_corpus

from phalanx.gang import ForkServer
from phalanx.trainer.local import PRELOAD

PREPARE = ("--vocab-size", "300", "--held-out-fraction", "0.1", "--shard-tokens", "4096")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """URL of a prepared corpus of about 14,000 tokens to train on, in 4 shards, with a held-out split beside it."""
    folder = tmp_path_factory.mktemp("corpus")
    url = (folder / "data").as_uri()
    finished = run_cli(["data", "prepare", write_corpus(folder / "text"), "--out", url, *PREPARE])
    assert finished.code == 0, finished.err
    return url


@pytest.fixture(scope="session")
def server() -> Iterator[ForkServer]:
    """Ranks of it find the models beside the tests."""
    with user_model_path() as environ, ForkServer(PRELOAD, environ) as forks:
        yield forks
