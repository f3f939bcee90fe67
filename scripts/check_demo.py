"""Checks what `phalanx demo --json` printed: every promise of the demo, by figure. Exit 1 names what does not hold."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

MAX_RECOVERY_S = 12.0
MAX_AGENT_RECOVERY_S = 60.0
MAX_WALL_S = 300.0
BF16_BOUND = 1e-3

PROMISES: dict[str, Callable[[dict[str, Any]], bool]] = {
    "40 steps": lambda found: found["steps"] == 40,
    "the loss fell": lambda found: found["final_loss"] < found["first_loss"],
    "a held-out loss": lambda found: 0 < found["eval_loss"] < found["first_loss"],
    "no window missing": lambda found: found["samples_missing"] == 0,
    "no window repeated": lambda found: found["samples_repeated"] == 0,
    "steps were redone": lambda found: found["steps_redone"] > 0,
    "four attempts": lambda found: found["attempts"] == 4,
    "each service and the agent was killed once and came back": lambda found: (
        found["service_restarts"] == dict.fromkeys(("data", "train", "checkpoint", "monitor", "agent"), 1)
    ),
    "a page": lambda found: found["page_url"].startswith("http://127.0.0.1:"),
    "recovery from the agent's death": lambda found: 0 < found["agent_recovery_s"] <= MAX_AGENT_RECOVERY_S,
    "two layouts": lambda found: found["layouts"] == ["pp=2 x dp_shard=2 x tp=2", "dp_shard=4"],
    "checkpoints": lambda found: found["checkpoints"] >= 8,
    f"recovery within {MAX_RECOVERY_S:g} s": lambda found: 0 < found["recovery_s"] <= MAX_RECOVERY_S,
    f"loss of one process within {BF16_BOUND:g}": lambda found: found["reference_max_rel_diff"] <= BF16_BOUND,
    "the export is there": lambda found: (Path(found["export_dir"]) / "model.safetensors").is_file(),
    f"within {MAX_WALL_S:g} s": lambda found: found["wall_s"] <= MAX_WALL_S,
}


def main() -> int:
    """0 when all promises hold."""
    found = json.loads(Path(sys.argv[1]).read_text())
    broken = [promise for promise, holds in PROMISES.items() if not holds(found)]
    sys.stdout.write(json.dumps(found, indent=2) + "\n")
    sys.stdout.write(f"demo: {len(PROMISES) - len(broken)} passed, {len(broken)} failed\n")
    for promise in broken:
        sys.stdout.write(f"broken: {promise}\n")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
