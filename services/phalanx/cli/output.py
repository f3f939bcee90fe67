"""How every command prints JSON: one object on standard output, keys as they are, no NaN."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any


def print_json(value: Mapping[str, Any]) -> None:
    """Writes `value` as one indented JSON object."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")
