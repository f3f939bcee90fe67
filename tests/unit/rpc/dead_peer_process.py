"""A process that a test stops by SIGSTOP: `serve FOLDER` prints its address, `follow FOLDER ADDRESS` holds a stream."""

from __future__ import annotations

import sys
from pathlib import Path

import rpc_kit as kit

from phalanx.rpc import connect, ended
from phalanx.rpc.testing import make_cluster


def main() -> None:
    cluster = make_cluster(Path(sys.argv[2]))
    if sys.argv[1] == "serve":

        def count(request, context):
            yield kit.pb.Cursor(at=1)
            ended(context).wait()

        server = kit.serve_echo(cluster, kit.Echo(Count=count))
        sys.stdout.write(server.address + "\n")
        sys.stdout.flush()
        server.wait()
    else:
        with connect("echo", sys.argv[3], cluster.credentials()) as channel:
            for item in kit.stub(channel).Count(kit.pb.Cursor()):
                sys.stdout.write(f"{item.at}\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
