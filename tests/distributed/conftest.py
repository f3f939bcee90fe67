"""One fork server for all distributed tests; its ranks import modules beside the tests by their plain names, `support`,
and the repository's `benchmarks`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.gang.fork_server import ForkServer
from phalanx.gang.testing import TEST_PRELOAD

HERE = Path(__file__).parent
FOLDERS = [HERE, *sorted(folder for folder in HERE.iterdir() if folder.is_dir() and folder.name != "__pycache__")]


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """Gangs of gloo ranks with torch preloaded; order one with `phalanx.gang.testing.run_gang`."""
    inherited = [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
    path = os.pathsep.join([*map(str, FOLDERS), str(HERE.parent), str(HERE.parents[1]), *inherited])
    with ForkServer(TEST_PRELOAD, {"PYTHONPATH": path}) as server:
        yield server
