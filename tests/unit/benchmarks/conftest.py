"""The scripts of benchmarks/train are importable here by their plain names, as they import each other."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "benchmarks" / "train"))
