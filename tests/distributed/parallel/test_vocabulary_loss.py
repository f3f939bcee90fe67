"""The loss of logits that are cut over ranks is torch's own of whole ones, also where a rank's part is far from the
others'.
"""

from __future__ import annotations

import pytest
from vocabulary_ranks import CASES

from phalanx.gang.fork_server import ForkServer
from phalanx.gang.testing import run_gang

pytestmark = pytest.mark.distributed


def test_loss_over_a_cut_vocabulary_is_that_of_whole_logits(fork_server: ForkServer) -> None:
    found = run_gang(fork_server, 2, "vocabulary_ranks:run_cases")
    for differences in found:
        assert differences.keys() == CASES.keys()
        for name, each in differences.items():
            assert max(each) < 2e-5, (name, each)
