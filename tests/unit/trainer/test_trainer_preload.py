"""What a fork server holds: nothing that has threads, or would have them once it is used."""

from __future__ import annotations

import json
import subprocess
import sys

from phalanx.trainer.local import PRELOAD

PROGRAM = """
import importlib, json, sys
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
import phalanx.trainer.agent_control
rooms = {name.partition(".")[0] for name in sys.modules} | {".".join(name.split(".")[:2]) for name in sys.modules}
print(json.dumps(sorted(rooms & {"grpc", "google", "opentelemetry", "phalanx.rpc", "phalanx.api"})))
"""


def test_fork_server_holds_no_grpc_and_neither_does_the_control_of_an_agent_before_it_is_used() -> None:
    command = [sys.executable, "-c", PROGRAM, json.dumps(PRELOAD)]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    assert json.loads(said.stdout) == []
