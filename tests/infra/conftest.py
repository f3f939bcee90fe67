"""The compose program, for every test here that needs it."""

from __future__ import annotations

import pytest
from support.docker import compose_command


@pytest.fixture(scope="session")
def compose(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """How compose is started; skips where it cannot be had."""
    return compose_command(tmp_path_factory.mktemp("compose"))
