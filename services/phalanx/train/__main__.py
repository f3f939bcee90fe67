"""`python -m phalanx.train --config FILE`: the train service as a process, until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.rpc import read_service
from phalanx.train.run import running

USER_ERROR, FAILED = 2, 1
_LOG = logging.getLogger("phalanx.train")


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves; the exit code is 2 for what a user must change, 1 for what failed outside."""
    parser = argparse.ArgumentParser(prog="python -m phalanx.train", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="the service's file, as `phalanx up` writes it")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    is_replaced = threading.Event()

    def replaced() -> None:
        is_replaced.set()
        ended.set()

    try:
        with running(read_service(given.config), replaced) as server:
            _LOG.info("serving at %s, metrics at %s", server.address, server.metrics_address or "none")
            ended.wait()
        if is_replaced.is_set():
            raise PhalanxError(
                "train",
                expected="to be the only train process on its storage, and a later one has begun",
                remedy="nothing, where it was replaced; else give each cluster storage of its own",
            )
    except PhalanxError as error:
        sys.stderr.write("".join(f"phalanx: {line}\n" for line in str(error).splitlines()))
        return USER_ERROR
    except OutsideError as error:
        sys.stderr.write(f"phalanx: {error}\n")
        return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
