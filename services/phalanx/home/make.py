"""Makes a home folder, or completes one whose making was cut short: certificates, tokens, configurations, contexts.

Everything that is there and still fits is kept; no file holds a secret but `pki/*.key`, `keys/token.key` and `tokens/`,
which are 0600.
"""

from __future__ import annotations

import getpass
import os
import socket
from dataclasses import dataclass, field, replace
from pathlib import Path

from phalanx.core.errors import PhalanxError
from phalanx.home.addresses import DEFAULT_PORT_BASE, Addresses, counted, free
from phalanx.home.checks import check_exporters, check_host, check_name, check_storage
from phalanx.home.layout import AGENT, SERVICES, Home
from phalanx.objects import StorageSettings
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
from phalanx.rpc.errors import Unauthenticated
from phalanx.rpc.files import read_bytes
from phalanx.rpc.pki import open_authority
from phalanx.rpc.tables import Scalar
from phalanx.rpc.tokens import Authority, Role, Verifier, write_token

OPERATOR, VIEWER = "operator", "viewer"
_SET_BY_UP = {"state_dir", "slots", "stop_grace_s", "page", "page_password", "dcgm"}


@dataclass(frozen=True, slots=True)
class HomeSettings:
    """What `phalanx up` may be told. storage: URL of the cluster's root, "" for a folder in the home. host: where the
    services listen. hosts: other names of this machine in certificates. port_base: see `addresses`; 0 takes free ports.
    slots: ranks that the agent may hold, None for its GPUs or CPUs. page_password: file with the password of the
    monitor's page, which is on a loopback address without one. options: by process, its own settings.
    """

    storage: str = ""
    storage_settings: StorageSettings = field(default_factory=StorageSettings)
    host: str = "127.0.0.1"
    hosts: tuple[str, ...] = ()
    port_base: int = DEFAULT_PORT_BASE
    page_password: Path | None = None
    options: dict[str, dict[str, Scalar]] = field(default_factory=dict)

    @property
    def page_host(self) -> str:
        """Where the page listens: beyond this machine only with a password."""
        is_loopback = self.host == "localhost" or self.host.startswith("127.")
        return self.host if is_loopback or self.page_password is not None else "127.0.0.1"


def check_settings(settings: HomeSettings) -> None:
    """Looks at what was told, before anything is made. Raises PhalanxError."""
    check_host(settings.host)
    for name in settings.hosts:
        check_name(name)
    if settings.port_base:
        counted(settings.host, settings.port_base, settings.page_host)
    check_storage(settings.storage, settings.storage_settings)
    exporters = settings.options.get("monitor", {}).get("dcgm")
    if exporters is not None:
        check_exporters(str(exporters))
    if settings.page_password is not None:
        read_bytes(settings.page_password, "a file with the page's password", "correct --page-password")


def make_home(folder: Path, settings: HomeSettings) -> tuple[Home, Addresses]:
    """The folder with all that its processes need to start. Raises PhalanxError for what the user must change."""
    home = Home(folder.absolute())
    check_settings(settings)
    home.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    addresses = _addresses(home, settings)
    _make_certificates(home, (*settings.hosts, settings.host))
    _make_tokens(home)
    for name in (*SERVICES, AGENT):
        write_config(home.config(name), service_config(home, name, addresses, settings))
    for path, name, role in ((home.client, OPERATOR, Role.OPERATOR), (home.viewer, VIEWER, Role.VIEWER)):
        write_config(path, ClientConfig(dict(addresses.services), _credentials(home, name, role)))
    return home, addresses


def service_config(home: Home, name: str, addresses: Addresses, settings: HomeSettings) -> ServiceConfig:
    """The configuration of a service or the agent. The agent's paths all lie in the home: written, they are relative to
    it, so that the agent of another machine can be given a copy.
    """
    is_agent = name == AGENT
    files = _credentials(home, name, Role.AGENT if is_agent else Role.SERVICE)
    options: dict[str, Scalar] = {}
    if is_agent:
        options["state_dir"] = home.agent_state.name
    if name == "monitor":
        options["page"] = addresses.page
        if settings.page_password is not None:
            options["page_password"] = str(settings.page_password.absolute())
    return ServiceConfig(
        name=name,
        listen="127.0.0.1:0" if is_agent else addresses.services[name],  # nobody calls an agent by the network
        metrics=addresses.metrics[name],
        security=Security(
            ca=files.ca,
            cert=files.cert,
            key=files.key,
            token=files.token,
            token_key=home.token_key,
            authority=home.authority if name == "train" else None,
        ),
        storage="" if is_agent else settings.storage or f"file://{home.folder / 'store'}",
        storage_settings=settings.storage_settings,
        database=None if is_agent else Database(f"sqlite:///{home.database(name)}"),
        services=dict(addresses.services),
        options=_own_options(home.config(name)) | options | settings.options.get(name, {}),
    )


def _own_options(path: Path) -> dict[str, Scalar]:
    """What somebody wrote into `[options]` of a configuration that is there, beside what `phalanx up` itself sets."""
    if not path.exists():
        return {}
    return {key: value for key, value in read_service(path).options.items() if key not in _SET_BY_UP}


def _addresses(home: Home, settings: HomeSettings) -> Addresses:
    if settings.port_base:
        return counted(settings.host, settings.port_base, settings.page_host)
    return _kept(home, settings.host, settings.page_host) or free(settings.host, settings.page_host)


def _kept(home: Home, host: str, page_host: str) -> Addresses | None:
    """The addresses that the folder's configurations name, where all are there and of those hosts."""
    paths = {name: home.config(name) for name in (*SERVICES, AGENT)}
    if not all(path.exists() for path in paths.values()):
        return None
    configs = {name: read_service(path) for name, path in paths.items()}
    addresses = Addresses(
        {name: configs[name].listen for name in SERVICES},
        {name: config.metrics for name, config in configs.items()},
        str(configs["monitor"].options.get("page", "")),
    )
    every = [(address, host) for address in (*addresses.services.values(), *addresses.metrics.values())]
    for address, wanted in (*every, (addresses.page, page_host)):
        if not address or split_address(address, "listen")[0] != wanted:
            return None
    return addresses


def _make_certificates(home: Home, hosts: tuple[str, ...]) -> None:
    authority = open_authority(home.pki)
    own = tuple(dict.fromkeys((*hosts, *_own_name())))
    for name in (*SERVICES, AGENT, OPERATOR, VIEWER):
        authority.issue(name, own if name in (*SERVICES, AGENT) else ())


def _make_tokens(home: Home) -> None:
    authority = Authority.create(home.authority, home.token_key)
    verifier = Verifier.load(home.token_key)
    user = _user()
    subjects = {Role.OPERATOR: user, Role.VIEWER: f"{user}-viewer", Role.AGENT: AGENT, Role.SERVICE: "services"}
    for role, subject in subjects.items():
        path = home.token(role)
        if not (path.exists() and _is_valid(verifier, path)):
            write_token(path, authority.mint(subject, role))


def _is_valid(verifier: Verifier, path: Path) -> bool:
    data = read_bytes(path, "a token", "remove it, and run `phalanx up`, which makes another")
    try:
        verifier.verify(data.decode().strip())
    except (UnicodeDecodeError, Unauthenticated):
        return False
    return True


def _own_name() -> tuple[str, ...]:
    """The machine's name, where a certificate can hold it."""
    name = socket.gethostname()
    try:
        check_name(name)
    except PhalanxError:
        return ()
    return (name,)


def _user() -> str:
    """Who runs this; a user without a name, as in a container, by the number."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid-{os.getuid()}"


def _credentials(home: Home, name: str, role: Role) -> Credentials:
    return Credentials(home.pki / "ca.crt", home.pki / f"{name}.crt", home.pki / f"{name}.key", home.token(role))


def with_slots(settings: HomeSettings, slots: int | None) -> HomeSettings:
    """The settings with so many slots for the agent; None leaves it to the agent."""
    if slots is None:
        return settings
    agent = settings.options.get(AGENT, {}) | {"slots": slots}
    return replace(settings, options={**settings.options, AGENT: agent})
