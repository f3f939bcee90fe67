"""Who calls, proven by a signed token: a JWT (EdDSA) with subject, role and scope.

`Authority` holds the private key and mints, `Verifier` holds the public one and checks. No claim depends on a clock
unless an expiry is asked for, and then an hour of difference is allowed.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from phalanx.core.errors import PhalanxError
from phalanx.core.files import SECRET, write_atomically
from phalanx.rpc.errors import Denied, Unauthenticated
from phalanx.rpc.files import read_bytes

LEEWAY_S = 3600
_ALGORITHM = "EdDSA"
_NEW_TOKEN = "ask for a token of this cluster (`phalanx up` writes them to HOME/tokens)"


class Role(StrEnum):
    """What a caller may be; each method names the roles that may call it."""

    VIEWER = "viewer"
    OPERATOR = "operator"
    AGENT = "agent"
    SERVICE = "service"


EVERYONE = frozenset(Role)
VIEWERS = frozenset({Role.VIEWER, Role.OPERATOR})
OPERATORS = frozenset({Role.OPERATOR})
AGENTS = frozenset({Role.AGENT})
SERVICES = frozenset({Role.SERVICE})


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls. project, job: "" means all of them; attempt: 0 means any. spiffe_id: of the certificate, "" on a
    Unix socket.
    """

    subject: str
    role: Role
    project: str = ""
    job: str = ""
    attempt: int = 0
    spiffe_id: str = ""

    def require_project(self, project: str) -> None:
        """Raises Denied unless the caller's scope holds that project."""
        if self.project not in ("", project):
            raise _out_of_scope(f"a token for project {project}", f"project {self.project}")

    def require_job(self, project: str, uid: str, attempt: int | None = None) -> None:
        """Raises Denied unless the caller's scope holds that job and, where given, that attempt."""
        self.require_project(project)
        if self.job not in ("", uid):
            raise _out_of_scope(f"a token for job {project}/{uid}", f"job {self.project}/{self.job}")
        if attempt is not None and self.attempt not in (0, attempt):
            raise _out_of_scope(f"a token for attempt {attempt} of {project}/{uid}", f"attempt {self.attempt}")


def _out_of_scope(expected: str, held: str) -> Denied:
    return Denied("scope of the token", value=held, expected=expected, remedy="use a token of that scope")


class Authority:
    """Mints tokens; holds the private key, which no repr shows."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key

    @classmethod
    def create(cls, private: Path, public: Path) -> Authority:
        """The authority whose key lies in `private` (0600), made if missing; `public` gets the public key."""
        if not private.exists():
            write_atomically(private, _private_pem(Ed25519PrivateKey.generate()), SECRET)
        authority = cls.load(private)
        pem = authority.public_pem()
        if not public.exists() or public.read_bytes() != pem:
            write_atomically(public, pem)
        return authority

    @classmethod
    def load(cls, private: Path) -> Authority:
        """The authority whose key lies in `private`; raises PhalanxError."""
        data = read_bytes(private, "the private key that signs tokens", "run `phalanx up`, which makes it")
        try:
            key = serialization.load_pem_private_key(data, None)
        except (ValueError, TypeError):
            key = None
        if not isinstance(key, Ed25519PrivateKey):
            raise _not_a_key(private)
        return cls(key)

    def public_pem(self) -> bytes:
        """The public key, for verifiers."""
        form = serialization.PublicFormat.SubjectPublicKeyInfo
        return self._key.public_key().public_bytes(serialization.Encoding.PEM, form)

    def verifier(self) -> Verifier:
        """Checks what this authority mints."""
        return Verifier(self._key.public_key())

    def mint(
        self,
        subject: str,
        role: Role,
        project: str = "",
        job: str = "",
        attempt: int = 0,
        lasts_s: float | None = None,
    ) -> str:
        """A token of that scope; it never expires unless `lasts_s` says so."""
        claims: dict[str, Any] = {
            "sub": subject,
            "role": role.value,
            "project": project,
            "job": job,
            "attempt": attempt,
            "jti": secrets.token_hex(16),
        }
        if lasts_s is not None:
            claims["exp"] = int(time.time() + lasts_s)
        return jwt.encode(claims, self._key, algorithm=_ALGORITHM)


class Verifier:
    """Checks tokens with the authority's public key."""

    def __init__(self, key: Ed25519PublicKey) -> None:
        self._key = key

    @classmethod
    def load(cls, public: Path) -> Verifier:
        """The verifier with the public key that lies in the file; raises PhalanxError."""
        data = read_bytes(public, "the public key that checks tokens", "run `phalanx up`, which makes it")
        try:
            key = serialization.load_pem_public_key(data)
        except ValueError:
            key = None
        if not isinstance(key, Ed25519PublicKey):
            raise _not_a_key(public)
        return cls(key)

    def verify(self, token: str, spiffe_id: str = "") -> Caller:
        """Who the token says is calling; raises Unauthenticated when it was not signed by this authority, is expired
        by more than an hour, or lacks a claim.
        """
        try:
            claims = jwt.decode(
                token,
                self._key,
                algorithms=[_ALGORITHM],
                leeway=LEEWAY_S,
                options={"require": ["sub", "role", "jti"], "verify_iat": False, "verify_aud": False},
            )
        except jwt.ExpiredSignatureError:
            raise Unauthenticated("token", expected="one that is not expired", remedy=_NEW_TOKEN) from None
        except jwt.InvalidSignatureError:
            raise Unauthenticated(
                "token", expected="one that this cluster's authority signed", remedy=_NEW_TOKEN
            ) from None
        except jwt.InvalidTokenError as error:
            raise Unauthenticated("token", expected=f"a signed token ({error})", remedy=_NEW_TOKEN) from None
        return _caller(claims, spiffe_id)


def write_token(path: Path, token: str) -> None:
    """The token in a file that only its owner reads."""
    write_atomically(path, token.encode() + b"\n", SECRET)


def _caller(claims: dict[str, Any], spiffe_id: str) -> Caller:
    subject, role = claims["sub"], claims["role"]
    project, job, attempt = claims.get("project", ""), claims.get("job", ""), claims.get("attempt", 0)
    is_valid = isinstance(project, str) and isinstance(job, str) and type(attempt) is int and role in list(Role)
    if not is_valid or (job and not project) or (attempt and not job):
        raise Unauthenticated(
            "token", expected="the claims role, project, job and attempt of this version", remedy=_NEW_TOKEN
        )
    return Caller(subject, Role(role), project, job, attempt, spiffe_id)


def _not_a_key(path: Path) -> PhalanxError:
    return PhalanxError(str(path), expected="an Ed25519 key in PEM form", remedy="remove the file and run `phalanx up`")


def _private_pem(key: Ed25519PrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
