"""Ranks whose trace shows what of their communication began when."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parity import layout_of, make_job, slot_batch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from phalanx.gang.context import RankContext
from phalanx.gang.rendezvous import init_process_group
from phalanx.parallel import ParallelModel, build_mesh


def run_traced(context: RankContext) -> None:
    """Entry of the ranks: names of the events on the training thread in the order of their begin, of each case's second
    step, `wait` for each time that it waits for a collective.
    """
    torch.set_num_threads(1)
    init_process_group(context, 60.0)
    wait = dist.Work.wait

    def told_wait(work: dist.Work, *arguments: Any) -> Any:
        with record_function("wait"):
            return wait(work, *arguments)

    dist.Work.wait = told_wait  # type: ignore[method-assign, assignment]
    for name, case in context.arguments["cases"].items():
        context.report("result", **{name: traced(case | {"world_size": context.world_size})})
    dist.destroy_process_group()


def traced(case: dict[str, Any]) -> list[str]:
    """A step that is profiled, after one that is not."""
    job = make_job(case)
    layout = layout_of(job, case["world_size"])
    mesh = build_mesh(layout, "cpu")
    model = ParallelModel(job, layout, mesh, "cpu", overlap=case["overlap"])
    batch, valid_tokens = slot_batch(mesh.dp_rank, mesh.dp_size, 2, 1, job.model.decoder.vocab_size)
    model.forward_backward(batch, valid_tokens)
    model.zero_gradients()
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        model.forward_backward(batch, valid_tokens)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    spans = [each for each in events if each.get("ph") == "X"]
    threads = {each["tid"] for each in spans if each["name"] == "FSDP::root_pre_forward"}
    ours = sorted((each for each in spans if each["tid"] in threads), key=lambda each: float(each["ts"]))
    return [each["name"] for each in ours]


class Skipping(nn.Module):
    """Leaves its second block out in evaluation."""

    def __init__(self, vocab_size: int, dim: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList([nn.Linear(dim, dim), nn.Linear(dim, dim)])
        self.head = nn.Linear(dim, vocab_size)

    def forward(self, tokens: Tensor, position_ids: Tensor, document_ids: Tensor | None) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers if self.training else self.layers[:1]:
            hidden = hidden + layer(hidden).tanh()
        return self.head(hidden)  # type: ignore[no-any-return]


def run_skipping(context: RankContext) -> None:
    """Entry of the ranks: losses of two steps with an update between them, after which an evaluation leaves a block
    out, or (`evaluated` false) none takes place.
    """
    from parity import make_user_job

    torch.set_num_threads(1)
    init_process_group(context, 60.0)
    for is_evaluated in (False, True):
        job = make_user_job({"class": "overlap_ranks:Skipping", "world_size": context.world_size})
        layout = layout_of(job, context.world_size)
        mesh = build_mesh(layout, "cpu")
        model = ParallelModel(job, layout, mesh, "cpu")
        batch, valid_tokens = slot_batch(mesh.dp_rank, mesh.dp_size, 1, 1, 24)
        losses = []
        for _ in range(3):
            losses.append(model.forward_backward(batch, valid_tokens))
            model.finish_gradients()
            if is_evaluated:
                model.evaluate(batch, valid_tokens)
            for held, gradient in zip(model.parameters(), model.gradients(), strict=True):
                if gradient is not None:
                    held.local.sub_(gradient)
            model.zero_gradients()
        summed = torch.stack(losses)
        dist.all_reduce(summed)
        context.report("result", **{str(is_evaluated): summed.tolist()})
    dist.destroy_process_group()
