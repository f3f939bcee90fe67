"""What `phalanx up` is told, looked at before anything is made."""

from __future__ import annotations

import ipaddress
import re
import socket
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from phalanx.core.errors import PhalanxError
from phalanx.objects import StorageSettings, open_store
from phalanx.objects.file import FileStore
from phalanx.rpc.config import split_address

_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(?:\.{_LABEL})*")
_REGION = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,63}")


def check_host(host: str) -> None:
    """Where services are to listen. Raises PhalanxError unless it is one IPv4 address of this machine, or its name:
    nodes are told it, so it can't be all of them (0.0.0.0), nor one of many machines.
    """
    reason = _no_host(host) if _HOST.fullmatch(host) else "no IPv4 address or name"
    if reason:
        raise PhalanxError(
            "--host",
            value=host,
            expected=f"an IPv4 address of this machine, or its name ({reason})",
            remedy="correct the address",
        )


def _no_host(host: str) -> str:
    """Why nobody can listen there and be told; "" where somebody can."""
    try:
        address = socket.getaddrinfo(host, 0, socket.AF_INET, socket.SOCK_STREAM)[0][4]
        with socket.socket() as probe:
            probe.bind(address)
    except OSError as error:
        return error.strerror or str(error)
    return _no_single(str(address[0]))


def _no_single(address: str) -> str:
    """Why an address is not that of one machine; "" where it is."""
    parsed = ipaddress.IPv4Address(address)
    if parsed.is_unspecified:
        return "this one means all of them, and nodes have to be told one"
    if parsed.is_multicast or parsed == ipaddress.IPv4Address("255.255.255.255"):
        return "this one means many machines"
    return ""


def check_name(name: str) -> None:
    """A name for certificates. Raises PhalanxError unless it is an IP address or a host name."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        if not _HOST.fullmatch(name):
            raise PhalanxError(
                "--name",
                value=name,
                expected="a host name (letters, digits, '-', '.') or an IP address",
                remedy="correct it, or leave it out",
            ) from None


def check_exporters(addresses: str) -> None:
    """Addresses of dcgm-exporters, HOST:PORT separated by commas. Raises PhalanxError."""
    for part in addresses.split(","):
        host, port = split_address(part.strip(), "--dcgm")
        if not _HOST.fullmatch(host) or port == 0:
            raise PhalanxError("--dcgm", value=part, expected="HOST:PORT of a dcgm-exporter", remedy="correct it")


def check_storage(url: str, settings: StorageSettings) -> None:
    """Raises PhalanxError unless the URL is one that every process can open, a folder one that can be written; whether
    a bucket is there, the services say when they start.
    """
    _check_text("--storage", url)
    _check_endpoint(settings.endpoint)
    if settings.region is not None and not _REGION.fullmatch(settings.region):
        raise PhalanxError(
            "--storage-region", value=settings.region, expected="a region such as eu-west-1", remedy="correct it"
        )
    if not url:
        return
    if url.startswith("memory:"):
        raise PhalanxError(
            "--storage",
            value=url,
            expected="storage that all services share and that outlives them",
            remedy="name a folder (file:///...) or a bucket (s3://...)",
        )
    store = open_store(url, settings)
    if isinstance(store, FileStore):
        _check_folder(url, store.root)


def _check_endpoint(endpoint: str | None) -> None:
    if endpoint is None:
        return
    try:
        parts = urlsplit(endpoint)
        is_url = parts.scheme in ("http", "https") and bool(_HOST.fullmatch(parts.hostname or "")) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url:
        raise PhalanxError(
            "--storage-endpoint", value=endpoint, expected="http://HOST[:PORT] or https://...", remedy="correct the URL"
        )


def _check_folder(url: str, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise PhalanxError(
            "--storage", value=url, expected=f"a folder that can be written ({error.strerror})", remedy="name another"
        ) from error


def _check_text(where: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PhalanxError(where, value=text, expected="text in UTF-8", remedy="choose another name") from None
