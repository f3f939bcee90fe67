"""Where everything lies in a home folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from phalanx.rpc.tokens import Role

SERVICES = ("data", "train", "checkpoint", "monitor")
AGENT = "agent"
DEFAULT_HOME = Path("phalanx-home")


@dataclass(frozen=True, slots=True)
class Home:
    """The folder of one machine's services; absolute."""

    folder: Path

    @property
    def pki(self) -> Path:
        """Certificates and their keys; `ca.key` and the others' keys are 0600."""
        return self.folder / "pki"

    @property
    def token_key(self) -> Path:
        """Public key that checks tokens."""
        return self.folder / "keys" / "token.pub"

    @property
    def authority(self) -> Path:
        """Private key that mints tokens; read by this machine's `up` and by train alone."""
        return self.folder / "keys" / "token.key"

    def token(self, role: Role) -> Path:
        """A token of that role for the whole cluster."""
        return self.folder / "tokens" / f"{role.value}.token"

    def config(self, service: str) -> Path:
        """The configuration of a service or the agent."""
        return self.folder / f"{service}.toml"

    @property
    def client(self) -> Path:
        """The context of an operator on this machine."""
        return self.folder / "client.toml"

    @property
    def viewer(self) -> Path:
        """The context of somebody who may only look."""
        return self.folder / "viewer.toml"

    def database(self, service: str) -> Path:
        """The database of a service."""
        return self.folder / f"{service}.sqlite"

    def log(self, service: str) -> Path:
        """What a service prints."""
        return self.folder / "logs" / f"{service}.log"

    @property
    def agent_state(self) -> Path:
        """Node id and logs of ranks."""
        return self.folder / "agent"

    def place(self, name: str) -> Path:
        """Held by the living process of that name."""
        return self.folder / "processes" / name

    @property
    def last_end(self) -> Path:
        """What the supervisor that ended last says of it."""
        return self.folder / "last-end.json"

    @property
    def state(self) -> Path:
        """What the supervisor says of its processes."""
        return self.folder / "state.json"

    @property
    def lock(self) -> Path:
        """Held by the supervisor that owns this folder."""
        return self.folder / "up.lock"
