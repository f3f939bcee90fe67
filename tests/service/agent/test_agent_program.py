"""`python -m phalanx.agent`: starts from its file, says what is wrong with it, ends on signals."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import replace

import pytest
from agent_kit import is_alive, wait_until

from phalanx.agent.stopping import ONE_WISH_S
from phalanx.rpc.config import write_config


def command(config_path) -> list[str]:
    return [sys.executable, "-m", "phalanx.agent", "--config", str(config_path)]


def refused(config_path) -> str:
    done = subprocess.run(command(config_path), capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2, done.stderr
    return done.stderr


def test_agent_program_runs_until_sigterm(world, tmp_path):
    path = tmp_path / "agent.toml"
    write_config(path, world.agent_config())
    with subprocess.Popen(command(path), stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_until(lambda: world.train.hellos, 20.0, "the agent's hello")
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("options", "told"),
    [({"slots": -1}, "options.slots"), ({"nonsense": 1}, "nonsense"), ({"slots": "many"}, "slots")],
)
def test_agent_program_wrong_option_is_told_in_one_line(world, tmp_path, options, told):
    write_config(tmp_path / "agent.toml", world.agent_config(**options))
    said = refused(tmp_path / "agent.toml")
    assert told in said and said.count("phalanx: ") == 1 and "Traceback" not in said


def test_agent_program_without_its_file_is_told(tmp_path):
    assert "no-such.toml" in refused(tmp_path / "no-such.toml")


def test_agent_program_without_the_address_of_train_is_told(world, tmp_path):
    write_config(tmp_path / "agent.toml", replace(world.agent_config(), services={}))
    assert "services" in refused(tmp_path / "agent.toml")


def test_agent_second_one_in_the_same_state_folder_is_refused(world, start_agent, tmp_path):
    start_agent()
    write_config(tmp_path / "second.toml", world.agent_config())
    assert "no process serves" in refused(tmp_path / "second.toml")


def test_agent_address_of_no_interface_is_refused_before_train_hears_of_it(world, tmp_path):
    write_config(tmp_path / "agent.toml", world.agent_config(address="192.0.2.77"))
    assert "192.0.2.77" in refused(tmp_path / "agent.toml")
    assert not world.train.hellos


def test_agent_figures_tell_of_ranks_and_the_stream(world, agent):
    world.start_gang("wait_deaf", world_size=3)
    wait_until(lambda: len(world.train.records("phase")) >= 6, 10.0, "all ranks wait")
    with urllib.request.urlopen(f"http://{agent.metrics_address}/metrics", timeout=5) as answer:
        told = answer.read().decode()
    assert "phalanx_agent_ranks 3.0" in told and "phalanx_agent_connected 1.0" in told
    assert "phalanx_agent_slots 8.0" in told and "phalanx_agent_dropped_records 0.0" in told


def test_agent_second_sigterm_ends_deaf_ranks_at_once(world, start_agent, tmp_path):
    process = start_agent(stop_grace_s=600.0).process
    pids = world.start_gang("wait_deaf").gang_started.pids
    wait_until(lambda: len(world.train.records("phase")) >= 4, 10.0, "all ranks wait")
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: "told to end" in (tmp_path / "agent.log").read_text(), 10.0, "the first is heard")
    left_s = time.monotonic() + ONE_WISH_S
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: time.monotonic() > left_s, 5.0, "a second signal counts")
    assert all(map(is_alive, pids))
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    assert not any(map(is_alive, pids))
