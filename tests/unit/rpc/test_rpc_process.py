"""How a service's process is told to end."""

from __future__ import annotations

import signal
import subprocess
import sys

PROGRAM = """
import signal, sys, threading
from phalanx.rpc.process import wait_in_main

told = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: told.set())
threading.Thread(target=threading.Event().wait, daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # as if the kernel had chosen the other thread
sys.stdout.write("ready\\n")
sys.stdout.flush()
wait_in_main(told)
"""


def test_signal_that_another_thread_was_given_ends_the_wait_of_the_main_one():
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()
