"""What an import reads of its source before it writes anything: where values begin in archives, counters, and values
that must be the same.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import numpy as np

from phalanx.checkpoint.importing.mapping import ImportPlan, MappedTensor
from phalanx.checkpoint.importing.source import Source, read_rows, row_ranges
from phalanx.checkpoint.importing.torch_dcp import located
from phalanx.core.errors import PhalanxError

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
    counts = {count: name for name, count in plan.counts.items()}
    counts |= {float(read_rows(source.store, each, range(1))): each.name for each in plan.steps}
    if len(counts) > 1 or any(count < 0 or not count.is_integer() for count in counts):
        raise PhalanxError(
            f"optimizer of {source.url}",
            value=", ".join(f"{name}: {count:g}" for count, name in counts.items()),
            expected="one number of updates for all parameters",
            remedy="import it with --without-optimizer: AdamW then begins anew",
        )
    return int(next(iter(counts), 0))


def source_step(source: Source) -> int | None:
    """The step that the source says it had reached (torchtitan's train_state.step); None where it doesn't say."""
    tensor = source.tensors.get(_STEP)
    if tensor is None or tensor.shape or source.kind != "torch-dcp":
        return None
    return int(read_rows(source.store, located(source, [_STEP])[_STEP], range(1)))


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
