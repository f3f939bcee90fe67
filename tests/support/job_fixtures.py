"""A corpus prepared once through the command line, and one fork server for all runs in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.gang import ForkServer
from phalanx.trainer.local import PRELOAD
from support.jobs import prepared_corpus, user_model_path


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """See `support.jobs.prepared_corpus`."""
    return prepared_corpus(Path(tmp_path_factory.mktemp("corpus")))


@pytest.fixture(scope="session")
def server() -> Iterator[ForkServer]:
    """Its ranks find the models beside the tests."""
    with user_model_path() as environ, ForkServer(PRELOAD, environ) as forks:
        yield forks
