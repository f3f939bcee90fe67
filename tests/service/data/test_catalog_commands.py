"""The catalog from the command line, against the service as a process."""

from __future__ import annotations

import json

import pytest
import typer
from support.data_service import data_process
from support.datasets import write_dataset

from phalanx.cli import data
from phalanx.cli.errors import run_reporting_errors
from phalanx.rpc import write_config


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with data_process(tmp_path_factory.mktemp("catalog")) as process:
        write_config(process.folder / "client.toml", process.cluster.client({"data": process.address}))
        yield process


@pytest.fixture
def phalanx(service, monkeypatch, capsys):
    """Runs a command line with the service's context; gives exit code, standard output and standard error."""

    def run(*arguments):
        app = typer.Typer()
        data.register(app)
        app.callback()(lambda: None)
        context = ["--context", str(service.folder / "client.toml")]
        monkeypatch.setattr("sys.argv", ["phalanx", "data", *map(str, arguments), *context])
        code = run_reporting_errors(app)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def names(out):
    return [f"{each['dataset']}@{each['version']}" for each in json.loads(out)["versions"]]


def test_catalog_commands_register_list_and_filter(service, phalanx):
    urls = [write_dataset(f"file://{service.folder}/data{seed}", seed=seed) for seed in (1, 2, 3)]
    code, out, _ = phalanx("register", "web", urls[0], "--json")
    first = json.loads(out)
    assert code == 0 and first["version"] == 1 and first["parents"] == []
    assert phalanx("register", "web", urls[1])[0] == 0
    code, out, _ = phalanx("register", "clean", urls[2], "--made-from", "web@1", "--made-from", "web@2", "--json")
    assert code == 0 and [each["version"] for each in json.loads(out)["parents"]] == [1, 2]
    assert names(phalanx("catalog", "--json")[1]) == ["clean@1", "web@2"]
    assert names(phalanx("catalog", "web", "--json")[1]) == ["web@1", "web@2"]
    assert names(phalanx("catalog", "--digest", first["digest"], "--json")[1]) == ["web@1"]
    assert names(phalanx("catalog", "--made-from", "web@2", "--json")[1]) == ["clean@1"]
    assert names(phalanx("catalog", "--prefix", "w", "--json")[1]) == ["web@2"]
    table = phalanx("catalog")[1]
    assert "web@1, web@2" in table and first["owner"] in table


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["catalog", "nothing"], "dataset is 'nothing'"),
        (["catalog", "--made-from", "web@x"], "NAME@VERSION"),
        (["register", "new", "file:///nowhere", "--made-from", "web@77"], "made_from is 'web@77'"),
    ],
)
def test_catalog_commands_of_what_is_not_there_are_one_line_and_exit_two(phalanx, arguments, message):
    code, out, err = phalanx(*arguments)
    assert code == 2 and message in err and err.count("\n") == 1 and not out
