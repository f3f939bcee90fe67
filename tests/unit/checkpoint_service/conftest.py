"""What several tests of the collection share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from phalanx.lineage import leases


@pytest.fixture(scope="module")
def no_patience() -> Iterator[None]:
    """A removal stands still here while a reader begins, so that waits for nothing; and no time passes by itself."""
    with pytest.MonkeyPatch.context() as patched:
        for name, seconds in (("PATIENCE_S", 0.0), ("MARK_RENEW_S", 3600.0), ("MARK_EXPIRY_S", 7200.0)):
            patched.setattr(leases, name, seconds)
        yield
