"""`unshare --map-root-user --net python behind_switch.py NUM_RANKS SLOW_LINKS [SIZE ...]`: ranks that reach each other
through a switch measure every pair, or ring and tree of the sizes; prints what the report says as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path

from phalanx.fabric.plan import BY_HAND, Plan
from phalanx.fabric.run import Hooks, Place, measure
from phalanx.gang import ForkServer
from phalanx.gang.testing import TEST_PRELOAD
from phalanx.spec import Layout

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from support.ethernet import SlowLink, port_address, switched  # noqa: E402


def main() -> int:
    num_ranks, slow = int(sys.argv[1]), [SlowLink(*each) for each in json.loads(sys.argv[2])]
    plan = Plan(Layout(dp_shard=num_ranks), "cpu", (256,), ("all_reduce",), deadline_s=30.0, budget_s=0.0)
    if sizes := tuple(map(int, sys.argv[3:])):
        plan = replace(plan, sizes=sizes, operations=BY_HAND, pairs_at_once=0)
    path = os.pathsep.join([str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    with switched(num_ranks, slow) as namespaces, ForkServer(TEST_PRELOAD, {"PYTHONPATH": path}) as server:
        place = Place("fabric_entries:measure_behind_switch", port_address(num_ranks), namespaces.to_environ())
        outcome, report = measure(plan, server, Hooks(), place=place)
    if report is None:
        sys.stderr.write(f"{outcome.first_cause}\n{outcome.first_cause and outcome.first_cause.detail}\n")
        return 1
    pairs = {f"{a}-{b}": (each.latency_s, each.time_s) for each in report.pairs for a, b in [each.ranks]}
    told = {"slow_pairs": report.slow_pairs, "slow_ranks": report.slow_ranks, "said": report.said(), "pairs": pairs}
    told["crossings"] = {axis: asdict(each) for axis, each in report.crossings.items()}
    sys.stdout.write(json.dumps(told) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
