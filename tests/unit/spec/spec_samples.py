"""Job files for the tests of the spec."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from phalanx.spec import Job, parse_job

SMALL: dict[str, Any] = {
    "job": {"name": "sample", "storage": "file:///srv/runs"},
    "model": {"preset": "demo"},
    "data": {"train": "s3://corpus/train", "held_out": "s3://corpus/held_out"},
    "training": {"seq_len": 128, "steps": 40, "global_batch_size": 16},
    "optimizer": {"lr": 1e-3},
}


def tables(**changes: Any) -> dict[str, Any]:
    """The small job with dotted keys changed, `__` for `.`; a value of None removes the key."""
    return changed(SMALL, **changes)


def changed(base: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """As `tables`, of another job."""
    result = deepcopy(base)
    for name, value in changes.items():
        *sections, leaf = name.split("__")
        table = result
        for section in sections:
            table = table.setdefault(section, {})
        if value is None:
            table.pop(leaf, None)
        else:
            table[leaf] = deepcopy(value)
    return result


def sample(**changes: Any) -> Job:
    """The small job, checked."""
    return parse_job(tables(**changes))
