"""The jobs of the demo: the main one in its two layouts, its single-process reference, and the two-epoch job on a small
corpus.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from phalanx.spec import Job, load_job

SECOND_LAYOUT = (
    "parallel.pp=1",
    "parallel.dp_shard=4",
    "parallel.tp=1",
    'parallel.schedule="1f1b"',
    "parallel.stages_per_rank=1",
    "cluster.nproc=4",
)
ONE_PROCESS = (
    "parallel.pp=1",
    "parallel.dp_shard=1",
    "parallel.tp=1",
    'parallel.schedule="1f1b"',
    "parallel.stages_per_rank=1",
    "parallel.local_batch_size=8",
    "cluster.nproc=1",
)
REFERENCE_STEPS = 10
SMALL_WINDOWS_PER_STEP = 64


def write_job(folder: Path) -> Path:
    """The main job file, with the demo's own folders filled in."""
    template = resources.files(__package__).joinpath("job.toml").read_text()
    path = folder / "job.toml"
    path.write_text(template.replace("@ROOT@", folder.as_uri()).replace("@FOLDER@", str(folder)))
    return path


def reference_job(path: Path) -> Job:
    """The first steps of the main job in one process; its schedule is the main job's."""
    total_steps = load_job(path).training.steps
    overrides = (
        'job.name="demo-reference"',
        f"training.steps={REFERENCE_STEPS}",
        f"lr_scheduler.total_steps={total_steps}",
        "validation.freq=0",
        f"checkpoint.interval={REFERENCE_STEPS}",
    )
    return load_job(path, [*ONE_PROCESS, *overrides])


def two_epoch_job(path: Path, folder: Path, epoch_tokens: int) -> Job:
    """One process over the small corpus, in as many steps as two whole epochs take."""
    seq_len = load_job(path).training.seq_len
    steps = -(-2 * epoch_tokens // (seq_len * SMALL_WINDOWS_PER_STEP))
    model = {"dim": 64, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2, "ffn_dim": 128, "vocab_size": 1024}
    overrides = (
        'job.name="demo-two-epochs"',
        f'data.train="{folder.as_uri()}/small/train"',
        f"training.steps={steps}",
        f"training.global_batch_size={SMALL_WINDOWS_PER_STEP}",
        "validation.freq=0",
        f"checkpoint.interval={steps}",
        *(f"model.args.{name}={value}" for name, value in model.items()),
    )
    return load_job(path, [*ONE_PROCESS, *overrides])
