"""Whole runs whose replicas train by themselves between meetings: stopped, continued, in other layouts."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
from support.jobs import (
    PHALANX,
    Command,
    assert_proven,
    lineage_of,
    losses_of,
    newest_tensors,
    run_here,
    write_job,
)

from phalanx.gang import Event, ForkServer
from phalanx.lineage import Lineage
from phalanx.snapshot import load
from phalanx.spec import load_job
from phalanx.trainer.local import run_job
from phalanx.trainer.places import job_store
from phalanx.trainer.preflight import Origin, prepare

LOCAL = "[local_updates]\nsteps = 2\n"
REPLICAS = ("parallel.dp_replicate=2", "parallel.dp_shard=1", "parallel.zero=1")


def run(path: Path, server: ForkServer, *overrides: str) -> None:
    outcome = run_here(path, server, *overrides).outcome
    assert outcome is not None and outcome.ok, outcome


def sent(path: Path) -> dict[int, int]:
    rows = (steps for _, steps in lineage_of(path, *REPLICAS).records.live())
    return {int(step): int(sent) for each in rows for step, sent in zip(each.step, each.replica_bytes, strict=True)}


def test_resume_at_the_end_of_a_round_is_bit_for_bit_and_any_layout_goes_on(
    corpus: str, server: ForkServer, tmp_path: Path
) -> None:
    paths = []
    for name in ("whole", "resumed"):
        (tmp_path / name).mkdir()
        paths.append(write_job(tmp_path / name, corpus, steps=8, more=LOCAL))
    whole, resumed = paths
    run(whole, server, *REPLICAS)
    for steps in (4, 8):
        run(resumed, server, *REPLICAS, f"training.steps={steps}")
    assert losses_of(whole) == losses_of(resumed) and len(losses_of(whole)) == 8
    expected, found = newest_tensors(whole), newest_tensors(resumed)
    assert expected.keys() == found.keys() and any(name.endswith(".outer_momentum") for name in expected)
    for name, values in expected.items():
        np.testing.assert_array_equal(values, found[name], err_msg=name)
    num_weights = sum(values.size for name, values in expected.items() if name.startswith("model."))
    assert sent(whole) == {step: 0 if step % 2 else 2 * 3 * 4 * num_weights for step in range(1, 9)}
    for steps, layout in ((10, ("cluster.nproc=1",)), (12, ("cluster.nproc=4", *REPLICAS, "parallel.tp=2"))):
        run(resumed, server, f"training.steps={steps}", "training.global_batch_size=8", *layout)
    assert_proven(resumed, 12)
    losses = losses_of(resumed)
    assert losses[12] < losses[1] and all(np.isfinite(list(losses.values())))


def test_order_to_stop_waits_for_the_end_of_the_round(corpus: str, tmp_path: Path) -> None:
    path = write_job(tmp_path, corpus, steps=5000, more="[local_updates]\nsteps = 50\n")
    overrides = ["--set", "checkpoint.interval=1000", *(word for key in REPLICAS for word in ("--set", key))]
    with Command([PHALANX, "run", path, "--json", *overrides]) as command:
        command.wait_for("step 3/")
        command.signal(signal.SIGINT)
        finished = command.finish()
    assert finished.code == 130, finished.err
    assert json.loads(finished.out)["steps"] % 50 == 0
    assert "bytes/token between replicas" in finished.err


def test_fork_begins_local_updates_and_another_leaves_them_again(
    corpus: str, server: ForkServer, tmp_path: Path
) -> None:
    path = write_job(tmp_path, corpus, steps=2, nproc=1)
    run(path, server)
    origin = load_job(path)
    for name, steps, keys in (("local", 4, ("local_updates.steps=2",)), ("plain", 6, ())):
        job = load_job(path, (f"job.name={name}", f"training.steps={steps}", *keys))
        newest = Lineage(job_store(origin)).checkpoints()[-1]
        prepared = prepare(job, 1, origin=Origin(origin, newest.attempt, newest.step))
        events: list[Event] = []
        outcome = run_job(prepared, server, events.append)
        assert outcome.ok, events
        assert Lineage(job_store(job)).checkpoints()[-1].step == steps
        stored = load(f"{job.job.storage}/projects/default/jobs/{name}")
        assert any(each.endswith(".outer_momentum") for each in stored) == (name == "local")
        origin = job
