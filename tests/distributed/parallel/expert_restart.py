"""Ranks that train experts in one layout, save, and restore the checkpoint into layouts of other ep sizes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from parity import gradient_norm, layout_of, make_job, slot_batch
from replica_training import write_whole

from phalanx.core.box import HeldTensor
from phalanx.gang.context import RankContext
from phalanx.gang.rendezvous import init_process_group
from phalanx.lineage import CheckpointRef, Lineage, LoaderState, Manifest
from phalanx.objects import ObjectStore, open_store
from phalanx.parallel import ParallelModel, build_mesh, multiple_of
from phalanx.snapshot import commit
from phalanx.snapshot.peers import GlooPeers
from phalanx.snapshot.restore import restore
from phalanx.snapshot.writer import Writer
from phalanx.trainer.optimizer import Optimizer
from phalanx.trainer.session import state_of

_EXPERT = re.compile(r"model\.layers\.0\.feed_forward\.experts\.(\d+)\.w1\.")
DIGEST = "sha256:" + "0" * 64


def run_restart(context: RankContext) -> None:
    """Entry of the ranks: trains, writes what was learnt whole and saves it in the first of `cases` (by name); restores
    it into each of the others, writing whole what that holds. Files lie in `folder` by the names of the cases. Reports
    of which experts of layer 0 a rank holds something.
    """
    torch.set_num_threads(1)
    init_process_group(context, 60.0)
    store, peers = open_store(context.arguments["url"]), GlooPeers(60)
    for number, (name, case) in enumerate(context.arguments["cases"].items()):
        held = _restored(case, context.world_size, store, peers) if number else _trained(case, context, store)
        write_whole(held, f"{context.arguments['folder']}/{name}.safetensors")
        experts = {found[1] for each in held if each.local.numel() and (found := _EXPERT.match(each.name))}
        context.report("result", **{name: sorted(map(int, experts))})
    peers.close()
    dist.destroy_process_group()


def _trained(case: Mapping[str, Any], context: RankContext, store: ObjectStore) -> list[HeldTensor]:
    model, optimizer = _built(case, context.world_size, initialise=True)
    mesh, job = model.mesh, make_job(case | {"world_size": context.world_size})
    divisor = multiple_of(job.parallel.schedule, mesh.sizes["pp"])
    batch, valid_tokens = slot_batch(mesh.dp_rank, mesh.dp_size, 1, divisor, job.model.decoder.vocab_size)
    for _ in range(2):
        model.forward_backward(batch, valid_tokens)
        model.finish_gradients()
        optimizer.update(model.gradients(), gradient_norm(model), 1.0)
        model.zero_gradients()
    held = state_of(model, optimizer)
    if context.rank == 0:
        Lineage(store).open_attempt(code_digest=DIGEST, identity_digest=DIGEST, placement={})
    dist.barrier()
    Writer(store, context.rank, context.world_size).save(1, 2, held).wait(60)
    dist.barrier()
    if context.rank == 0:
        draft = Manifest(1, 2, 1, DIGEST, DIGEST, DIGEST, DIGEST, LoaderState(2, 16), {}, (), ())
        commit(Lineage(store), store, draft, context.world_size, 30)
    dist.barrier()
    return held


def _restored(case: Mapping[str, Any], world_size: int, store: ObjectStore, peers: GlooPeers) -> list[HeldTensor]:
    """What another layout holds after the restore; before it everything is NaN, so that what is left out shows."""
    model, optimizer = _built(case, world_size, initialise=False)
    held = state_of(model, optimizer)
    for each in held:
        each.local.fill_(torch.nan)
    restore(store, Lineage(store).manifest(CheckpointRef(1, 2)), held, peers=peers)
    return held


def _built(case: Mapping[str, Any], world_size: int, *, initialise: bool) -> tuple[ParallelModel, Optimizer]:
    job = make_job(case | {"world_size": world_size})
    layout = layout_of(job, world_size)
    model = ParallelModel(
        job, layout, build_mesh(layout, "cpu", schedule=job.parallel.schedule), "cpu", initialise=initialise
    )
    return model, Optimizer(job, model.parameters())
