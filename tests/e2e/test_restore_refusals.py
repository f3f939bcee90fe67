"""What a run does with a checkpoint that it cannot take as it is: damaged bytes, and tensors that are missing."""

from __future__ import annotations

from pathlib import Path

from support.jobs import assert_proven, job_folder, lineage_of, newest_tensors, run_here, user_job, write_job

from phalanx.gang import ForkServer
from phalanx.lineage import CheckpointRef
from phalanx.lineage.damage import damage_reports

GAIN = ("model.gain", "optim.gain.exp_avg", "optim.gain.exp_avg_sq")


def test_run_whose_newest_checkpoint_is_damaged_goes_on_from_the_one_before(
    corpus: str, server: ForkServer, tmp_path: Path
) -> None:
    """Case 7: the attempt that finds it ends by name, the journal remembers, the next attempt has the older parent."""
    path = write_job(tmp_path, corpus, steps=8)
    assert run_here(path, server, "training.steps=4").outcome.ok
    damaged = max((job_folder(path) / "a00000001/s00000004/objects").iterdir(), key=lambda file: file.stat().st_size)
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.chmod(0o600)
    damaged.write_bytes(data)
    run = run_here(path, server, "cluster.nproc=3", "parallel.zero=3")
    assert run.outcome is not None and run.outcome.ok, run.outcome
    told = {event.fields["checkpoint"]: event.fields["why"] for event in run.of("damage")}
    assert told.keys() == {"attempt 1 step 4"} and damaged.name in told["attempt 1 step 4"]
    assert "tensor" in told["attempt 1 step 4"]
    parents = [attempt.parent for attempt in lineage_of(path).attempts()]
    assert parents == [None, CheckpointRef(1, 4), CheckpointRef(1, 2)]
    assert damage_reports(lineage_of(path)).keys() == {CheckpointRef(1, 4)}
    assert_proven(path, 8)


def test_run_with_a_tensor_more_than_its_checkpoint_is_refused_until_it_is_named(
    corpus: str, server: ForkServer, tmp_path: Path
) -> None:
    """Case 5: never silently from scratch; what is named begins as in a new job, all else goes on."""
    path = user_job(tmp_path, corpus, "Grown", once=True)
    assert run_here(path, server, "training.steps=2").outcome.ok
    before = newest_tensors(path)
    (tmp_path / "happened").touch()
    refused = run_here(path, server, f'checkpoint.partial="{",".join(GAIN[:2])}"')
    assert refused.outcome is not None and not refused.outcome.ok and refused.outcome.first_cause is not None
    assert refused.outcome.first_cause.kind == "user_error"
    assert GAIN[2] in refused.outcome.first_cause.message and "--partial" in refused.outcome.first_cause.message
    assert newest_tensors(path).keys() == before.keys()
    named = run_here(path, server, f'checkpoint.partial="{", ".join(GAIN)}"', "training.steps=4")
    assert named.outcome is not None and named.outcome.ok, named.outcome
    after = newest_tensors(path)
    assert after.keys() - before.keys() == set(GAIN)
    assert abs(after["model.gain"] - 1).max() < 0.1
    assert abs(after["model.head.weight"] - before["model.head.weight"]).max() < 0.1
    assert run_here(path, server, f'checkpoint.partial="{",".join(GAIN)}"').outcome.ok
    assert_proven(path, 6)
