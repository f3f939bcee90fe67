"""A home folder: made, completed, kept; secrets only where they belong."""

from __future__ import annotations

import getpass
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.x509 import IPAddress, SubjectAlternativeName

from phalanx.agent.options import Options
from phalanx.core.errors import PhalanxError
from phalanx.home.layout import Home
from phalanx.home.make import HomeSettings, make_home, with_slots
from phalanx.rpc.config import find_client, read_service, write_config
from phalanx.rpc.pki import read_certificate
from phalanx.rpc.tokens import Role, Verifier

SETTINGS = HomeSettings(port_base=0)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_home_made_twice_is_the_same_files(tmp_path):
    home, addresses = make_home(tmp_path / "home", SETTINGS)
    before = contents(home.folder)

    again, kept = make_home(tmp_path / "home", SETTINGS)

    assert (again, kept) == (home, addresses)
    assert contents(home.folder) == before


@pytest.mark.parametrize("lost", ["pki/train.key", "pki/ca.crt", "tokens/agent.token", "keys/token.pub", "data.toml"])
def test_home_cut_short_is_completed(tmp_path, lost):
    home, _ = make_home(tmp_path / "home", SETTINGS)
    (home.folder / lost).unlink()

    make_home(tmp_path / "home", SETTINGS)

    assert (home.folder / lost).exists()
    Verifier.load(home.token_key).verify(home.token(Role.AGENT).read_text().strip())


def test_home_secrets_are_private_and_in_no_configuration(tmp_path):
    home, _ = make_home(tmp_path / "home", SETTINGS)
    secrets = [*home.pki.glob("*.key"), home.authority, *(home.folder / "tokens").iterdir()]
    words = [path.read_text().strip().splitlines()[-2 if path.suffix == ".key" else 0] for path in secrets]

    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in secrets)
    public = [text for name, text in contents(home.folder).items() if not name.endswith((".key", ".token"))]
    assert not [word for word in words for text in public if word.encode() in text]


def test_home_contexts_carry_the_role_that_they_are_for(tmp_path):
    home, _ = make_home(tmp_path / "home", SETTINGS)
    verifier = Verifier.load(home.token_key)

    for path, role in ((home.client, Role.OPERATOR), (home.viewer, Role.VIEWER)):
        token = find_client(path).security.token
        assert token is not None
        assert verifier.verify(token.read_text().strip()).role is role


def test_home_counted_ports_follow_the_page(tmp_path):
    _, addresses = make_home(tmp_path / "home", HomeSettings(port_base=9000))

    assert addresses.page == "127.0.0.1:9000"
    assert list(addresses.services.values()) == [f"127.0.0.1:{port}" for port in (9001, 9002, 9003, 9004)]
    assert addresses.metrics["agent"] == "127.0.0.1:9015"


@pytest.mark.parametrize("base", [-1, 65536, 65530])
def test_home_port_out_of_range_is_refused(tmp_path, base):
    with pytest.raises(PhalanxError, match="--port-base"):
        make_home(tmp_path / "home", HomeSettings(port_base=base))


def test_home_slots_reach_the_agent_and_only_train_mints(tmp_path):
    home, _ = make_home(tmp_path / "home", with_slots(SETTINGS, 5))

    assert read_service(home.config("agent")).options["slots"] == 5
    assert read_service(home.config("train")).security.authority == home.authority
    assert read_service(home.config("data")).security.authority is None


def test_home_layout_is_absolute_in_its_configurations(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    home, _ = make_home(Path("home"), SETTINGS)

    assert home == Home(tmp_path / "home")
    assert read_service(home.config("data")).storage == f"file://{tmp_path}/home/store"


def test_home_host_of_another_machine_is_refused(tmp_path):
    with pytest.raises(PhalanxError, match="--host"):
        make_home(tmp_path / "home", HomeSettings(host="192.0.2.1", port_base=0))


@pytest.mark.parametrize("url", ["memory://", "ftp://x", "file://x"])
def test_home_storage_that_no_service_can_open_is_refused_before_anything_is_made(tmp_path, url):
    with pytest.raises(PhalanxError):
        make_home(tmp_path / "home", HomeSettings(storage=url, port_base=0))

    assert not (tmp_path / "home").exists()


def test_home_keeps_options_that_somebody_wrote_and_not_those_of_an_earlier_up(tmp_path):
    home, _ = make_home(tmp_path / "home", with_slots(SETTINGS, 5))
    for name, option in (("monitor", "webhook"), ("agent", "rail")):
        config = read_service(home.config(name))
        write_config(home.config(name), replace(config, options={**config.options, option: "mine"}))

    make_home(tmp_path / "home", SETTINGS)

    assert read_service(home.config("monitor")).options["webhook"] == "mine"
    agent = read_service(home.config("agent")).options
    assert agent["rail"] == "mine" and "slots" not in agent


def test_home_that_is_moved_keeps_its_contexts_and_its_agent(tmp_path):
    home, _ = make_home(tmp_path / "home", SETTINGS)
    home.folder.rename(tmp_path / "moved")
    moved = Home(tmp_path / "moved")

    for path in (moved.client, moved.viewer, moved.config("agent")):
        assert str(tmp_path) not in path.read_text()
    for security in (find_client(moved.client).security, find_client(moved.viewer).security):
        assert security.ca.is_file() and security.key.is_file() and security.token.is_file()
    agent = read_service(moved.config("agent"))
    assert agent.security.key == moved.pki / "agent.key" and agent.security.token_key.is_file()
    assert agent.option_table(Options).state_dir == moved.agent_state


def test_home_on_an_address_has_it_in_its_certificates_and_its_page_on_loopback(tmp_path):
    host = "127.0.0.3"
    home, addresses = make_home(tmp_path / "home", HomeSettings(host=host, port_base=0))
    names = read_certificate(home.pki / "train.crt").extensions.get_extension_for_class(SubjectAlternativeName).value

    assert host in map(str, names.get_values_for_type(IPAddress))
    assert addresses.services["train"].startswith(f"{host}:")


def test_page_leaves_loopback_only_with_a_password(tmp_path):
    password = tmp_path / "password"
    password.write_text("geheim")

    assert HomeSettings(host="10.0.0.7").page_host == "127.0.0.1"
    assert HomeSettings(host="10.0.0.7", page_password=password).page_host == "10.0.0.7"
    home, _ = make_home(tmp_path / "home", HomeSettings(port_base=0, page_password=password))
    assert read_service(home.config("monitor")).options["page_password"] == str(password)


def test_user_without_a_name_is_told_by_the_number(tmp_path, monkeypatch):
    def nobody():
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr(getpass, "getuser", nobody)
    home, _ = make_home(tmp_path / "home", SETTINGS)
    token = home.token(Role.OPERATOR).read_text().strip()
    assert Verifier.load(home.token_key).verify(token).subject == f"uid-{os.getuid()}"
