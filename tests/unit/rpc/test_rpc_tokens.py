from __future__ import annotations

from pathlib import Path

import jwt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.errors import PhalanxError
from phalanx.rpc import Authority, Caller, Denied, Role, Unauthenticated, Verifier


def _authority(folder: Path) -> Authority:
    return Authority.create(folder / "token.key", folder / "token.pub")


def test_verify_a_minted_token_tells_subject_role_and_scope(tmp_path: Path) -> None:
    token = _authority(tmp_path).mint("node-1", Role.AGENT, "p", "run", 3)
    caller = Verifier.load(tmp_path / "token.pub").verify(token, "spiffe://phalanx/agent-1")
    assert caller == Caller("node-1", Role.AGENT, "p", "run", 3, "spiffe://phalanx/agent-1")


def test_create_again_keeps_the_key_and_mends_the_public_one(tmp_path: Path) -> None:
    first = _authority(tmp_path)
    (tmp_path / "token.pub").unlink()
    second = _authority(tmp_path)
    assert second.public_pem() == first.public_pem() == (tmp_path / "token.pub").read_bytes()
    assert (tmp_path / "token.key").stat().st_mode & 0o777 == 0o600


def test_verify_a_token_of_another_authority_is_refused(tmp_path: Path) -> None:
    token = _authority(tmp_path / "a").mint("x", Role.OPERATOR)
    with pytest.raises(Unauthenticated, match="this cluster's authority signed"):
        _authority(tmp_path / "b").verifier().verify(token)


def test_verify_an_expired_token_is_refused_only_past_an_hour(tmp_path: Path) -> None:
    authority = _authority(tmp_path)
    assert authority.verifier().verify(authority.mint("x", Role.VIEWER, lasts_s=-3500)).subject == "x"
    with pytest.raises(Unauthenticated, match="not expired"):
        authority.verifier().verify(authority.mint("x", Role.VIEWER, lasts_s=-3700))


@pytest.mark.parametrize("algorithm", ["none", "HS256"])
def test_verify_a_token_by_another_algorithm_is_refused(tmp_path: Path, algorithm: str) -> None:
    claims = {"sub": "x", "role": "operator", "jti": "1"}
    key = None if algorithm == "none" else "0" * 64
    with pytest.raises(Unauthenticated):
        _authority(tmp_path).verifier().verify(jwt.encode(claims, key, algorithm=algorithm))


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=60))
def test_verify_any_text_is_refused_in_one_line(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    verifier = _authority(tmp_path_factory.getbasetemp() / "any").verifier()
    with pytest.raises(Unauthenticated) as refused:
        verifier.verify(text)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("caller", "job", "why"),
    [
        (Caller("a", Role.AGENT, "p"), ("q", "run", None), "project"),
        (Caller("a", Role.AGENT, "p", "run"), ("p", "other", None), "job"),
        (Caller("a", Role.AGENT, "p", "run", 2), ("p", "run", 3), "attempt"),
    ],
)
def test_require_job_out_of_scope_is_denied(caller: Caller, job: tuple[str, str, int | None], why: str) -> None:
    with pytest.raises(Denied, match=why):
        caller.require_job(*job)


@pytest.mark.parametrize(
    "caller",
    [Caller("a", Role.AGENT), Caller("a", Role.AGENT, "p"), Caller("a", Role.AGENT, "p", "run", 2)],
)
def test_require_job_within_scope_passes(caller: Caller) -> None:
    caller.require_job("p", "run")
    caller.require_job("p", "run", 2)


def test_load_a_missing_or_foreign_key_is_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(PhalanxError, match="No such file"):
        Authority.load(tmp_path / "none")
    (tmp_path / "text").write_text("nothing")
    for load in (Authority.load, Verifier.load):
        with pytest.raises(PhalanxError, match="Ed25519"):
            load(tmp_path / "text")
