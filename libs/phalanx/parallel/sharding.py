"""Data parallelism by fully_shard (FSDP2) at any dp size, one included: fp32 masters, ZeRO stages, and who holds which
part. Weights that are whole and of one type go without it (`parallel.whole`).

ZeRO 1 keeps parameters whole within a step and reduces gradients with the last micro-batch; 2 keeps them whole and
reduces with each; 3 frees them after each block's forward and reduces with each. In a pipeline torch keeps a stage's
parameters from its first backward on and reduces once, whatever the stage of ZeRO: there they are whole within a step,
so that each is gathered once and not for each micro-batch. Gradients are sums: the loss is
already divided by the global count of valid tokens.

Offloaded, masters and reduced gradients lie in the host's memory, and so does the optimizer's state, which follows
them: weights go to the device block by block as they are gathered, gradients come back as they are reduced (Ren et al.
2021, "ZeRO-Offload", arXiv 2101.06840, section 4, for any stage).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from phalanx.core.box import Box, HeldTensor
from phalanx.models.experts import Experts, Router, stacked_names, stored_name
from phalanx.parallel.compiler import write_whole_files
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.recompute import recomputing
from phalanx.parallel.tensor import TensorSlices
from phalanx.spec.parallel import ActivationCheckpoint


def frees_weights(zero: int, *, pipelined: bool) -> bool:
    """Whether a block's whole parameters are freed after its forward."""
    return zero == 3 and not pipelined


def shard(
    module: nn.Module,
    mesh: Mesh,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    *,
    frees: bool,
    offloaded: bool = False,
    within_replica: bool = False,
) -> None:
    """Shard each of `module.layers` (where it has any) and then the rest of it, in place, on the mesh's data axes.
    frees: see `frees_weights`. offloaded: what is sharded lies in the host's memory, page-locked beside a GPU.
    within_replica: gradients are sums over one replica, which others are nothing to here.
    """
    data_mesh = mesh.data_mesh(within_replica=within_replica)
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    offload = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda") if offloaded else OffloadPolicy()
    shard_one = partial(
        fully_shard,
        mesh=data_mesh,
        mp_policy=policy,
        offload_policy=offload,
        ignored_params=set(whole_parameters(module)),
    )
    for experts in (inner for inner in module.modules() if mesh.ep > 1 and isinstance(inner, Experts)):
        expert_mesh = mesh.expert_mesh(within_replica=within_replica)
        shard_one(experts, mesh=expert_mesh, reshard_after_forward=frees)
    for block in blocks_of(module):
        shard_one(block, reshard_after_forward=frees)
    shard_one(module, reshard_after_forward=False)
    for sharded in sharded_modules(module):
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)


def whole_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Parameters that every data rank holds whole, in fp32: the routers' biases, which no gradient reaches."""
    routers = (inner for inner in module.modules() if isinstance(inner, Router))
    return [router.selection_bias for router in routers if router.selection_bias is not None]


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model or a stage: its `layers` (ModuleDict, ModuleList or Sequential), none where it has
    no such.
    """
    return [block for _, block in _numbered_blocks(module)]


def _numbered_blocks(module: nn.Module) -> list[tuple[int, nn.Module]]:
    """Blocks with their numbers: in the whole model, where the stage names them so, else in this module."""
    layers = getattr(module, "layers", None)
    if not isinstance(layers, nn.ModuleDict | nn.ModuleList | nn.Sequential):
        return []
    named = list(layers.named_children())
    return [(int(name) if name.isdecimal() else place, block) for place, (name, block) in enumerate(named)]


def prepare_blocks(module: nn.Module, recompute: ActivationCheckpoint, *, compiled: bool, splits: bool = False) -> None:
    """Make blocks compute their inside again in backward, or compile them, without a wrapper that changes names.
    splits: see `recomputing`.
    """
    if compiled:
        write_whole_files()
    for number, block in _numbered_blocks(module):
        forward = torch.compile(block.forward) if compiled else block.forward
        mode = recompute.mode if number % recompute.every == 0 else "none"
        block.forward = recomputing(forward, mode, splits=splits)


def sharded_modules(module: nn.Module) -> Iterator[FSDPModule]:
    """Every module inside (and with) this one that fully_shard took."""
    return (inner for inner in module.modules() if isinstance(inner, FSDPModule))


def materialise(root: nn.Module, device: torch.device, *, offloaded: bool = False) -> None:
    """Allocate the shards, uninitialised, with the very storage that training will use: on the device, or offloaded in
    the host's memory. Buffers are on the device.

    fully_shard pads uneven shards at its lazy initialisation, which replaces their storage: it runs here, so that the
    local tensors handed out afterwards stay the live ones.
    """
    root.to_empty(device="cpu" if offloaded else device)
    if offloaded:
        for bias in whole_parameters(root):
            bias.data = torch.empty_like(bias, device=device)
        for inner in root.modules():
            for name, buffer in inner.named_buffers(recurse=False, remove_duplicate=False):
                inner._buffers[name] = torch.empty_like(buffer, device=device)
    fully_shard.state(root)._lazy_init()  # type: ignore[attr-defined]


def set_micro_batch(root: nn.Module, zero: int, *, is_last: bool) -> None:
    """Prepare the next forward and backward of a loop over micro-batches without a pipeline."""
    assert isinstance(root, FSDPModule), "shard() comes first"
    root.set_requires_gradient_sync(is_last or zero > 1)
    root.set_reshard_after_backward(is_last or zero == 3)
    root.set_is_last_backward(is_last)


def reshard(root: nn.Module) -> None:
    """Free every whole parameter, so that the next forward gathers what the optimizer wrote; also what was gathered
    ahead for a block that then did not run.
    """
    for sharded in sharded_modules(root):
        for group in sharded._get_fsdp_state()._fsdp_param_groups:
            group.wait_for_unshard()
        sharded.reshard()


def local_of(tensor: Tensor) -> Tensor:
    """The plain local part of a parameter or gradient, aliasing its storage: fully_shard turns each into a DTensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True, slots=True)
class Held:
    """What a rank holds of a tensor of the model: a parameter's local part, or where experts are stacked its row for
    one of them.
    """

    tensor: HeldTensor
    parameter: nn.Parameter
    row: int | None = None

    def gradient(self) -> Tensor | None:
        """As `ParallelModel.gradients`."""
        if not self.parameter.requires_grad:
            return None
        if self.parameter.grad is None:
            return torch.zeros_like(self.tensor.local)
        local = local_of(self.parameter.grad)
        return local if self.row is None else local[self.row]


def held_tensors(
    root: nn.Module, parameters: Iterable[tuple[str, nn.Parameter]], slices: TensorSlices, mesh: Mesh
) -> list[Held]:
    """What this rank holds of each of these parameters of `root`, by name: plain local fp32 tensors that alias the
    masters.
    """
    found: list[Held] = []
    whole, stacked = {id(bias) for bias in whole_parameters(root)}, stacked_names(root)
    for name, parameter in parameters:
        if id(parameter) in whole:
            found.append(Held(_held_whole(name, parameter, slices, mesh), parameter))
            continue
        apart = mesh.ep if name in stacked else 1
        held = _held(name, parameter, slices, mesh, mesh.shard_size // apart, mesh.shard_rank // apart)
        found += _by_expert(held, parameter) if name in stacked else [Held(held, parameter)]
    return found


def _by_expert(held: HeldTensor, parameter: nn.Parameter) -> list[Held]:
    box = Box(held.box.offset[1:], held.box.shape[1:])
    return [
        Held(
            replace(
                held,
                name=stored_name(held.name, held.box.offset[0] + row),
                global_shape=held.global_shape[1:],
                box=box,
                local=held.local[row],
            ),
            parameter,
            row,
        )
        for row in range(held.box.shape[0])
    ]


def _held_whole(name: str, parameter: nn.Parameter, slices: TensorSlices, mesh: Mesh) -> HeldTensor:
    replica = mesh.coordinates["dp_replicate"] * mesh.shard_size + mesh.shard_rank
    tp, num_readers = mesh.sizes["tp"], mesh.sizes["dp_replicate"] * mesh.shard_size
    shape, box = slices.shapes[name], slices.boxes[name]
    return HeldTensor(name, shape, box, parameter.detach(), replica * tp + mesh.coordinates["tp"], num_readers * tp)


def _held(
    name: str, parameter: nn.Parameter, slices: TensorSlices, mesh: Mesh, num_shards: int, shard: int
) -> HeldTensor:
    local, global_shape, tensor_box = local_of(parameter), slices.shapes[name], slices.boxes[name]
    rows = tensor_box.shape[0]
    rows_per_shard = -(-rows // num_shards)
    start = min(shard * rows_per_shard, rows)
    stop = min(start + rows_per_shard, rows)
    box = Box((tensor_box.offset[0] + start, *tensor_box.offset[1:]), (stop - start, *tensor_box.shape[1:]))
    assert tuple(local.shape) == box.shape or local.numel() == box.num_elements == 0, (name, local.shape, box)
    replica, num_replicas = mesh.coordinates["dp_replicate"], mesh.sizes["dp_replicate"]
    # What is not cut over tp each tp rank holds, a head of keys or values those whose queries need it.
    holders = mesh.sizes["tp"] if tensor_box.shape == global_shape else slices.copies.get(name, 1)
    replica, num_replicas = replica * holders + mesh.coordinates["tp"] % holders, num_replicas * holders
    return HeldTensor(name, global_shape, box, local.detach().view(box.shape), replica, num_replicas)
