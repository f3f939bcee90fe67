"""A stage that gives something else than it gave on the meta device ends the gang with one line: gloo, which the next
rank awaits the announced size from, would abort without a word of the model.
"""

from __future__ import annotations

import math
import re

import pytest

from phalanx.gang.fork_server import ForkServer
from phalanx.gang.testing import run_gang

pytestmark = pytest.mark.distributed

EXPECTED = re.escape("expected forward to give (1, 16, 8) torch.float32, as on the meta device, at every step")


@pytest.mark.parametrize("evaluate", [False, True], ids=["trained", "evaluated"])
def test_stages_that_give_what_was_announced_train(fork_server: ForkServer, evaluate: bool) -> None:
    arguments = {"class": "stage_ranks:Staged", "evaluate": evaluate}
    losses = [rank["loss"] for rank in run_gang(fork_server, 2, "stage_ranks:run_stages", arguments)]
    assert losses[0] == losses[1] == pytest.approx(math.log(24), rel=0.2)


@pytest.mark.parametrize(
    ("model", "evaluate", "given"),
    [
        ("DropsTokens", False, "(1, 15, 8) torch.float32"),
        ("DropsTokens", True, "(1, 15, 8) torch.float32"),
        ("GivesDouble", False, "(1, 16, 8) torch.float64"),
        ("GivesTwo", False, "tuple"),
    ],
)
def test_stage_that_gives_something_else_ends_the_gang_by_name(
    fork_server: ForkServer, model: str, evaluate: bool, given: str
) -> None:
    arguments = {"class": f"stage_ranks:{model}", "evaluate": evaluate}
    message = rf"split_stages\(\) stage 0 is '{re.escape(given)}': {EXPECTED}"
    with pytest.raises(AssertionError, match=message):
        run_gang(fork_server, 2, "stage_ranks:run_stages", arguments)
