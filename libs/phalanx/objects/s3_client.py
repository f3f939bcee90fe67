"""One source of endpoint, region, trust and credentials for every S3 client: the AWS chain as botocore resolves it.

`[storage.NAME]` comes first, then the usual AWS variables and files. Clients: obstore (reads, single puts, lists),
botocore (uploads in parts) and, for libraries that open URLs by fsspec, s3fs.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from phalanx.objects.base import StorageSettings, StoreDenied, StoreError
from phalanx.objects.s3_credentials import Credentials

if TYPE_CHECKING:
    from obstore.store import ClientConfig, S3Credential
    from obstore.store import S3Store as Engine

_CONNECT_TIMEOUT_S = 5.0
_CREDENTIALS_LIVE = timedelta(minutes=5)
_MAX_CONNECTIONS = 32


@dataclass(frozen=True, slots=True)
class S3Access:
    """What botocore resolved for one bucket."""

    bucket: str
    endpoint: str
    region: str
    addressing: str
    ca_bundle: str | None
    credentials: Credentials

    @property
    def is_aws(self) -> bool:
        """Whether the server is Amazon's own, whose abilities are documented."""
        return _is_aws(self.endpoint)


def _is_aws(endpoint: str) -> bool:
    host = urlsplit(endpoint).hostname or ""
    return host.endswith((".amazonaws.com", ".amazonaws.com.cn"))


def resolve(bucket: str, settings: StorageSettings) -> S3Access:
    """Resolves how to reach `bucket`.

    Raises StoreDenied: client library missing, no credentials, unknown profile, wrong settings.
    """
    try:
        import botocore.exceptions
        import botocore.session
    except ImportError as error:
        raise StoreDenied(
            f"s3://{bucket}", expected="the S3 clients to be installed", remedy="pip install 'phalanx[s3]'"
        ) from error
    try:
        credentials = Credentials(lambda: _open_session(settings.profile))
        session = credentials.session
        ca_bundle = settings.ca_bundle or session.get_config_variable("ca_bundle")
        client = session.create_client(
            "s3", region_name=settings.region, endpoint_url=settings.endpoint, verify=ca_bundle
        )
        endpoint = _checked_endpoint(str(client.meta.endpoint_url))
        found = credentials.frozen()
    except (botocore.exceptions.BotoCoreError, ValueError) as error:
        raise StoreDenied(
            f"s3://{bucket}",
            expected=f"usable settings ({' '.join(str(error).split())})",
            remedy="check [storage], the AWS variables and ~/.aws/config",
        ) from error
    if found is None:
        raise StoreDenied(
            f"s3://{bucket}",
            expected="AWS credentials, found none",
            remedy="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a profile in [storage]",
        )
    region = client.meta.region_name
    path_style = not _is_aws(endpoint) or "." in bucket
    return S3Access(
        bucket=bucket,
        endpoint=endpoint,
        region="us-east-1" if region in (None, "aws-global") else region,
        addressing=settings.addressing or ("path" if path_style else "virtual"),
        ca_bundle=ca_bundle,
        credentials=credentials,
    )


def _checked_endpoint(endpoint: str) -> str:
    """`endpoint`. Raises ValueError for what botocore lets pass and obstore does not."""
    parts = urlsplit(endpoint)
    try:
        _ = parts.port
    except ValueError as error:
        raise ValueError(f"Invalid endpoint: {endpoint}: {error}") from error
    if parts.scheme not in ("http", "https"):
        raise ValueError(f"Invalid endpoint: {endpoint}: it is neither http:// nor https://")
    return endpoint


def _open_session(profile: str | None) -> Any:
    import botocore.session

    session = botocore.session.Session(profile=profile)
    session.register_component("data_loader", _definitions(session.get_config_variable("data_path")))
    return session


@cache
def _definitions(data_path: str | None) -> Any:
    """botocore's service definitions, parsed once: four fifths of the time that it takes to resolve access."""
    from botocore.loaders import create_loader

    return create_loader(data_path)


@cache
def _runtime_process() -> int:
    """The process whose threads run obstore: the one that made the first client."""
    return os.getpid()


def check_process() -> None:
    """Refuses to go on in a child of the process that made the first client.

    Its threads are gone, every call would hang.
    """
    if _runtime_process() != os.getpid():
        raise StoreError(
            "s3: this process was forked after its parent had used S3, and the client's threads did not come along; "
            "use threads or spawn, or open the store only in the children"
        )


def make_engine(access: S3Access, timeout_s: float) -> Engine:
    """An obstore client that gives up on one request after `timeout_s` and leaves retries to its caller.

    Raises StoreDenied where the file of certificates can't be used.
    """
    from obstore.exceptions import BaseError

    check_process()
    endpoint = access.endpoint
    if access.addressing == "virtual":
        endpoint = endpoint.replace("://", f"://{access.bucket}.", 1)
    options: ClientConfig = {
        "allow_http": endpoint.startswith("http://"),
        "connect_timeout": timedelta(seconds=min(_CONNECT_TIMEOUT_S, timeout_s)),
        "timeout": timedelta(seconds=timeout_s),
    }
    if access.ca_bundle:
        options["root_certificate"] = _read_bundle(access)
    try:
        return _engine(access, endpoint, options)
    except (ValueError, BaseError) as error:
        if access.ca_bundle is None:
            raise
        raise StoreDenied(
            "ca_bundle",
            value=access.ca_bundle,
            expected=f"a PEM file of certificates ({str(error).splitlines()[0]})",
            remedy="correct [storage] ca_bundle or AWS_CA_BUNDLE",
        ) from error


def _engine(access: S3Access, endpoint: str, options: ClientConfig) -> Engine:
    from obstore.store import S3Store as Engine

    return Engine(
        access.bucket,
        config={
            "endpoint": endpoint,
            "aws_endpoint_url_s3": endpoint,  # else the variable of that name would win over [storage]
            "region": access.region,
            "virtual_hosted_style_request": access.addressing == "virtual",
            "disable_bulk_delete": True,
            "conditional_put": "etag",
        },
        client_options=options,
        retry_config={"max_retries": 0},
        credential_provider=_CredentialProvider(access.credentials),
    )


def _read_bundle(access: S3Access) -> bytes:
    assert access.ca_bundle is not None
    try:
        return Path(access.ca_bundle).read_bytes()
    except OSError as error:
        raise StoreDenied(
            "ca_bundle",
            value=access.ca_bundle,
            expected="a readable PEM file",
            remedy="correct [storage] ca_bundle or AWS_CA_BUNDLE",
        ) from error


class _CredentialProvider:
    """Hands the credentials to obstore, which asks again when they expire."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials

    def __call__(self) -> S3Credential:
        frozen = self._credentials.frozen()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + _CREDENTIALS_LIVE,
        }


def make_botocore(access: S3Access, timeout_s: float) -> Any:
    """A botocore client that gives up on one request after `timeout_s` and leaves retries to its caller."""
    from botocore.config import Config

    signing = {"payload_signing_enabled": False} if access.endpoint.startswith("https://") else {}  # TLS guards it
    config = Config(
        connect_timeout=min(_CONNECT_TIMEOUT_S, timeout_s),
        read_timeout=timeout_s,
        retries={"total_max_attempts": 1},
        max_pool_connections=_MAX_CONNECTIONS,
        s3={"addressing_style": access.addressing, **signing},
        request_checksum_calculation="when_required",
    )
    return access.credentials.session.create_client(
        "s3", region_name=access.region, endpoint_url=access.endpoint, verify=access.ca_bundle, config=config
    )


def s3fs_options(bucket: str, settings: StorageSettings) -> dict[str, Any]:
    """Options for s3fs that reach `bucket` as we do; credentials are left to the same chain, so none appear here."""
    access = resolve(bucket, settings)
    options: dict[str, Any] = {
        "endpoint_url": access.endpoint,
        "client_kwargs": {"region_name": access.region},
        "config_kwargs": {"s3": {"addressing_style": access.addressing}},
        "use_listings_cache": False,
    }
    if access.ca_bundle:
        options["client_kwargs"]["verify"] = access.ca_bundle
    if settings.profile:
        options["profile"] = settings.profile
    return options
