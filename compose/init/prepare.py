"""`python prepare.py DIR`: what the containers of compose.yaml need before they start, each in DIR/<its name>.

Certificates, a token and the store's credentials for each process and for the operator, and the bucket. Everything that
is there and still fits is kept; killed half-way, it is simply run again. The authority's own keys stay in
DIR/authority, which no other container mounts.
"""

from __future__ import annotations

import secrets
import sys
from pathlib import Path

from phalanx.core.files import SECRET, write_atomically
from phalanx.rpc.errors import Unauthenticated
from phalanx.rpc.pki import CertificateAuthority, open_authority
from phalanx.rpc.tokens import Authority, Role, write_token

BUCKET = "phalanx"
HOLDERS = {
    "data": Role.SERVICE,
    "train": Role.SERVICE,
    "checkpoint": Role.SERVICE,
    "monitor": Role.SERVICE,
    "agent": Role.AGENT,
    "operator": Role.OPERATOR,
}
MINTS = "train"
SEE_PAGE_PASSWORD = ("monitor", "operator")


def main() -> None:
    """Prepares the folder that the command line names."""
    folder = Path(sys.argv[1])
    own = folder / "authority"
    own.mkdir(mode=0o700, exist_ok=True)
    certificates = open_authority(own)
    tokens = Authority.create(own / "token.key", own / "token.pub")
    credentials = store_credentials(own)
    password = page_password(own)
    for name, role in HOLDERS.items():
        equip(folder / name, name, role, certificates, tokens)
        keep_equal(credentials, folder / name / credentials.name)
    keep_equal(own / "token.key", folder / MINTS / "token.key")
    for name in SEE_PAGE_PASSWORD:
        keep_equal(password, folder / name / password.name)
    make_bucket(credentials)


def equip(place: Path, name: str, role: Role, certificates: CertificateAuthority, tokens: Authority) -> None:
    """One holder's certificate and token, and what it checks others by."""
    place.mkdir(mode=0o700, exist_ok=True)
    files = certificates.issue(name, (name,))
    for file in (files.ca, files.cert, files.key):
        keep_equal(file, place / file.name)
    keep_equal(certificates.folder / "token.pub", place / "token.pub")
    token = place / "token"
    try:
        tokens.verifier().verify(token.read_text().strip())
    except (FileNotFoundError, Unauthenticated):
        write_token(token, tokens.mint(name, role))


def keep_equal(source: Path, target: Path) -> None:
    """The target with the source's bytes and mode, untouched where it has them already."""
    data = source.read_bytes()
    if not target.exists() or target.read_bytes() != data:
        write_atomically(target, data, source.stat().st_mode & 0o777)


def store_credentials(folder: Path) -> Path:
    """A file in the form of AWS with the store's key; made once."""
    path = folder / "aws-credentials"
    if not path.exists():
        key = f"aws_access_key_id = phalanx\naws_secret_access_key = {secrets.token_urlsafe(30)}\n"
        write_atomically(path, f"[default]\n{key}".encode(), SECRET)
    return path


def page_password(folder: Path) -> Path:
    """The password of the monitor's page, which listens beyond its container; made once."""
    path = folder / "page-password"
    if not path.exists():
        write_atomically(path, secrets.token_urlsafe(15).encode() + b"\n", SECRET)
    return path


def make_bucket(credentials: Path) -> None:
    """The bucket, unless it is there; its address is what AWS_CONFIG_FILE says."""
    import botocore.session
    from botocore.exceptions import ClientError

    session = botocore.session.Session()
    session.set_config_variable("credentials_file", str(credentials))
    client = session.create_client("s3")
    try:
        client.create_bucket(Bucket=BUCKET)
    except ClientError as error:
        if error.response["Error"]["Code"] not in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists"):
            raise


if __name__ == "__main__":
    main()
