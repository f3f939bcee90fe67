"""`python -m phalanx.data.prepare.worker`: one worker of a pool; JSON lines in, JSON lines out.

In: the work order, then one task a line. Out: `ready`; of a task `working` now and then, and `finished`; `refused`
(a user's error), `outside` (something broke) or `bug` (a traceback), after which the worker ends.
It ends at once, whatever it is doing, when its standard input does: nothing outlives whoever started it.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.data.prepare.making import Task, WorkOrder
from phalanx.data.prepare.progress import Figures

_TELL_EVERY_S = 0.25


def main() -> int:
    """The worker's exit code."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else is printed is no answer
    lines = _lines()

    def say(kind: str, **fields: Any) -> None:
        answers.write(json.dumps({"kind": kind, **fields}) + "\n")

    try:
        maker = WorkOrder.from_json(next(lines)).maker()
        say("ready")
        for line in lines:
            task = Task.from_json(line)
            told = [time.monotonic()]

            def tell(figures: Figures, told: list[float] = told) -> None:
                now = time.monotonic()
                if now - told[0] >= _TELL_EVERY_S:
                    told[0] = now
                    say("working", figures=asdict(figures))

            say("finished", figures=asdict(maker.make(task, tell)))
    except PhalanxError as error:
        shown = error.value if isinstance(error.value, int | float | None) else str(error.value)
        say("refused", where=error.where, value=shown, expected=error.expected, remedy=error.remedy)
        return 2
    except OutsideError as error:
        say("outside", message=str(error))
        return 1
    except Exception:  # noqa: BLE001 - raised again, with this traceback, by whoever started us
        say("bug", traceback=traceback.format_exc())
        return 1
    return 0


def _lines() -> Iterator[str]:
    """Lines of standard input, read by a thread that ends the process at their end."""
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            waiting.put(line)
        os._exit(0)

    threading.Thread(target=read, name="phalanx-orders", daemon=True).start()
    return iter(waiting.get, None)


if __name__ == "__main__":
    sys.exit(main())
