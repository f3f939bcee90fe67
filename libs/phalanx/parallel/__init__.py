"""Parallelism inside a rank: one mesh; tensor and sequence, fully sharded, and pipeline parallelism behind one
model.
"""

from __future__ import annotations

from phalanx.parallel.build import count_parameters, parameter_names, parameter_shapes
from phalanx.parallel.mesh import Mesh, build_mesh
from phalanx.parallel.model import ParallelModel
from phalanx.parallel.schedules import multiple_of
from phalanx.parallel.slots import SlotBatch

__all__ = [
    "Mesh",
    "ParallelModel",
    "SlotBatch",
    "build_mesh",
    "count_parameters",
    "multiple_of",
    "parameter_names",
    "parameter_shapes",
]
