"""What a job file may say, and the planner answers for, but this version's trainer does not run."""

from __future__ import annotations

from phalanx.core.errors import PhalanxError
from phalanx.spec.job import Job
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelArgs


def refuse_unbuilt_model(args: ModelArgs) -> None:
    """Raises PhalanxError for what the built-in decoder does not do yet."""
    _refuse("model.args.dropout", args.dropout, args.dropout > 0, "0: dropout is not in this version's trainer")


def refuse_unbuilt(job: Job, layout: Layout) -> None:
    """Raises PhalanxError for the first thing in `job` and its layout that this version does not train with."""
    if isinstance(job.model.args, ModelArgs):
        refuse_unbuilt_model(job.model.args)


def _refuse(key: str, value: object, is_wrong: bool, expected: str) -> None:
    if is_wrong:
        remedy = "`phalanx plan` accepts it; `phalanx run` does not yet"
        raise PhalanxError(key, value=value, expected=expected, remedy=remedy)
