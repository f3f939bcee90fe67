"""The job file: typed sections, presets, overrides, and the digests of identity and placement. Checks values only,
never does I/O beyond reading the file itself; what needs the user's class, the tokenizer or a manifest is checked by
the trainer's preflight."""

from __future__ import annotations

from phalanx.spec.experts import MoeArgs
from phalanx.spec.job import Job
from phalanx.spec.keys import KeyInfo, Mark
from phalanx.spec.layout import Layout
from phalanx.spec.load import load_job, parse_job
from phalanx.spec.model import Model, ModelArgs
from phalanx.spec.names import all_keys
from phalanx.spec.operation import Storage
from phalanx.spec.parallel import Cluster, Parallel

__all__ = [
    "Cluster",
    "Job",
    "KeyInfo",
    "Layout",
    "Mark",
    "Model",
    "ModelArgs",
    "MoeArgs",
    "Parallel",
    "Storage",
    "all_keys",
    "load_job",
    "parse_job",
]
