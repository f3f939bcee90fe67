"""Makes docs/pictures/page.png: the monitor's page in Chromium over a synthetic run on two nodes that lost a node, went
on in another layout, and lost a rank.

    python scripts/page_picture.py [--dark] [OUT.png]
"""

from __future__ import annotations

import argparse
import math
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from phalanx.api.agent.v1 import record_pb2 as record_pb
from phalanx.api.train.v1 import train_service_pb2 as train_pb
from phalanx.monitor.attempts import AttemptFacts, Saved
from phalanx.monitor.attention import AttentiveClock
from phalanx.monitor.board import Board
from phalanx.monitor.gpus import GpuBoard
from phalanx.monitor.rules import Policy
from phalanx.monitor.rules.gpu import GpuReading
from phalanx.monitor.store import MonitorStore
from phalanx.monitor.testing import Told
from phalanx.monitor.view import View
from phalanx.monitor.web.gateway import Page

OUT = Path(__file__).resolve().parent.parent / "docs" / "pictures" / "page.png"
SIZE = {"width": 1400, "height": 1082}
JOB, NUM_STEPS, TOKENS, STEP_S = "projects/default/jobs/1b-web", 12_000, 524_288, 1.07
SAVED_BYTES = 12 * 1_235_814_400  # weights and two moments in fp32
PINNED_STEP = 5000
SAVE_EVERY, EVALUATE_EVERY, WARM_UP = 500, 1000, 400
NODES = {"node-a": range(4), "node-b": range(4, 8)}


class Story:
    """What train would have told, with the times at which it would have happened."""

    def __init__(self) -> None:
        self.told, self.noise = Told(JOB), random.Random(7)
        self.at_s = time.time() - NUM_STEPS * STEP_S

    def whole(self) -> Iterator[Any]:
        """The run so far: three attempts."""
        yield self.event("submitted", "queued", actor="ada")
        yield self.event("preparing", "preparing")
        yield self.event("prepared", "queued", message="1.02 B parameters, 6.3 B tokens, 31 GiB a GPU")
        yield from self.started(1, 0)
        yield from self.steps(1, 3730)
        cause = {
            "kind": record_pb.CAUSE_KIND_NODE_LOSS,
            "message": "node-b is not heard for 150 s",
            "node_id": "node-b",
        }
        yield self.recovering(1, 3730, cause, "attempt 2 from step 3500")
        yield from self.started(2, 3500)
        yield from self.steps(3501, 7000, spike=5210)
        yield self.event("stop_requested", "running", actor="ada", attempt=2, step=7000)
        yield self.event("stopped", "stopped", attempt=2, step=7000, message="committed at step 7000")
        yield self.event("resumed", "queued", actor="ada", message="parallel.tp 2 -> 1, parallel.dp_shard 4 -> 8")
        yield from self.started(3, 7000)
        yield from self.steps(7001, 8320)
        cause = {"kind": record_pb.CAUSE_KIND_PROCESS_DEATH, "rank": 5, "message": "rank 5 was killed by SIGKILL"}
        yield self.recovering(3, 8320, {**cause, "node_id": "node-b", "signal": 9}, "attempt 4 from step 8000")
        yield from self.started(4, 8000)
        yield from self.steps(8001, 9644)
        yield from self.ranks(9644)

    def event(self, kind: str, state: str, **fields: Any) -> train_pb.WatchRecordsResponse:
        told = self.told.event(kind, state, **fields)
        told.event.time.FromNanoseconds(int(self.at_s * 1e9))
        self.at_s += 1.5
        return told

    def recovering(self, attempt: int, step: int, cause: dict[str, Any], message: str) -> Any:
        return self.event(
            "recovering", "recovering", attempt=attempt, step=step, cause=record_pb.Cause(**cause), message=message
        )

    def started(self, attempt: int, step: int) -> Iterator[Any]:
        self.told.attempt = attempt
        placement = [train_pb.Assignment(node_id=node, ranks=ranks) for node, ranks in NODES.items()]
        yield self.event("starting", "starting", attempt=attempt, step=step, placement=placement)
        yield self.told.record(opened=record_pb.Opened(step=step))
        yield self.event("running", "running", attempt=attempt, placement=placement)

    def steps(self, first: int, last: int, spike: int = 0) -> Iterator[Any]:
        for step in range(first, last + 1):
            self.at_s += STEP_S
            yield self.progress(step, jump=0.9 * math.exp(-(step - spike) / 25) if 0 < spike <= step else 0.0)
            if step % SAVE_EVERY == 0:
                stall_s = 0.14 * self.noise.lognormvariate(0, 0.2)
                yield self.told.record(save=record_pb.Save(step=step, stall_s=stall_s, num_skipped=0))
                yield self.event("committed", "running", attempt=self.told.attempt, step=step)
            if step % EVALUATE_EVERY == 0:
                yield self.told.record(evaluation=record_pb.Evaluation(step=step, loss=loss_at(step) + 0.06))

    def progress(self, step: int, jump: float) -> Any:
        tp_cost = 1.0 if self.told.attempt < 3 else 0.93
        step_time_s = STEP_S * tp_cost * self.noise.lognormvariate(0, 0.012)
        warmed = step / WARM_UP if step < WARM_UP else 0.55 + 0.45 * math.cos(math.pi * step / NUM_STEPS)
        progress = record_pb.Progress(
            step=step,
            loss=loss_at(step) + self.noise.gauss(0, 0.025) + jump,
            gradient_norm=(0.35 + 2.5 / (1 + step / 60)) * self.noise.lognormvariate(0, 0.12) + 3 * jump,
            learning_rate=3e-4 * warmed,
            tokens=TOKENS,
            step_time_s=step_time_s,
            data_wait_s=0.011 * self.noise.lognormvariate(0, 0.3),
        )
        return self.told.record(progress=progress)

    def ranks(self, step: int) -> Iterator[Any]:
        for at in range(step - 200, step + 1):
            for rank in (each for ranks in NODES.values() for each in ranks):
                busy_s = 0.36 * self.noise.lognormvariate(0, 0.02)
                yield self.told.record(rank, step_time=record_pb.StepTime(step=at, step_time_s=STEP_S, busy_s=busy_s))
                if at == step:
                    yield self.told.phase("step", at + 1, rank)


def loss_at(step: int) -> float:
    """A loss that falls as that of a small language model."""
    return 1.72 + 9.2 / (1 + step / 18) ** 0.42


def gpu_readings() -> list[GpuReading]:
    """Eight of them, busy."""
    noise, gib = random.Random(3), float(1 << 30)
    return [
        GpuReading(
            node=node,
            index=index,
            uuid=f"GPU-{node}-{index}",
            name="NVIDIA H100 80GB HBM3",
            utilization=noise.uniform(0.95, 0.99),
            memory_used_bytes=noise.uniform(58, 61) * gib,
            memory_total_bytes=79.6 * gib,
            temperature_c=noise.uniform(58, 67),
            power_w=noise.uniform(610, 670),
            sm_clock_mhz=1980,
            xid=0,
            ecc_uncorrectable=0,
        )
        for node in NODES
        for index in range(4)
    ]


def tell(board: Board) -> None:
    """The story, and what storage and train would have said about it."""
    board.change(JOB, lambda run: run.set_spec(NUM_STEPS, Policy()))
    for each in Story().whole():
        board.observe(each)
    first, second = "8 ranks, dp_shard 4, tp 2", "8 ranks, dp_shard 8"
    layouts = {1: first, 2: first, 3: second, 4: second}
    run = board.change(JOB, lambda run: run)
    facts: list[AttemptFacts] = [replace(run.attempts[number], layout=layout) for number, layout in layouts.items()]
    board.change(JOB, lambda run: run.set_facts(facts))
    saved = [
        Saved(each.number, step, is_damaged=False, is_pinned=step == PINNED_STEP, num_bytes=SAVED_BYTES, created_ns=0)
        for each in facts
        for step in each.checkpoints
    ]
    board.change(JOB, lambda run: run.set_checkpoints(saved))
    for incident, _ in list(run.incidents.values()):
        if not incident.outcome:
            board.put_incident(replace(incident, outcome="told; the run goes on"))


def take(address: str, out: Path, scheme: Any) -> None:
    """The page as Chromium shows it."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport=SIZE, color_scheme=scheme)  # type: ignore[arg-type]
        page.goto(f"http://{address}/#{JOB}")
        page.wait_for_selector(".state.running")
        page.wait_for_selector("#gpus tbody tr")
        page.wait_for_selector("#link:text-is('live')")
        page.wait_for_selector("#loss output:not(:empty)")
        page.screenshot(path=out, animations="disabled")
        browser.close()


def main() -> None:
    """Makes the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, nargs="?", default=OUT)
    parser.add_argument("--dark", action="store_true")
    given = parser.parse_args()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, closing(MonitorStore(f"sqlite:///{folder}/db")) as store:
        board, gpus = Board(store, AttentiveClock()), GpuBoard(store)
        tell(board)
        gpus.put("dcgm-exporter node-a:9400, node-b:9400", gpu_readings(), "8 GPUs")
        with closing(Page(View(board, gpus, store), "127.0.0.1:0")) as page:
            take(page.address, given.out, "dark" if given.dark else "light")


if __name__ == "__main__":
    main()
