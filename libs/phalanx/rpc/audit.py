"""Refusals on record: one JSON line each in the log `phalanx.audit`."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime

_LOG = logging.getLogger("phalanx.audit")


def audit_refusal(*, method: str, peer: str, spiffe_id: str, subject: str, why: str) -> None:
    """Writes who was refused what, and why; subject is "" where no valid token told it."""
    line = {
        "audit": "refused",
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "method": method,
        "peer": peer,
        "spiffe": spiffe_id,
        "subject": subject,
        "why": why,
    }
    _LOG.warning("%s", json.dumps(line))
