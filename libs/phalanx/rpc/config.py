"""What a service and a client read when they start: addresses and paths, never a secret.

`phalanx up` writes both kinds of file; relative paths in them start from the file's own folder, so that a folder may be
moved or copied as a whole.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, urlsplit

from phalanx.core.errors import PhalanxError
from phalanx.core.files import PUBLIC, write_atomically
from phalanx.objects import StorageSettings
from phalanx.rpc.files import read_bytes
from phalanx.rpc.limits import Limits
from phalanx.rpc.tables import NOT_IN_FILE, Place, Scalar, built, read_table, toml

DEFAULT_CONTEXT, CONTEXT_VARIABLE = Path("phalanx-home") / "client.toml", "PHALANX_CONTEXT"
Table = TypeVar("Table")


@dataclass(frozen=True, slots=True)
class Credentials:
    """The files by which a process proves who it is. token: read again when it changes; None: no token is sent."""

    ca: Path
    cert: Path
    key: Path
    token: Path | None = None


@dataclass(frozen=True, slots=True)
class Security:
    """A service's own certificate; token_key: the public key that checks callers' tokens; token: what it shows to other
    services; authority: the private key that mints, for the one service that does.
    """

    ca: Path
    cert: Path
    key: Path
    token_key: Path
    token: Path | None = None
    authority: Path | None = None

    @property
    def credentials(self) -> Credentials:
        """For calls to other services."""
        return Credentials(self.ca, self.cert, self.key, self.token)


@dataclass(frozen=True, slots=True)
class Database:
    """SQLAlchemy URL without a password; password: the file that holds one."""

    url: str
    password: Path | None = None

    def secret_url(self) -> str:
        """The URL with the password in it: for the engine alone, never for a log."""
        if self.password is None:
            return self.url
        data = read_bytes(self.password, "the password of the database", "check `database.password`")
        parts = urlsplit(self.url)
        user, at, host = parts.netloc.rpartition("@")
        if not user:
            raise PhalanxError("database.url", value=self.url, expected="a user before the host", remedy="add it")
        return parts._replace(netloc=f"{user}:{quote(data.decode().strip(), safe='')}{at}{host}").geturl()


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """One service's file. listen and metrics: host:port, port 0 takes a free one; metrics "" serves none. advertise:
    the address that others are told, "" for the one it listens on. services: addresses of the others by name.
    storage: URL of the cluster's root. options: the service's own settings (see `option_table`). source: the file that
    it was read from, where relative paths in `options` start; never in the file.
    """

    name: str
    listen: str
    security: Security
    storage: str = ""
    advertise: str = ""
    metrics: str = ""
    database: Database | None = None
    storage_settings: StorageSettings = field(default_factory=StorageSettings)
    services: Mapping[str, str] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    options: Mapping[str, Scalar] = field(default_factory=dict)
    source: Path | None = field(default=None, compare=False, metadata=NOT_IN_FILE)

    def option_table(self, kind: type[Table]) -> Table:
        """The service's own settings as its frozen dataclass; raises PhalanxError for an unknown key or wrong type."""
        return built(kind, self.options, Place(self.source or Path(f"{self.name}.toml"), ("options",)))


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """A client's context: addresses by service, and the files that prove who calls."""

    services: Mapping[str, str]
    security: Credentials

    def endpoint(self, service: str) -> str:
        """The address of a service; raises PhalanxError when the context names none."""
        if service not in self.services:
            raise PhalanxError(
                f"services.{service}",
                expected="its address in the client's context",
                remedy="start the services with `phalanx up`, which writes it",
            )
        return self.services[service]


def read_service(path: Path) -> ServiceConfig:
    """The service's file; raises PhalanxError."""
    place = Place(path)
    table = read_table(path, "the configuration of a service", "run `phalanx up`, which writes it")
    config = replace(built(ServiceConfig, table, place), source=path.absolute())
    for key in ("listen", "advertise", "metrics"):
        if getattr(config, key) or key == "listen":
            split_address(getattr(config, key), str(place.at(key)))
    for name, address in config.services.items():
        split_address(address, str(place.at("services").at(name)))
    if config.database is not None and urlsplit(config.database.url).password is not None:
        raise PhalanxError(
            str(place.at("database").at("url")),
            expected="no password in it",
            remedy="write the password to a file (mode 0600) and name it in database.password",
        )
    return config


def read_client(path: Path) -> ClientConfig:
    """The client's file; raises PhalanxError."""
    place = Place(path)
    config = built(ClientConfig, read_table(path, "the context of a client", _START), place)
    for name, address in config.services.items():
        split_address(address, str(place.at("services").at(name)))
    return config


def write_config(path: Path, config: ServiceConfig | ClientConfig) -> None:
    """The file from which `read_service` or `read_client` reads the same again; paths below its folder are relative."""
    write_atomically(path, toml(config, path.parent.absolute()).encode(), PUBLIC)


_START = "start the services with `phalanx up`, or name a context with --context FILE or $PHALANX_CONTEXT"


def find_client(argument: Path | None = None, environ: Mapping[str, str] | None = None) -> ClientConfig:
    """The client's context: the argument, else $PHALANX_CONTEXT, else ./phalanx-home/client.toml; raises PhalanxError
    that says how to start the services.
    """
    named = (os.environ if environ is None else environ).get(CONTEXT_VARIABLE, "")
    return read_client(argument or (Path(named) if named else DEFAULT_CONTEXT))


def split_address(address: str, where: str) -> tuple[str, int]:
    """Host and port of host:port; raises PhalanxError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port[:6]) > 65535 or "/" in host:
        raise PhalanxError(
            where, value=address, expected="host:port with a port from 0 to 65535", remedy="correct the address"
        )
    return host, int(port)
