"""Checkpoints in a rank: boxes of global tensors as safetensors objects, committed by one manifest, restored to any
layout.

capture (device -> host) -> writer (background upload, part object last) -> commit (checks, manifest) -> restore or
load. Importing this package imports no torch; `phalanx.snapshot.writer` and `phalanx.snapshot.restore`, which hold live
tensors, do.
"""

from phalanx.snapshot.commit import commit
from phalanx.snapshot.errors import DamagedCheckpoint, IncompleteCheckpoint
from phalanx.snapshot.load import load, opened

__all__ = ["DamagedCheckpoint", "IncompleteCheckpoint", "commit", "load", "opened"]
