"""The names under which a run's figures and phases appear everywhere: sinks, progress lines, reports of ranks."""

from __future__ import annotations

from enum import StrEnum


class Metric(StrEnum):
    """Figures of a step. Times in seconds, on one rank's monotonic clock."""

    LOSS = "train/loss"
    GRADIENT_NORM = "train/gradient_norm"
    LEARNING_RATE = "train/learning_rate"
    VALID_TOKENS = "train/valid_tokens"
    SKIPPED_UPDATES = "train/skipped_updates"
    TOKENS_PER_SECOND = "speed/tokens_per_second"
    MFU = "speed/mfu"
    STEP_TIME_S = "speed/step_time_s"
    DATA_WAIT_S = "speed/data_wait_s"
    REPLICA_BYTES_PER_TOKEN = "speed/replica_bytes_per_token"
    SAVE_STALL_S = "checkpoint/stall_s"
    EVALUATION_LOSS = "evaluation/loss"
    EVALUATION = "evaluation"  # prefix: evaluation/<name> of each of `metrics.fn`
    EXPERT_LOAD = "experts"  # prefix: experts/<figure> of `phalanx.core.expert_load.ExpertLoad`
    LOSS_SCALE = "train/loss_scale"
    EPOCHS = "data/epochs"  # followed by / and the name of a mixture's source: passes over it


class Phase(StrEnum):
    """What a rank is in; each has its own deadline in the job file's [deadlines]."""

    INIT = "init"
    RESTORE = "restore"
    FIRST_STEP = "first_step"
    STEP = "step"
    SAVE = "save"
    EVALUATION = "evaluation"
    STOP = "stop"
