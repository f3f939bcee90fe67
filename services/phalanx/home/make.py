"""Makes a home folder, or completes one whose making was cut short: certificates, tokens, configurations, contexts.

Everything that is there and still fits is kept; no file holds a secret but `pki/*.key`, `keys/token.key` and `tokens/`,
which are 0600.
"""

from __future__ import annotations

import getpass
import socket
from dataclasses import dataclass, field, replace
from pathlib import Path

from phalanx.core.errors import PhalanxError
from phalanx.home.addresses import DEFAULT_PORT_BASE, Addresses, counted, free
from phalanx.home.layout import AGENT, SERVICES, Home
from phalanx.objects import StorageSettings, open_store
from phalanx.rpc.config import (
    ClientConfig,
    Credentials,
    Database,
    Security,
    ServiceConfig,
    read_service,
    split_address,
    write_config,
)
from phalanx.rpc.pki import open_authority
from phalanx.rpc.tables import Scalar
from phalanx.rpc.tokens import Authority, Role, Verifier, write_token

OPERATOR, VIEWER = "operator", "viewer"


@dataclass(frozen=True, slots=True)
class HomeSettings:
    """What `phalanx up` may be told. storage: URL of the cluster's root, "" for a folder in the home. host: where the
    services listen. hosts: other names of this machine in certificates. port_base: see `addresses`; 0 takes free ports.
    slots: ranks that the agent may hold, None for its GPUs or CPUs. options: by process, its own settings.
    """

    storage: str = ""
    storage_settings: StorageSettings = field(default_factory=StorageSettings)
    host: str = "127.0.0.1"
    hosts: tuple[str, ...] = ()
    port_base: int = DEFAULT_PORT_BASE
    options: dict[str, dict[str, Scalar]] = field(default_factory=dict)


def make_home(folder: Path, settings: HomeSettings) -> tuple[Home, Addresses]:
    """The folder with all that its processes need to start. Raises PhalanxError for what the user must change."""
    home = Home(folder.absolute())
    if settings.storage:
        _check_storage(settings)
    home.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    addresses = _addresses(home, settings)
    _make_certificates(home, settings.hosts)
    _make_tokens(home)
    for name in (*SERVICES, AGENT):
        write_config(home.config(name), service_config(home, name, addresses, settings))
    for path, name, role in ((home.client, OPERATOR, Role.OPERATOR), (home.viewer, VIEWER, Role.VIEWER)):
        write_config(path, ClientConfig(dict(addresses.services), _credentials(home, name, role)))
    return home, addresses


def service_config(home: Home, name: str, addresses: Addresses, settings: HomeSettings) -> ServiceConfig:
    """The configuration of a service or the agent; paths in it are relative to the home, which may be moved."""
    is_agent = name == AGENT
    files = _credentials(home, name, Role.AGENT if is_agent else Role.SERVICE)
    options: dict[str, Scalar] = {}
    if is_agent:
        options["state_dir"] = str(home.agent_state)
    if name == "monitor":
        options["page"] = addresses.page
    return ServiceConfig(
        name=name,
        listen=f"{settings.host}:0" if is_agent else addresses.services[name],
        metrics=addresses.metrics[name],
        security=Security(
            ca=files.ca,
            cert=files.cert,
            key=files.key,
            token=files.token,
            token_key=home.token_key,
            authority=home.authority if name == "train" else None,
        ),
        storage=settings.storage or f"file://{home.folder / 'store'}",
        storage_settings=settings.storage_settings,
        database=None if is_agent else Database(f"sqlite:///{home.database(name)}"),
        services=dict(addresses.services),
        options=options | settings.options.get(name, {}),
    )


def _check_storage(settings: HomeSettings) -> None:
    """The URL is one that every process can open; whether the place is there, the services say when they start."""
    if settings.storage.startswith("memory:"):
        raise PhalanxError(
            "--storage",
            value=settings.storage,
            expected="storage that all services share and that outlives them",
            remedy="name a folder (file:///...) or a bucket (s3://...)",
        )
    open_store(settings.storage, settings.storage_settings)


def _addresses(home: Home, settings: HomeSettings) -> Addresses:
    if settings.port_base:
        return counted(settings.host, settings.port_base)
    return _kept(home, settings.host) or free(settings.host)


def _kept(home: Home, host: str) -> Addresses | None:
    """The addresses that the folder's configurations name, where all are there and of that host."""
    paths = {name: home.config(name) for name in (*SERVICES, AGENT)}
    if not all(path.exists() for path in paths.values()):
        return None
    configs = {name: read_service(path) for name, path in paths.items()}
    addresses = Addresses(
        {name: configs[name].listen for name in SERVICES},
        {name: config.metrics for name, config in configs.items()},
        str(configs["monitor"].options.get("page", "")),
    )
    every = (*addresses.services.values(), *addresses.metrics.values(), addresses.page)
    if not all(address and split_address(address, "listen")[0] == host for address in every):
        return None
    return addresses


def _make_certificates(home: Home, hosts: tuple[str, ...]) -> None:
    authority = open_authority(home.pki)
    own = tuple(dict.fromkeys((*hosts, socket.gethostname())))
    for name in (*SERVICES, AGENT, OPERATOR, VIEWER):
        authority.issue(name, own if name in (*SERVICES, AGENT) else ())


def _make_tokens(home: Home) -> None:
    authority = Authority.create(home.authority, home.token_key)
    verifier = Verifier.load(home.token_key)
    user = getpass.getuser()
    subjects = {Role.OPERATOR: user, Role.VIEWER: f"{user}-viewer", Role.AGENT: AGENT, Role.SERVICE: "services"}
    for role, subject in subjects.items():
        path = home.token(role)
        if not (path.exists() and _is_valid(verifier, path)):
            write_token(path, authority.mint(subject, role))


def _is_valid(verifier: Verifier, path: Path) -> bool:
    from phalanx.rpc.errors import Unauthenticated

    try:
        verifier.verify(path.read_text().strip())
    except Unauthenticated:
        return False
    return True


def _credentials(home: Home, name: str, role: Role) -> Credentials:
    return Credentials(home.pki / "ca.crt", home.pki / f"{name}.crt", home.pki / f"{name}.key", home.token(role))


def with_slots(settings: HomeSettings, slots: int | None) -> HomeSettings:
    """The settings with so many slots for the agent; None leaves it to the agent."""
    if slots is None:
        return settings
    agent = settings.options.get(AGENT, {}) | {"slots": slots}
    return replace(settings, options={**settings.options, AGENT: agent})
