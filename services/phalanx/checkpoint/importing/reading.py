"""What an import reads of its source before it writes anything: where values begin in archives, counters, and values
that must be the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from phalanx.checkpoint.importing.listing import MOST_LISTED, listed
from phalanx.checkpoint.importing.mapping import ImportPlan, MappedTensor
from phalanx.checkpoint.importing.parameters import BEGIN_ANEW
from phalanx.checkpoint.importing.source import Source, SourceTensor, read_rows, row_ranges
from phalanx.checkpoint.importing.torch_dcp import located
from phalanx.checkpoint.importing.values import widened
from phalanx.core.errors import PhalanxError
from phalanx.core.numbering import LARGEST

_STEP: Final = "train_state.step"


def located_plan(source: Source, plan: ImportPlan) -> ImportPlan:
    """The plan with its tensors where their values begin, which of archives is to be found out."""
    if source.kind != "torch-dcp":
        return plan
    used = [
        *(each.source for each in plan.tensors if each.source),
        *plan.steps,
        *(t for pair in plan.same for t in pair),
    ]
    found = located(source, dict.fromkeys(each.name for each in used))

    def moved(tensor: MappedTensor) -> MappedTensor:
        return tensor if tensor.source is None else dataclasses.replace(tensor, source=found[tensor.source.name])

    return dataclasses.replace(
        plan,
        tensors=tuple(map(moved, plan.tensors)),
        steps=tuple(found[each.name] for each in plan.steps),
        same=tuple((found[one.name], found[other.name]) for one, other in plan.same),
    )


def num_updates(source: Source, plan: ImportPlan) -> int:
    """How often the optimizer has updated the weights: one number for all parameters, as AdamW here has."""
    names_of: dict[float, list[str]] = {}
    for name, count in (*plan.counts.items(), *((each.name, _number(source, each)) for each in plan.steps)):
        names_of.setdefault(count, []).append(name)
    wrong = {count: names for count, names in names_of.items() if not _is_count(count)}
    if wrong:
        raise _not_updates(source, wrong, f"whole numbers of updates from 0 to {LARGEST:,}")
    if len(names_of) > 1:
        raise _not_updates(source, names_of, "one number of updates for all parameters")
    return int(next(iter(names_of), 0))


def source_step(source: Source) -> int | None:
    """The step that the source says it had reached (torchtitan's train_state.step); None where it doesn't say."""
    tensor = source.tensors.get(_STEP)
    if tensor is None or tensor.shape or source.kind != "torch-dcp":
        return None
    step = _number(source, located(source, [_STEP])[_STEP])
    return int(step) if _is_count(step) else None


def _number(source: Source, tensor: SourceTensor) -> float:
    """The one element of a tensor."""
    return float(widened(read_rows(source.store, tensor, range(1)), tensor.dtype))


def _is_count(value: float) -> bool:
    """Whether it is a number of updates or steps that a checkpoint can say."""
    return 0 <= value <= LARGEST and value.is_integer()  # False of NaN


def _not_updates(source: Source, names_of: Mapping[float, Sequence[str]], expected: str) -> PhalanxError:
    """What to raise for such numbers of updates; the rarest are named first."""
    rarest = sorted(names_of.items(), key=lambda each: len(each[1]))
    told = [f"{count:.12g} in {listed(names)}" for count, names in rarest[:MOST_LISTED]]
    more = len(rarest) - len(told)
    shown = "; ".join([*told, f"and {more} other values"] if more else told)
    return PhalanxError(f"optimizer of {source.url}", value=shown, expected=expected, remedy=BEGIN_ANEW)


def require_same_values(source: Source, plan: ImportPlan) -> None:
    """Raises PhalanxError where a head that is tied here has other values in the source than the embedding."""
    for one, other in plan.same:
        for rows in row_ranges(one):
            values = [read_rows(source.store, each, rows) for each in (one, other)]
            if one.dtype != other.dtype or not np.array_equal(values[0].view(np.uint8), values[1].view(np.uint8)):
                raise PhalanxError(
                    one.name,
                    expected=f"the values of {other.name}, since the job's model.args.tie_embeddings is true",
                    remedy="set it to false, or leave the head out by --leave-out",
                )
