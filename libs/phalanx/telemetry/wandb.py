"""Weights & Biases: run id = job id, continued by every later start of the job; WANDB_MODE, WANDB_BASE_URL and the like
hold.

A run that lives on a server cannot be read back when offline, so the newest step is kept in `<folder>/wandb-step.json`,
which is written *before* the row is handed over: a process killed in between loses that one row, and no row ever
appears twice.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.core.errors import OutsideError
from phalanx.telemetry.sink import Values, require


class WeightsAndBiases:
    """One run of one project; offline runs lie in `<folder>/wandb` until `wandb sync`."""

    name = "wandb"

    def __init__(self, folder: Path, project: str) -> None:
        require("wandb", key="[metrics] enable_wandb", extra="wandb")
        self._folder, self._project = folder, project
        self._high_water = HighWater(folder / "wandb-step.json")
        self._run: Any = None

    def open(self, run_id: str, config: Mapping[str, Any]) -> int:
        import wandb

        self._folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=self._project,
            id=run_id,
            name=run_id,
            resume="allow",
            dir=str(self._folder),
            config=dict(config),
            settings=wandb.Settings(console="off", silent=True),
        )
        return self._high_water.read(run_id)

    def log(self, step: int, values: Values) -> None:
        self._high_water.write(self._run.id, step)
        self._run.log(dict(values), step=step)

    def flush(self) -> None:
        """Nothing to do: the library sends in the background, and only `close` waits for it."""

    def close(self) -> None:
        self._run.finish()


class HighWater:
    """The newest step of a run in a small file, replaced as a whole."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, run_id: str) -> int:
        """-1 when there is no file, or one of another run. Raises OutsideError for a file that is not ours."""
        try:
            state = json.loads(self._path.read_bytes())
            return int(state["step"]) if state["run"] == run_id else -1
        except FileNotFoundError:
            return -1
        except (ValueError, KeyError, TypeError) as error:
            raise OutsideError(f"{self._path}: not a step file; delete it to log every step again") from error

    def write(self, run_id: str, step: int) -> None:
        beside = self._path.with_name(f"{self._path.name}.{os.getpid()}.tmp")
        with beside.open("wb") as file:
            file.write(json.dumps({"run": run_id, "step": step}).encode())
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self._path)
