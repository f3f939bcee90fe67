from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from phalanx.core.errors import PhalanxError
from phalanx.objects import StorageSettings
from phalanx.rpc import Database, Limits, Role, find_client, read_client, read_service, write_config
from phalanx.rpc.testing import Cluster


@dataclass(frozen=True, slots=True)
class Options:
    page: str = ""
    every_s: float = 1.0


def test_service_config_written_and_read_is_the_same(cluster: Cluster, tmp_path: Path) -> None:
    config = replace(
        cluster.service("monitor"),
        storage="s3://bucket/root",
        storage_settings=StorageSettings(endpoint="http://127.0.0.1:9000", addressing="path"),
        database=Database(f"sqlite:///{tmp_path}/monitor.sqlite"),
        services={"train": "127.0.0.1:7001"},
        limits=Limits(max_streams=7),
        options={"page": '127.0.0.1:8080 "quoted"', "every_s": 2},
    )
    write_config(tmp_path / "monitor.toml", config)
    assert read_service(tmp_path / "monitor.toml") == config
    assert config.option_table(Options) == Options('127.0.0.1:8080 "quoted"', 2.0)


def test_client_config_is_found_by_argument_then_variable(cluster: Cluster, tmp_path: Path) -> None:
    config = cluster.client({"train": "127.0.0.1:7001"}, Role.VIEWER)
    for name in ("a.toml", "b.toml"):
        write_config(tmp_path / name, replace(config, services={"train": f"{name}:1"}))
    environ = {"PHALANX_CONTEXT": str(tmp_path / "b.toml")}
    assert find_client(tmp_path / "a.toml", environ).endpoint("train") == "a.toml:1"
    assert find_client(None, environ).endpoint("train") == "b.toml:1"


def test_client_config_in_the_default_home_is_found(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path / "phalanx-home" / "client.toml", cluster.client({"train": "é:1"}))
    assert find_client(None, {}) == cluster.client({"train": "é:1"})
    assert read_client(Path("phalanx-home/client.toml")).security.ca.is_absolute()


def test_client_config_nowhere_says_how_to_start_the_services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PhalanxError, match="start the services with `phalanx up`"):
        find_client(None, {})


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('listen = "127.0.0.1:99999"', r"listen is '127\.0\.0\.1:99999': expected host:port"),
        ('listen = "7001"', "expected host:port"),
        ("listen = 7001", "expected a text"),
        ('listen = "a:1"\nlisten_on = "x"', "listen_on: expected one of name, listen"),
        ('listen = "a:1"\nlimits = 3', "limits is 3: expected a table"),
        ('listen = "a:1"\n[limits]\nmax_streams = "many"', "limits.max_streams is 'many': expected an integer"),
        ('listen = "a:1"\n[services]\ntrain = "nowhere"', "services.train is 'nowhere'"),
        ('listen = "a:1"\n[storage_settings]\naddressing = "odd"', "expected 'path' or 'virtual'"),
        ('listen = "a:1"\n[database]\nurl = "postgresql://u:geheim@h/d"', "expected no password in it"),
        ('listen = "a:1', "expected TOML"),
        ('storage = "memory://"', "expected the key listen"),
    ],
)
def test_service_config_with_a_mistake_names_it_in_one_line(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "train.toml"
    security = '\n[security]\nca = "ca"\ncert = "c"\nkey = "k"\ntoken_key = "t"\n'
    path.write_text(f'name = "train"\n{line}\n{security}')
    with pytest.raises(PhalanxError, match=says) as told:
        read_service(path)
    assert "\n" not in str(told.value)
    assert "geheim" not in str(told.value)


def test_service_config_that_is_missing_is_told(tmp_path: Path) -> None:
    with pytest.raises(PhalanxError, match="No such file"):
        read_service(tmp_path / "none.toml")


def test_options_with_an_unknown_key_are_refused(cluster: Cluster) -> None:
    with pytest.raises(PhalanxError, match=r"options\.pages: expected one of page, every_s"):
        replace(cluster.service("monitor"), options={"pages": "x"}).option_table(Options)


def test_database_password_comes_from_its_file_and_is_quoted(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("a b/c\n")
    database = Database("postgresql+psycopg://train@db:5432/train", tmp_path / "password")
    assert database.secret_url() == "postgresql+psycopg://train:a%20b%2Fc@db:5432/train"
    assert "a b" not in repr(database)
