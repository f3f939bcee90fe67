"""What the ranks of these tests do."""

from __future__ import annotations

import threading

from phalanx.gang import RankContext


def wait(context: RankContext) -> None:
    """Until it is killed."""
    threading.Event().wait()
