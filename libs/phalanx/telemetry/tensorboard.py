"""TensorBoard event files in `<folder>/tensorboard`, by TensorBoard's own writer; torch is not needed.

Each start of the job writes a file of its own. What a killed process had not yet written is unknown to it, so the
newest step is read back from the files, up to the last whole record of each.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.telemetry.sink import Values, require


class TensorBoard:
    """Scalars by step, and the configuration as a text once."""

    name = "tensorboard"

    def __init__(self, folder: Path) -> None:
        require("tensorboard", key="[metrics] enable_tensorboard", extra="tensorboard")
        self._folder = folder / "tensorboard"
        self._writer: Any = None

    def open(self, run_id: str, config: Mapping[str, Any]) -> int:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        newest = newest_step(self._folder)
        self._writer = EventFileWriter(str(self._folder), max_queue_size=100, flush_secs=10)
        if newest < 0:
            shown = json.dumps(config, indent=2, default=str)
            self._write(0, [_text("config", f"run {run_id}\n\n```json\n{shown}\n```")])
        return newest

    def log(self, step: int, values: Values) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._write(step, [Summary.Value(tag=name, simple_value=value) for name, value in values.items()])

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _write(self, step: int, values: list[Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))


def newest_step(folder: Path) -> int:
    """The highest step with a scalar in a folder's event files, -1 for none; a file that ends within a record is read
    up to it.
    """
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    newest = -1
    for path in sorted(folder.glob("events.out.tfevents.*")):
        for event in LegacyEventFileLoader(str(path)).Load():
            if any(value.WhichOneof("value") == "simple_value" for value in event.summary.value):
                newest = max(newest, event.step)
    return newest


def _text(tag: str, text: str) -> Any:
    from tensorboard.plugins.text.summary_v2 import text_pb

    return text_pb(tag, text).value[0]
