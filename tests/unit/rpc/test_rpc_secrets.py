"""No token and no private key in any repr, log, error or trace."""

from __future__ import annotations

import logging
import traceback
from dataclasses import replace
from pathlib import Path

import pytest
import rpc_kit as kit

from phalanx.core.errors import OutsideError, PhalanxError
from phalanx.rpc import Authority, Credentials, Metrics, Role, Verifier, connect, write_config
from phalanx.rpc.credentials import TokenFile
from phalanx.rpc.testing import Cluster, make_cluster


def _secrets(cluster: Cluster) -> list[str]:
    """Tokens, and a line of each private key."""
    tokens = [path.read_text().strip() for path in cluster.folder.glob("*-token")]
    keys = [path.read_text().splitlines()[1] for path in cluster.folder.rglob("*.key")]
    assert len(tokens) >= 2
    assert len(keys) >= 3
    return tokens + keys


def _failure(cluster: Cluster, address: str, credentials: Credentials) -> str:
    """All that a caller could print of a failed call."""
    with connect("echo", address, credentials, patience_s=0) as channel:
        shown = [repr(channel), repr(channel._line), repr(vars(channel._line))]
        try:
            kit.stub(channel).Do(kit.pb.Words())
        except (PhalanxError, OutsideError) as error:
            shown += traceback.format_exception(error)
            shown += [repr(error), repr(vars(error))]
    return "\n".join(shown)


def test_secrets_show_in_no_repr_error_log_metric_or_config(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    metrics, foreign = Metrics(), make_cluster(tmp_path / "foreign").credentials()
    operator, viewer = cluster.credentials(), cluster.credentials(Role.VIEWER)
    assert foreign.token is not None
    with caplog.at_level(logging.DEBUG):
        with kit.serve_echo(cluster, metrics=metrics) as server:
            assert operator.token is not None
            shown = [
                _failure(cluster, server.address, each)
                for each in (operator, viewer, foreign, replace(operator, token=foreign.token))
            ]
        shown.append(_failure(cluster, server.address, operator))
    config = cluster.service("echo")
    write_config(tmp_path / "echo.toml", config)
    shown += [repr(config), repr(operator), repr(cluster), str(cluster.tokens), repr(TokenFile(operator.token))]
    shown += [repr(Authority.load(cluster.folder / "token.key")), repr(Verifier.load(cluster.folder / "token.pub"))]
    shown += [(tmp_path / "echo.toml").read_text(), caplog.text, *capfd.readouterr()]
    shown += [str(family.samples) for family in metrics.registry.collect()]
    everything = "\n".join(shown)
    assert "PERMISSION_DENIED" in everything
    for secret in [*_secrets(cluster), foreign.token.read_text().strip()]:
        assert secret not in everything


def test_token_that_is_no_token_is_not_shown_in_the_error(cluster: Cluster) -> None:
    credentials = cluster.credentials()
    assert credentials.token is not None
    credentials.token.write_text("geheim geheim\n")
    with (
        kit.serve_echo(cluster) as server,
        connect("echo", server.address, credentials) as channel,
        pytest.raises(PhalanxError, match="expected one token") as told,
    ):
        kit.stub(channel).Do(kit.pb.Words())
    assert "geheim" not in str(told.value)


def test_importing_the_room_starts_no_thread_and_no_torch() -> None:
    import subprocess
    import sys

    program = (
        "import phalanx.rpc, phalanx.rpc.pki, phalanx.rpc.tracing, sys, threading;"
        "print(threading.active_count(), len(__import__('os').listdir('/proc/self/task')), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "1 1 False", done.stderr
