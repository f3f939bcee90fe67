"""What an agent says of its end, in `state_dir/last-end.json`: the ranks that it had to kill before they had committed.
Whoever told it to end can tell the user.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from phalanx.core.files import write_atomically

LAST_END = "last-end.json"


@dataclass(frozen=True, slots=True)
class Killed:
    """A gang that was killed. step: the last that a rank told of; committed_step: of its newest checkpoint, 0 where the
    attempt made none.
    """

    job: str
    attempt: int
    step: int
    committed_step: int

    def __str__(self) -> str:
        lost = f"from its checkpoint of step {self.committed_step}" if self.committed_step else "from where it started"
        return (
            f"ranks of {self.job} (attempt {self.attempt}, step {self.step}) were killed before they had committed;"
            f" the next attempt goes on {lost}"
        )


def write_end(state_dir: Path, killed: Sequence[Killed]) -> None:
    """Says it, as this process."""
    said = {"pid": os.getpid(), "killed": [asdict(each) for each in killed]}
    write_atomically(state_dir / LAST_END, json.dumps(said, indent=2).encode() + b"\n")


def read_end(state_dir: Path, pid: int) -> tuple[Killed, ...] | None:
    """What the agent of that pid said; None where it said nothing."""
    try:
        said = json.loads((state_dir / LAST_END).read_bytes())
        return tuple(Killed(**each) for each in said["killed"]) if said["pid"] == pid else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
