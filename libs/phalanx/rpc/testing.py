"""A small cluster's certificates and tokens in a folder, for tests of whatever serves or calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.rpc.config import ClientConfig, Credentials, Security, ServiceConfig
from phalanx.rpc.pki import CertificateAuthority, open_authority
from phalanx.rpc.tokens import Authority, Role, write_token


@dataclass(frozen=True, slots=True)
class Cluster:
    """One authority for certificates and one for tokens, below `folder`."""

    folder: Path
    pki: CertificateAuthority
    tokens: Authority

    def service(self, name: str, **settings: Any) -> ServiceConfig:
        """The configuration of a service on a free port of loopback; `settings` replace its fields."""
        files = self.pki.issue(name)
        token = self._token(name, Role.SERVICE)
        security = Security(
            files.ca, files.cert, files.key, self.folder / "token.pub", token, self.folder / "token.key"
        )
        return ServiceConfig(**{"name": name, "listen": "127.0.0.1:0", "security": security, **settings})

    def credentials(
        self, role: Role = Role.OPERATOR, project: str = "", job: str = "", attempt: int = 0, name: str = "client"
    ) -> Credentials:
        """What a client of that role and scope shows; each call mints a token."""
        files = self.pki.issue(name)
        return Credentials(files.ca, files.cert, files.key, self._token(name, role, project, job, attempt))

    def client(self, services: Mapping[str, str], role: Role = Role.OPERATOR) -> ClientConfig:
        """A client's context for these addresses."""
        return ClientConfig(services, self.credentials(role))

    def _token(self, name: str, role: Role, project: str = "", job: str = "", attempt: int = 0) -> Path:
        path = self.folder / "-".join(filter(None, (name, role, project, job, str(attempt or ""), "token")))
        write_token(path, self.tokens.mint(name, role, project, job, attempt))
        return path


def make_cluster(folder: Path) -> Cluster:
    """A new cluster below the folder, or the one that is there."""
    tokens = Authority.create(folder / "token.key", folder / "token.pub")
    return Cluster(folder, open_authority(folder / "pki"), tokens)
