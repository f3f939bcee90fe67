"""The files of compose/, without an engine: they are what the services read, and none gives rights away."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
import yaml
from support.docker import COMPOSE, ROOT

from phalanx.rpc import read_client, read_service

SERVICES = ("data", "train", "checkpoint", "monitor")
PROCESSES = (*SERVICES, "agent")
MODEL = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]
OWN = sorted(set(MODEL) - {"grafana"})
BOARDS = sorted((COMPOSE / "grafana" / "boards").glob("*.json"))


@pytest.mark.parametrize("files", [["compose.yaml"], ["compose.yaml", "gpu.yaml"]], ids=["cpu", "gpu"])
def test_compose_accepts_its_files(files, compose):
    named = [argument for file in files for argument in ("--file", file)]
    profiles = ["--profile", "tools", "--profile", "dashboards"]
    command = [*compose, *named, *profiles, "config", "--quiet"]
    done = subprocess.run(command, cwd=COMPOSE, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", PROCESSES)
def test_configuration_is_read_and_names_every_service(name):
    config = read_service(COMPOSE / "config" / f"{name}.toml")
    assert config.name == name and config.services == {each: f"{each}:7700" for each in SERVICES}
    assert config.metrics == "0.0.0.0:9100" and config.storage == "s3://phalanx/cluster"
    assert str(config.security.key) == f"/run/phalanx/{name}.key"
    assert (config.security.authority is not None) == (name == "train")


def test_client_context_is_read_and_names_every_service():
    assert set(read_client(COMPOSE / "config" / "client.toml").services) == set(SERVICES)


@pytest.mark.parametrize("name", OWN)
def test_container_has_no_rights_and_a_limit(name):
    service = MODEL[name]
    assert service["read_only"] and service["cap_drop"] == ["ALL"] and service["mem_limit"]
    assert service["security_opt"] == ["no-new-privileges:true"] and "privileged" not in service
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))


@pytest.mark.parametrize("name", [*PROCESSES, "cli"])
def test_container_mounts_its_own_secrets_alone(name):
    sources = [each["source"] for each in MODEL[name]["volumes"] if each["source"].startswith("secrets-")]
    assert sources == [f"secrets-{'operator' if name == 'cli' else name}"]


def test_network_of_the_services_is_internal():
    networks = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["networks"]
    assert networks["cluster"] == {"internal": True}
    assert {name for name in OWN if "outside" in MODEL[name]["networks"]} == {"monitor", "prometheus"}


@pytest.mark.parametrize("file", sorted(COMPOSE.rglob("Dockerfile")), ids=lambda file: str(file.relative_to(COMPOSE)))
def test_dockerfile_needs_no_buildkit_and_ends_as_a_user_without_rights(file):
    text = file.read_text()
    assert not re.search(r"^RUN --mount|<<-?['\"]?EOF|^# syntax=", text, re.MULTILINE)
    assert all(
        image.startswith("python:3.11-slim-bookworm") for image in re.findall(r"^FROM ([\w./-]+:\S+)", text, re.M)
    )
    assert re.findall(r"^USER (\S+)", text, re.MULTILINE)[-1] not in ("root", "0")


def test_requirements_of_the_services_hold_no_torch_and_the_agents_do():
    def required(*extras: str) -> list[str]:
        command = [sys.executable, COMPOSE / "requirements.py", ROOT / "pyproject.toml", *extras]
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()

    services = required("services", "s3")
    assert not [line for line in services if line.startswith("torch")]
    assert {re.split(r"[<>=\[]", line)[0] for line in services} >= {"grpcio", "sqlalchemy", "boto3", "numpy", "pyjwt"}
    assert [line for line in required("train", "data") if line.startswith("torch")]


def test_prometheus_scrapes_every_process():
    scraped = yaml.safe_load((COMPOSE / "prometheus" / "config" / "prometheus.yaml").read_text())["scrape_configs"][0]
    targets = [target for each in scraped["static_configs"] for target in each["targets"]]
    assert sorted(targets) == sorted(f"{name}:9100" for name in PROCESSES) and scraped["honor_labels"]


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.stem)
def test_board_uses_the_provisioned_source_and_overlaps_nothing(board):
    model = json.loads(board.read_text())
    sources = yaml.safe_load((COMPOSE / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    panels = model["panels"]
    assert {panel["datasource"]["uid"] for panel in panels} == {sources[0]["uid"]}
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [_cells(panel["gridPos"]) for panel in panels]
    assert sum(map(len, places)) == len(set().union(*places)) and all(x < 24 for place in places for x, _ in place)


def _cells(place: dict[str, int]) -> set[tuple[int, int]]:
    return {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}


def test_private_keys_are_in_no_file():
    files = [path for path in COMPOSE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert files and not [file for file in files if "PRIVATE KEY" in file.read_text()]
