"""Pipeline parallelism on torch's stages and schedules, with static shapes, position and document ids beside the
tokens, and a forward pass of its own for evaluation.

torch's evaluation would run each schedule's whole order and renegotiate its buffers at each change between training and
evaluation;
a forward pass needs neither: stage by stage, all slots of a stage's input are awaited up front, so that sends and
receives between any two ranks come in one order on both sides and can't wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import schedules as torch_schedules

from phalanx.core.errors import PhalanxError
from phalanx.core.step_parts import Part
from phalanx.models.own import calling_own
from phalanx.parallel.clock import StepClock
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.schedules import multiple_of, schedule_named
from phalanx.parallel.slots import SlotBatch
from phalanx.parallel.stage import Stage
from phalanx.parallel.tied import TiedCopies

LossFunction = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class StageShapes:
    """Shapes at the ends of one stage on one rank, for one micro-batch: int64 tokens into the first, `dtype` everywhere
    else.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    dtype: torch.dtype


def check_pipeline(schedule: str, zero: int, *, compiled: bool) -> None:
    """PhalanxError for what pp > 1 can't do rightly."""
    facts = schedule_named(schedule)
    if zero == 3 and facts.zero_bubble:
        raise PhalanxError(
            "[parallel] zero",
            value=3,
            expected=f"1 with schedule {schedule}: torch computes wrong gradients with 3 and says nothing",
            remedy="set zero = 1, or choose gpipe, 1f1b, interleaved_1f1b or looped_bfs",
        )
    if zero == 2:
        raise PhalanxError(
            "[parallel] zero",
            value=2,
            expected="1 or 3 with pp > 1: a pipeline reduces gradients once a step",
            remedy="set zero = 1",
        )
    if compiled and facts.zero_bubble:
        raise PhalanxError(
            "[compile] enable",
            value=True,
            expected=f"false with schedule {schedule}: torch can't split a compiled backward",
            remedy="set it to false or choose another schedule",
        )


def stage_shapes(
    stages: Sequence[nn.Module],
    local_batch_size: int,
    seq_len: int,
    dtype: torch.dtype,
    *,
    cp: int,
    tp: int,
    gives_logits: bool = True,
) -> list[StageShapes]:
    """Shapes of every stage, from a forward of the uncut stages on the meta device. gives_logits: false where the last
    one gives what the head takes, whole on every tp rank. Raises PhalanxError where a stage gives no hidden states of
    whole windows: ranks could not send them to each other.
    """
    ids = torch.zeros(local_batch_size, seq_len, dtype=torch.int64, device="meta")
    shapes, hidden = [], ids
    for index, stage in enumerate(stages):
        before = hidden
        with calling_own(
            f"split_stages() stage {index}", "a forward that runs on the meta device, which has no values"
        ):
            hidden = stage(hidden, ids, None)
        if not isinstance(hidden, Tensor) or hidden.dim() != 3 or hidden.shape[:2] != ids.shape:
            raise PhalanxError(
                f"split_stages() stage {index}",
                value=tuple(hidden.shape) if isinstance(hidden, Tensor) else type(hidden).__name__,
                expected=f"forward to give one tensor [{local_batch_size} windows, {seq_len} tokens, width]",
                remedy="pack all that the next stage needs into it, along the last dimension",
            )
        shapes.append((before.shape, hidden.shape))
    return [
        StageShapes(
            _sequence_shard(before, cp if index == 0 else cp * tp),
            _last_output(after, cp, tp if gives_logits else 1)
            if index == len(stages) - 1
            else _sequence_shard(after, cp * tp),
            dtype,
        )
        for index, (before, after) in enumerate(shapes)
    ]


def _last_output(shape: Sequence[int], cp: int, parts: int) -> tuple[int, ...]:
    return (shape[0], shape[1] // cp, shape[2] // parts)


def _sequence_shard(shape: Sequence[int], parts: int) -> tuple[int, ...]:
    return (shape[0], shape[1] // parts, *shape[2:])


class Pipeline:
    """The stages of one rank under one schedule; its torch schedule is built at the first step of each number of
    slots.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        indices: Sequence[int],
        shapes: Sequence[StageShapes],
        mesh: Mesh,
        loss: LossFunction,
        clock: StepClock,
    ) -> None:
        """modules, indices: this rank's, in the order of the model. shapes: of all stages. loss: (logits, targets,
        valid_tokens). clock: told of forward and backward.
        """
        self.modules, self.indices, self.shapes = modules, indices, shapes
        self.mesh, self.loss, self.group = mesh, clock.timed(Part.FORWARD, loss), mesh.groups["pp"]
        self._clock = clock
        self.facts = schedule_named(mesh.schedule)
        self.has_first, self.has_last = indices[0] == 0, indices[-1] == len(shapes) - 1
        self._schedules: dict[int, Any] = {}

    def tied_copies(self, copies: Mapping[str, str]) -> TiedCopies:
        """What this rank has of the parameters that first and last stage share. copies: of the last stage."""
        first = self.modules[0] if self.has_first else None
        last = self.modules[-1] if self.has_last else None
        return TiedCopies(copies, first, last, self.mesh, self._rank_of(len(self.shapes) - 1))

    def step(self, batch: SlotBatch, valid_tokens: int) -> Tensor:
        """Forward and backward of every slot; this rank's loss, 0 where it doesn't hold the last stage."""
        losses: list[Tensor] = []
        self._schedule(batch.num_slots).step(
            *((batch.tokens,) if self.has_first else ()),
            target=batch.targets if self.has_last else None,
            losses=losses,
            return_outputs=False,
            loss_kwargs={"valid_tokens": valid_tokens},
            position_ids=batch.position_ids,
            document_ids=batch.document_ids,
            **({} if batch.window_weights is None else {"window_weights": batch.window_weights}),
        )
        return torch.stack(losses).sum().detach() if losses else torch.zeros((), device=self.mesh.device)

    def _schedule(self, num_slots: int) -> Any:
        if num_slots not in self._schedules:
            needed = multiple_of(self.mesh.schedule, self.mesh.sizes["pp"])
            assert num_slots % needed == 0, f"{self.mesh.schedule} needs a multiple of {needed} slots, not {num_slots}"
            stages = [self._stage(module, index) for module, index in zip(self.modules, self.indices, strict=True)]
            schedule_class: Any = getattr(torch_schedules, self.facts.class_name)
            self._schedules[num_slots] = schedule_class(
                stages if self.facts.many_stages else stages[0],
                n_microbatches=num_slots,
                loss_fn=self.loss,
                scale_grads=False,
            )
        return self._schedules[num_slots]

    def _stage(self, module: nn.Module, index: int) -> Stage:
        stage = Stage(
            module,
            index,
            len(self.shapes),
            self.mesh.device,
            input_args=(self._input(index),),
            output_args=(self._hidden(self.shapes[index].outputs, index),),
            group=self.group,
        )
        for name, part in _PARTS.items():
            setattr(stage, name, self._clock.timed(part, getattr(stage, name)))
        stage.forward_one_chunk = self._sendable(stage.forward_one_chunk, index)  # type: ignore[method-assign]
        return stage

    def _sendable(self, forward: Callable[..., Any], index: int) -> Callable[..., Any]:
        """`forward` of a stage, whose output is looked at before it is sent: the ranks of the next stage receive a
        tensor of the shape and type that the meta device gave, and gloo would abort on another.
        """

        def checked(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            self._check_output(output, index)
            return output

        return checked

    def _check_output(self, output: Any, index: int) -> None:
        shapes = self.shapes[index]
        if index == len(self.shapes) - 1:
            return
        found = f"{tuple(output.shape)} {output.dtype}" if isinstance(output, Tensor) else type(output).__name__
        announced = f"{tuple(shapes.outputs)} {shapes.dtype}"
        if found != announced:
            raise PhalanxError(
                f"split_stages() stage {index}",
                value=found,
                expected=f"forward to give {announced}, as on the meta device, at every step",
                remedy="give the same shape whatever the tokens are, in the type of the weights",
            )

    def _input(self, index: int) -> Tensor:
        shapes = self.shapes[index]
        if index == 0:
            return torch.empty(shapes.inputs, dtype=torch.int64, device="meta")
        return self._hidden(shapes.inputs, index)

    def _hidden(self, shape: tuple[int, ...], index: int) -> Tensor:
        return torch.empty(shape, dtype=self.shapes[index].dtype, device="meta", requires_grad=True)

    @torch.no_grad()
    def evaluate(self, batch: SlotBatch, valid_tokens: int, measures: LossFunction, num_measures: int) -> Tensor:
        """Sum over all slots of `measures`, fp32 [num_measures], by a forward pass alone; 0 where this rank doesn't
        hold the last stage. measures: called as the loss is.
        """
        slots = range(batch.num_slots)
        parts = {name: _chunks(getattr(batch, name), batch.num_slots) for name in _BATCH_FIELDS}
        total = torch.zeros(num_measures, device=self.mesh.device)
        sends: list[dist.Work | None] = []
        kept: list[Tensor] = []  # what a send still reads
        outputs: list[Tensor] = []
        for module, index in zip(self.modules, self.indices, strict=True):
            inputs = self._await_inputs(index, parts["tokens"], outputs)
            outputs = []
            for slot in slots:
                hidden = inputs[slot]()
                output = module(
                    hidden, position_ids=parts["position_ids"][slot], document_ids=parts["document_ids"][slot]
                )
                self._check_output(output, index)
                if index == len(self.shapes) - 1:
                    total += measures(output, parts["targets"][slot], valid_tokens)
                elif self._rank_of(index + 1) == self.group.rank():
                    outputs.append(output)
                else:
                    kept.append(output.contiguous())
                    sends.append(dist.isend(kept[-1], group=self.group, group_dst=self._rank_of(index + 1)))
        for send in sends:
            assert send is not None, "a member of its own pipeline group"
            send.wait()
        return total

    def _await_inputs(
        self, index: int, tokens: Sequence[Tensor], own_outputs: Sequence[Tensor]
    ) -> list[Callable[[], Tensor]]:
        """For each slot a function that gives the stage's input, waiting for it where it comes from another rank."""
        if index == 0:
            return [lambda slot_tokens=t: slot_tokens for t in tokens]  # type: ignore[misc]
        if own_outputs:
            return [lambda output=t: output for t in own_outputs]  # type: ignore[misc]
        source, received = self._rank_of(index - 1), []
        for _ in tokens:
            shapes = self.shapes[index]
            buffer = torch.empty(shapes.inputs, dtype=shapes.dtype, device=self.mesh.device)
            work = dist.irecv(buffer, group=self.group, group_src=source)
            received.append((buffer, work))
        return [lambda buffer=buffer, work=work: (work.wait(), buffer)[1] for buffer, work in received]  # type: ignore[misc]

    def _rank_of(self, index: int) -> int:
        """Pipeline rank that holds stage `index`."""
        pp = self.mesh.sizes["pp"]
        return min(index, 2 * pp - 1 - index) if self.facts.v_shaped else index % pp


# What a schedule of torch calls of a stage, and the part of the step that it is.
_PARTS = {
    "forward_one_chunk": Part.FORWARD,
    "backward_one_chunk": Part.BACKWARD,
    "backward_weight_one_chunk": Part.BACKWARD,
}
_BATCH_FIELDS = ("tokens", "targets", "position_ids", "document_ids")


def _chunks(tensor: Tensor | None, num_slots: int) -> Sequence[Any]:
    return [None] * num_slots if tensor is None else tensor.tensor_split(num_slots)
