"""GPUs by an exporter that is a process of its own, with answers that are good, broken, huge, slow, or none."""

from __future__ import annotations

import time

import pytest
from monitor_kit import wait_until

from phalanx.monitor.receive.dcgm import MAX_ANSWER_BYTES, ScrapeError, Target, fetch
from phalanx.monitor.receive.nvml import NoGpu, read_gpus
from phalanx.monitor.testing import Told, started

LABELS = 'gpu="{0}",UUID="GPU-{0}",pci_bus_id="00000000:1A:00.0",device="nvidia{0}",modelName="NVIDIA A100-SXM4-80GB"'
LINES = [
    "# HELP DCGM_FI_DEV_XID_ERRORS Value of the last XID error encountered.",
    "# TYPE DCGM_FI_DEV_XID_ERRORS gauge",
    'DCGM_FI_DEV_XID_ERRORS{{{labels},Hostname="node-b",err_code="{xid}",err_msg="..."}} {xid}',
    'DCGM_FI_DEV_GPU_UTIL{{{labels},Hostname="node-b"}} 93',
    'DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{{{labels},Hostname="node-b"}} 140737488355328.000000',
    'DCGM_FI_DEV_POWER_USAGE{{{labels},Hostname="node-b"}} 9223372036854775794',
]


def text(xid=0, num=2):
    return "\n".join(line.format(labels=LABELS.format(gpu), xid=xid) for gpu in range(num) for line in LINES) + "\n"


def gpus(monitor):
    with monitor.client() as client:
        return client.gpus()


def options(exporter, **more):
    return {"dcgm": f"127.0.0.1:{exporter.port}", "scrape_every_s": 0.2, "scrape_deadline_s": 1.0, **more}


def test_exporter_is_scraped_goes_away_and_comes_back(make_monitor, exporter):
    exporter.answer("good", text())
    monitor = make_monitor(options=options(exporter))
    found = wait_until(lambda: gpus(monitor).gpus, "GPUs read")
    assert [(gpu.node, gpu.index, gpu.utilization, gpu.HasField("power_w")) for gpu in found] == [
        ("node-b", 0, 0.93, False),
        ("node-b", 1, 0.93, False),
    ]
    exporter.end()
    wait_until(lambda: "away" in gpus(monitor).sources[0], "told as away")
    assert len(gpus(monitor).gpus) == 2, "the last readings stay"
    assert 'phalanx_monitor_source_up{source="dcgm-exporter' in monitor.figures()
    exporter.start()
    wait_until(lambda: "2 GPUs" in gpus(monitor).sources[0], "back")
    assert gpus(monitor).gpus[0].age_s < 2


def test_exporter_with_broken_lines_costs_those_lines_and_shows_their_number(make_monitor, exporter):
    exporter.answer("good", text() + 'DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID= 5\n}{\n')
    monitor = make_monitor(options=options(exporter))
    wait_until(lambda: gpus(monitor).sources[0].endswith("2 GPUs, 2 lines not understood"), "told")
    assert "phalanx_monitor_scrape_bad_lines_total{" in monitor.figures()


@pytest.mark.parametrize(("kind", "words"), [("error", "answers 500"), ("huge", "answers more than 16 MiB")])
def test_exporter_that_answers_wrongly_is_a_state(make_monitor, exporter, kind, words):
    exporter.answer(kind, text())
    monitor = make_monitor(options=options(exporter, scrape_deadline_s=8.0))
    wait_until(lambda: words in gpus(monitor).sources[0], "told")
    exporter.answer("good", text())
    wait_until(lambda: "2 GPUs" in gpus(monitor).sources[0], "back")


def test_exporter_that_drips_is_cut_at_the_deadline(exporter):
    exporter.answer("slow", text())
    began_s = time.monotonic()
    with pytest.raises(ScrapeError, match=r"no whole answer within 0\.7 s"):
        fetch(Target("127.0.0.1", exporter.port), 0.7)
    assert time.monotonic() - began_s < 2.0


def test_exporter_that_is_nowhere_is_an_error_in_words():
    with pytest.raises(ScrapeError, match="away"):
        fetch(Target("127.0.0.1", 1), 1.0)
    assert MAX_ANSWER_BYTES == 16 << 20


def test_gpu_fault_on_a_node_of_a_job_is_an_incident_of_it_once(make_monitor, exporter, train):
    exporter.answer("good", text(num=1))
    monitor = make_monitor(services={"train": train.address}, options=options(exporter))
    job = "projects/p/jobs/run-1"
    train.tell(started(Told(job)))
    wait_until(lambda: gpus(monitor).gpus and f'phalanx_run_attempt{{job="{job}"}} 1.0' in monitor.figures(), "known")
    exporter.answer("good", text(xid=79, num=1))
    wait_until(lambda: train.reports, "reported")
    monitor.kill()
    monitor.start()
    wait_until(lambda: gpus(monitor).gpus, "read again")
    with monitor.client() as client:
        (incident,) = client.incidents(job)
    assert incident.id.endswith("a1-gpu_fault-s0-GPU-0-xid79") and "XID 79" in incident.cause.message
    assert incident.cause.node_id == "node-b" and {each.request_id for each in train.reports} == {incident.id}


def test_machine_without_gpus_is_a_state_and_no_failure(make_monitor):
    try:
        read_gpus()
    except NoGpu as error:
        assert str(error).startswith("no GPU")
    else:
        pytest.skip("this machine has GPUs")
    monitor = make_monitor()
    found = wait_until(lambda: [each for each in gpus(monitor).sources if each.startswith("nvml")], "told")
    assert found[0].startswith("nvml: no GPU")
    assert 'phalanx_monitor_scrape_failures_total{source="nvml"} 0.0' in monitor.figures()
