"""The model of one rank: built on the meta device, cut by the mesh, filled with initial weights, stepped over the slots
of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from phalanx.core.box import HeldTensor, whole
from phalanx.core.errors import PhalanxError
from phalanx.core.philox import key_of
from phalanx.core.step_parts import Part
from phalanx.models.protocol import (
    HasContext,
    HasHead,
    HasStageLengths,
    Initial,
)
from phalanx.parallel.build import build_on_meta, check_head, check_layout, whole_buffers, whole_weights
from phalanx.parallel.clock import StepClock
from phalanx.parallel.collectives import sum_parts
from phalanx.parallel.context import ContextShare
from phalanx.parallel.expert import cut_experts
from phalanx.parallel.float8 import narrow_stages
from phalanx.parallel.initialise import fill
from phalanx.parallel.loss import chunked_sums, token_sums
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.overlap import Reductions, prefetch
from phalanx.parallel.own import loss_of, metrics_of
from phalanx.parallel.own_model import check_shared, initial_of, plan_of, require_alike, stages_of_model
from phalanx.parallel.pipeline import Pipeline, check_pipeline, stage_shapes
from phalanx.parallel.precision import linear, widen_linears
from phalanx.parallel.routing import Routing, window_weights
from phalanx.parallel.schedules import stages_of
from phalanx.parallel.sharding import (
    blocks_of,
    frees_weights,
    held_tensors,
    local_of,
    materialise,
    prepare_blocks,
    reshard,
    set_micro_batch,
    shard,
)
from phalanx.parallel.slots import SlotBatch, slots_of
from phalanx.parallel.tensor import TensorSlices, apply_plan
from phalanx.parallel.tied import copies_in
from phalanx.parallel.whole import hold_whole, is_whole
from phalanx.planner.job_search import model_shape, run_shape
from phalanx.planner.stage_split import stage_layers
from phalanx.spec import Job, Layout

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class ParallelModel:
    """One rank's share of the job's model."""

    def __init__(
        self,
        job: Job,
        layout: Layout,
        mesh: Mesh,
        device: torch.device | str,
        *,
        initialise: bool = True,
        overlap: bool = True,
    ) -> None:
        """Build, cut and initialise; all ranks of the mesh together.

        layout: the one that `mesh` was built from. initialise: false leaves the parameters (never the buffers) as
        memory was, for a caller that restores every one of them. overlap: false has a CPU await each collective of the
        data axes where it begins, for who wants to see what overlap is worth. Raises PhalanxError where job and layout
        don't go together.
        """
        assert all(getattr(layout, axis) == size for axis, size in mesh.sizes.items()), "the mesh of another layout"
        self.mesh, self.device = mesh, torch.device(device)
        self.clock = StepClock(self.device)
        self.zero, self._seed = job.parallel.zero, job.training.seed
        self._uses_documents = job.data.document_mask
        self._token_sum, self._metrics = loss_of(job), metrics_of(job)
        dtype = _DTYPES[job.training.mixed_precision_param]
        model = build_on_meta(job)
        check_layout(model, mesh.sizes, job.training.seq_len)
        if job.model.class_ is not None:
            require_alike(model, self.device)
        check_head(model, job.loss.chunk_tokens)
        self._chunk_tokens, self._z_loss = job.loss.chunk_tokens, job.loss.z_loss
        self.z_loss = torch.zeros((), device=self.device)
        self.balance_loss = torch.zeros((), device=self.device)
        self.loss_scale = 1.0
        if self._chunk_tokens:
            assert isinstance(model, HasHead), "check_head refused it"
            model.detach_head()
        initial, plan = initial_of(model), plan_of(model)

        self.pipeline: Pipeline | None = None
        tied: Mapping[str, str] = {}
        self.stages: Sequence[nn.Module] = (model,)
        if mesh.sizes["pp"] > 1:
            self.pipeline, tied = self._build_pipeline(job, model, dtype)
            self.stages = self.pipeline.modules
        slices = [apply_plan(s, plan, mesh.tp_group) if mesh.tp_group else TensorSlices.of(s) for s in self.stages]
        for stage, own in zip(self.stages, slices, strict=True):
            cut_experts(stage, own, mesh)
        self._context = self._share_windows(job)
        if job.training.float8_recipe != "none":
            narrow_stages(self.stages, slices, job.training.float8_recipe, self.device)
        for stage in self.stages:
            if self.device.type == "cpu":
                widen_linears(stage)
            splits = self.pipeline is not None and self.pipeline.facts.zero_bubble
            prepare_blocks(stage, job.activation_checkpoint, compiled=job.compile.enable, splits=splits)
        self._is_whole = overlap and is_whole(job, layout)
        self._replica_sums = hold_whole(self.stages, job, mesh) if self._is_whole else None
        sharded = () if self._is_whole else self.stages
        for stage in sharded:
            check_shared(stage)
        self._reductions = [self._shard(stage, job, dtype, overlap=overlap) for stage in sharded]
        named = [[(n, p) for n, p in s.named_parameters() if n not in copies_in(s)] for s in self.stages]
        cut = zip(self.stages, named, slices, strict=True)
        self._parts = [part for stage, each, own in cut for part in held_tensors(stage, each, own, mesh)]
        self._held = [part.tensor for part in self._parts]
        self._routing = Routing.of(self.stages, mesh, job)
        self._tied = self.pipeline.tied_copies(tied) if self.pipeline is not None and tied else None
        partial = frozenset[str]().union(*(own.partial for own in slices))
        self._is_partial = [tensor.name in partial for tensor in self._held]
        copies = {name: count for own in slices for name, count in own.copies.items()}
        self._copies = [copies.get(tensor.name, 1) for tensor in self._held]
        if initialise:
            self._initialise(job, initial)
        if next(model.buffers(), None) is not None:
            self._fill_buffers(whole_buffers(job, self.device))

    def _build_pipeline(self, job: Job, model: nn.Module, dtype: torch.dtype) -> tuple[Pipeline, Mapping[str, str]]:
        """The pipeline, and what of its last stage copies parameters of the first."""
        parallel, sizes = job.parallel, self.mesh.sizes
        assert self.mesh.schedule == parallel.schedule, (
            "build_mesh(schedule=) must be the job's: it places the last stage"
        )
        check_pipeline(parallel.schedule, self.zero, compiled=job.compile.enable)
        indices = stages_of(parallel.schedule, sizes["pp"], self.mesh.coordinates["pp"], parallel.stages_per_rank)
        if job.model.class_ is None and isinstance(model, HasStageLengths):
            stages = model.split_layers(stage_layers(model_shape(job), sizes["pp"], run_shape(job)))
        else:
            stages = stages_of_model(model, sizes["pp"] * parallel.stages_per_rank)
        shapes = stage_shapes(
            stages,
            parallel.local_batch_size,
            job.training.seq_len,
            dtype,
            cp=sizes["cp"],
            tp=sizes["tp"],
            gives_logits=not self._chunk_tokens,
        )
        own = [stages[index] for index in indices]
        return Pipeline(own, indices, shapes, self.mesh, self._training_loss, self.clock), copies_in(stages[-1])

    def _shard(self, stage: nn.Module, job: Job, dtype: torch.dtype, *, overlap: bool) -> Reductions | None:
        """Shards a stage; its reductions where they are not FSDP2's own to overlap."""
        in_threads = overlap and self.device.type == "cpu"
        shard(
            stage,
            self.mesh,
            dtype,
            _DTYPES[job.training.mixed_precision_reduce],
            frees=frees_weights(self.zero, pipelined=self.pipeline is not None),
            offloaded=job.parallel.cpu_offload,
            within_replica=in_threads or job.has_apart_replicas,
        )
        if overlap and self.mesh.shard_size > 1:
            prefetch(stage, blocks_of(stage), in_threads=in_threads)
        materialise(stage, self.device, offloaded=job.parallel.cpu_offload)
        replicas = None if job.has_apart_replicas else self.mesh.replica_group
        exchanges = self.mesh.shard_size > 1 or replicas is not None
        return Reductions(stage, replicas) if in_threads and exchanges else None

    def _share_windows(self, job: Job) -> ContextShare | None:
        if (group := self.mesh.cp_group) is None:
            return None
        context = ContextShare(group, job.training.seq_len, job.parallel.cp_comm_type)
        for stage in self.stages:
            assert isinstance(stage, HasContext), "check_layout refused it, or split_stages() gave stages without it"
            stage.set_context(context)
        return context

    @torch.no_grad()
    def _initialise(self, job: Job, initial: Mapping[str, Initial] | None) -> None:
        if initial is None:
            weights = whole_weights(job, self.device)
            for held in self._held:
                held.local.copy_(weights[held.name][whole(held.global_shape).slices_of(held.box)])
            return
        for held in self._held:
            fill(held.local, held.box, held.global_shape, initial[held.name], job.training.seed, held.name)

    @torch.no_grad()
    def _fill_buffers(self, whole_by_name: Mapping[str, Tensor]) -> None:
        for stage in self.stages:
            for name, buffer in stage.named_buffers():
                if name not in whole_by_name:
                    raise PhalanxError(
                        f"split_stages() buffer {name}",
                        expected="every buffer of a stage to have the name that it has in the whole model",
                        remedy="give the stage the whole model's own modules",
                    )
                buffer.copy_(whole_by_name[name])

    def seed_step(self, step: int) -> None:
        """Seed torch's random numbers for `step`, so that a model's dropout is the same whenever this step runs in
        this layout. Ranks of one tp group draw alike, as what they hold in common needs; all others draw apart.
        """
        reader = self.mesh.dp_rank * self.mesh.sizes["cp"] + self.mesh.coordinates["cp"]
        low, high = key_of("step", self._seed, step, reader, self.mesh.coordinates["pp"])
        torch.manual_seed(high << 32 | low)

    def _loss(self, output: Tensor, targets: Tensor, valid_tokens: int) -> Tensor:
        """output: logits, or with `loss.chunk_tokens` what the head takes."""
        if self._chunk_tokens:
            return self._sums(output, targets)[0] / valid_tokens
        return self._token_sum(output, targets, self.mesh.tp_group) / valid_tokens

    def _training_loss(self, output: Tensor, targets: Tensor, valid_tokens: int) -> Tensor:
        """As `_loss`, and the z-loss of the job, which is counted apart as well; all times `loss_scale`."""
        if not self._z_loss:
            loss = self._loss(output, targets, valid_tokens)
            return loss if self.loss_scale == 1.0 else loss * self.loss_scale
        loss, squares = self._sums(output, targets)
        z_loss = self._z_loss * squares / valid_tokens
        self.z_loss += z_loss.detach()
        return (loss / valid_tokens + z_loss) * self.loss_scale

    def _sums(self, output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        group = self.mesh.tp_group
        if not self._chunk_tokens:
            return token_sums(output, targets, group)  # type: ignore[no-any-return]
        return chunked_sums(output, self._head_weight(), targets, self._chunk_tokens, group)  # type: ignore[no-any-return]

    def _head_weight(self) -> Tensor:
        """Looked up anew at each use: fully_shard puts the gathered weight in the place of the shard."""
        for stage in self.stages:
            if isinstance(stage, HasHead) and stage.head is not None:
                weight: Tensor = stage.head.weight
                return weight
        raise AssertionError("the rank of the last stage holds the head")

    def _measures(self, output: Tensor, targets: Tensor, valid_tokens: int) -> Tensor:
        """The loss and each of `metrics.fn`, which see the logits of a whole micro-batch; fp32 [1 + M]."""
        logits = linear(output, self._head_weight()) if self._chunk_tokens and self._metrics else output
        found = [measure(logits, targets, self.mesh.tp_group) for measure in self._metrics.values()]
        return torch.stack([self._loss(output, targets, valid_tokens), *(each / valid_tokens for each in found)])

    def forward_backward(self, batch: SlotBatch, valid_tokens: int) -> Tensor:
        """Add the gradients of every slot; this rank's part of the loss, fp32 0-dim. `z_loss` is then its part of what
        `[loss] z_loss` adds to what is minimised, which the loss does not count.

        valid_tokens: of the whole global batch. The parts of all ranks sum up to the loss: ranks that don't count
        (`mesh.has_loss`) return 0.
        """
        batch = self._placed(batch, valid_tokens if self._routing is not None else 0)
        self._take_tied_weights()
        self.z_loss = torch.zeros((), device=self.device)
        if self.pipeline is not None:
            self._settle_reductions()
            loss = self.pipeline.step(batch, valid_tokens)
        else:
            loss = self._step_without_pipeline(batch, valid_tokens)
        with self.clock.part(Part.BACKWARD):
            for reductions in self._reductions:
                if reductions is not None:
                    reductions.finish()
            if self._replica_sums is not None:
                self._replica_sums.finish()
        self._reshard()
        self.z_loss = self._counted(self.z_loss)
        loss = self._counted(loss) / self.loss_scale
        return loss - self.z_loss if self._z_loss else loss

    def _step_without_pipeline(self, batch: SlotBatch, valid_tokens: int) -> Tensor:
        total = torch.zeros((), device=self.device)
        for number, slot in enumerate(slots_of(batch)):
            self._begin_micro_batch(is_last=number == batch.num_slots - 1)
            with self.clock.part(Part.FORWARD):
                loss = self._training_loss(self.stages[0](*slot.inputs, **slot.named), slot.targets, valid_tokens)
            with self.clock.part(Part.BACKWARD):
                self._settle_reductions()
                torch.autograd.backward(loss)
            total += loss.detach()
        return total

    def _settle_reductions(self) -> None:
        for reductions in self._reductions:
            if reductions is not None:
                reductions.settle()

    def _begin_micro_batch(self, *, is_last: bool) -> None:
        if not self._is_whole:
            set_micro_batch(self.stages[0], self.zero, is_last=is_last)
        elif self._replica_sums is not None:
            self._replica_sums.begin(is_last=is_last)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of what `measure` gives beside the loss."""
        return tuple(self._metrics)

    def evaluate(self, batch: SlotBatch, valid_tokens: int) -> Tensor:
        """This rank's part of the loss as `forward_backward` gives it; see `measure`."""
        return self.measure(batch, valid_tokens)[0]

    @torch.no_grad()
    def measure(self, batch: SlotBatch, valid_tokens: int) -> Tensor:
        """This rank's part of the loss as `forward_backward` gives it and of each of `metrics`, fp32 [1 + M], with the
        model in evaluation mode and without gradients; any number of slots.
        """
        batch = self._placed(batch)
        self._take_tied_weights()
        with in_evaluation_mode(self.stages):
            if self.pipeline is not None:
                found = self.pipeline.evaluate(batch, valid_tokens, self._measures, 1 + len(self._metrics))
            else:
                found = torch.zeros(1 + len(self._metrics), device=self.device)
                for slot in slots_of(batch):
                    found += self._measures(self.stages[0](*slot.inputs, **slot.named), slot.targets, valid_tokens)
        self._reshard()
        return self._counted(found)

    def _placed(self, batch: SlotBatch, balanced_tokens: int = 0) -> SlotBatch:
        """balanced_tokens: valid ones of the global batch, where routers count; 0: they don't."""
        tokens, targets, positions = (t.to(self.device) for t in (batch.tokens, batch.targets, batch.position_ids))
        documents = (
            batch.document_ids.to(self.device) if self._uses_documents and batch.document_ids is not None else None
        )
        assert documents is not None or not self._uses_documents, "document_mask needs document_ids in every batch"
        weights = window_weights(targets, balanced_tokens) if balanced_tokens else None
        if self._context is not None:  # documents stay whole: attention reaches beyond this rank's part
            tokens, targets, positions = (self._context.take(t) for t in (tokens, targets, positions))
        return SlotBatch(tokens, targets, positions, documents, batch.num_slots, weights)

    def _counted(self, loss: Tensor) -> Tensor:
        return loss if self.mesh.has_loss else torch.zeros_like(loss)

    def _take_tied_weights(self) -> None:
        if self._tied is not None:
            self._tied.take_weights()

    def _reshard(self) -> None:
        if not self._is_whole:
            for stage in self.stages:
                reshard(stage)

    def parameters(self) -> list[HeldTensor]:
        """The fp32 masters that this rank holds, on its device or offloaded in the host's memory: writing to a `local`
        writes the model (between steps).
        """
        return self._held

    def gradients(self) -> list[Tensor | None]:
        """Plain local gradients, aligned with `parameters()` and lying where they do: zeros where a step's loss didn't
        depend on the parameter, None where it doesn't train (requires_grad is false).
        """
        return [part.gradient() for part in self._parts]

    def finish_gradients(self) -> None:
        """Complete what first and last stage share, and, by one all-reduce, what tp ranks hold in common but computed
        in parts; call once after `forward_backward`.
        """
        if self._tied is not None:
            self._tied.give_gradients()
        if self.loss_scale != 1.0:
            self._unscale()
        if (group := self.mesh.tp_group) is None:
            return
        gradients = list(zip(self.gradients(), self._is_partial, self._copies, strict=True))
        partial = [g for g, is_partial, _ in gradients if is_partial and g is not None]
        shared = [(g, copies) for g, _, copies in gradients if copies > 1 and g is not None]
        sum_parts(partial, shared, group, self.device)

    def gradient_square_sum(
        self, gradients: Sequence[Tensor | None] | None = None, *, by_replica: bool = False
    ) -> Tensor:
        """This rank's part of the squared norm of `gradients` (by default those of `gradients()`), fp32 0-dim; the
        parts of all ranks sum up to it. by_replica: those of the ranks of one replica do, each to its own.
        """
        replicas = self.mesh.sizes["dp_replicate"] if by_replica else 1
        held = zip(self.gradients() if gradients is None else gradients, self._held, strict=True)
        counted = [
            gradient
            for gradient, tensor in held
            if gradient is not None and gradient.numel() and tensor.replica % (tensor.num_replicas // replicas) == 0
        ]
        if not counted:
            return torch.zeros((), device=self.device)
        return torch.stack(torch._foreach_norm(counted)).square().sum().to(self.device)

    def _unscale(self) -> None:
        parameters = {id(part.parameter): part.parameter for part in self._parts}.values()
        if given := [local_of(each.grad) for each in parameters if each.grad is not None]:
            torch._foreach_mul_(given, 1 / self.loss_scale)

    def zero_gradients(self) -> None:
        """Drop every gradient."""
        for part in self._parts:
            part.parameter.grad = None

    def take_expert_counts(self) -> Tensor | None:
        """Tokens of the steps since the last time that went to each expert, over all ranks, int64 [layers, E]; None for
        a model without routers. All ranks together. `balance_loss` is then this rank's part of what the losses of
        balance (`moe.aux_loss`) added to what was minimised in these steps; the parts of all ranks sum up to it.
        """
        if self._routing is None:
            return None
        counts, self.balance_loss = self._routing.take()
        return counts

    def move_biases(self, expert_counts: Tensor) -> None:
        """Move each layer's selection bias, where it has one, by what `take_expert_counts` gave."""
        assert self._routing is not None, "counts come from routers"
        self._routing.move_biases(expert_counts)


@contextmanager
def in_evaluation_mode(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Every module inside in evaluation mode (no dropout); afterwards each is in the mode that it was in."""
    modes = [(inner, inner.training) for module in modules for inner in module.modules()]
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for inner, mode in modes:
            inner.training = mode
