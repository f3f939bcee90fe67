from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from phalanx.core.errors import PhalanxError
from phalanx.rpc.pki import CertificateFiles, is_issued_by, open_authority, read_certificate


def _content(files: CertificateFiles) -> tuple[bytes, bytes, bytes]:
    return files.ca.read_bytes(), files.cert.read_bytes(), files.key.read_bytes()


def test_issue_for_a_service_names_loopback_hosts_and_spiffe_id(tmp_path: Path) -> None:
    files = open_authority(tmp_path).issue("train", ("train", "10.0.0.7"))
    cert = read_certificate(files.cert)
    names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost", "train"]
    assert [str(each) for each in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1", "10.0.0.7"]
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == ["spiffe://phalanx/train"]
    assert is_issued_by(cert, read_certificate(files.ca))


def test_issue_by_a_clock_behind_by_hours_is_valid(tmp_path: Path) -> None:
    files = open_authority(tmp_path).issue("train")
    earlier = datetime.now(UTC) - timedelta(hours=23)
    for path in (files.cert, files.ca):
        assert read_certificate(path).not_valid_before_utc < earlier


def test_keys_are_for_their_owner_alone(tmp_path: Path) -> None:
    files = open_authority(tmp_path).issue("train")
    for path in (files.key, tmp_path / "ca.key"):
        assert path.stat().st_mode & 0o777 == 0o600


def test_issue_again_keeps_what_is_there(tmp_path: Path) -> None:
    before = _content(open_authority(tmp_path).issue("train"))
    assert _content(open_authority(tmp_path).issue("train")) == before


@pytest.mark.parametrize("lost", ["ca.crt", "ca.key", "train.crt", "train.key"])
def test_issue_after_a_kill_between_two_files_gives_a_set_that_fits(tmp_path: Path, lost: str) -> None:
    open_authority(tmp_path).issue("train")
    (tmp_path / lost).unlink()
    files = open_authority(tmp_path).issue("train")
    cert, authority = read_certificate(files.cert), read_certificate(files.ca)
    assert is_issued_by(cert, authority)
    before = _content(files)
    assert _content(open_authority(tmp_path).issue("train")) == before


def test_issue_for_other_hosts_or_near_its_end_is_renewed(tmp_path: Path) -> None:
    authority = open_authority(tmp_path)
    before = _content(authority.issue("train"))
    assert _content(authority.issue("train", ("train",))) != before
    old = _content(authority.issue("old", validity=timedelta(seconds=-1)))
    assert _content(authority.issue("old")) != old


def test_issue_for_a_name_with_a_slash_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PhalanxError, match="certificate name"):
        open_authority(tmp_path).issue("../train")
    assert "key" not in repr(open_authority(tmp_path))


def test_a_damaged_certificate_is_told_in_one_line(tmp_path: Path) -> None:
    open_authority(tmp_path)
    (tmp_path / "ca.crt").write_text("nothing")
    with pytest.raises(PhalanxError, match=r"ca\.crt: expected a certificate in PEM form; remove the file"):
        open_authority(tmp_path)
