"""dcgm-exporter's text: real lines, blank values, MIG slices, both forms of labels, and lines that are none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import PhalanxError
from phalanx.monitor.receive.dcgm import Target, number, read, targets_of
from phalanx.monitor.receive.exposition import sample

LABELS = 'gpu="0",UUID="GPU-1",pci_bus_id="00000000:1A:00.0",device="nvidia0",modelName="NVIDIA H100 80GB HBM3"'
WHOLE = f"""\
# HELP DCGM_FI_DEV_SM_CLOCK SM clock frequency (in MHz).
# TYPE DCGM_FI_DEV_SM_CLOCK gauge
DCGM_FI_DEV_SM_CLOCK{{{LABELS},Hostname="node-a",DCGM_FI_DRIVER_VERSION="580.95.05",pod_uid=""}} 1980
DCGM_FI_DEV_GPU_TEMP{{{LABELS},Hostname="node-a"}} 41
DCGM_FI_DEV_POWER_USAGE{{{LABELS},Hostname="node-a"}} 122.352000
DCGM_FI_DEV_GPU_UTIL{{{LABELS},Hostname="node-a"}} 87
DCGM_FI_DEV_XID_ERRORS{{{LABELS},Hostname="node-a",err_code="0",err_msg="No Error"}} 0
DCGM_FI_DEV_FB_FREE{{{LABELS},Hostname="node-a"}} 61440
DCGM_FI_DEV_FB_USED{{{LABELS},Hostname="node-a"}} 20480
DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{{{LABELS},Hostname="node-a"}} 0
"""


def one(text):
    found = read(text.split("\n"), "fallback")
    assert len(found.gpus) == 1
    return found.gpus[0]


def test_dcgm_whole_gpu_is_read():
    gpu = one(WHOLE)
    assert (gpu.node, gpu.index, gpu.uuid, gpu.name) == ("node-a", 0, "GPU-1", "NVIDIA H100 80GB HBM3")
    assert (gpu.sm_clock_mhz, gpu.temperature_c, gpu.power_w) == (1980, 41, 122.352)
    assert gpu.utilization == pytest.approx(0.87)
    assert gpu.memory_used_bytes == 20 << 30 and gpu.memory_total_bytes == 80 << 30
    assert gpu.xid == 0 and gpu.ecc_uncorrectable == 0


@pytest.mark.parametrize(
    "text",
    [
        "9223372036854775792", "9223372036854775793", "9223372036854775794", "9223372036854775795",
        "9223372036854775807",
        "9223372036854775808.000000", "2147483632", "2147483633", "2147483634", "2147483635", "2147483647",
        "140737488355328.0", "140737488355328.000000", "140737488355329.000000", "140737488355331.0",
        "1.40737488355328e+14", "140737488355330", "NaN", "+Inf",
    ],
)  # fmt: skip
def test_dcgm_blank_values_are_absent(text):
    assert number(text) is None
    found = read([f'DCGM_FI_DEV_POWER_USAGE{{gpu="0",UUID="GPU-1",Hostname="a"}} {text}'], "")
    assert found.gpus[0].power_w is None and (found.num_absent, found.num_bad_lines) == (1, 0)


@pytest.mark.parametrize("text", ["0", "2147483631", "2147483648", "4294967296", "140737488355327.0", "1.5", "-4"])
def test_dcgm_values_below_and_beside_the_blank_ranges_are_values(text):
    assert number(text) == float(text)


@given(st.integers(0, 2**63 - 17))
def test_dcgm_integers_are_blank_only_within_the_ranges(value):
    is_blank = 2**31 - 16 <= value < 2**31 or 2**47 <= value < 2**47 + 16
    assert (number(str(value)) is None) == is_blank


def test_dcgm_value_that_cannot_be_is_absent():
    assert one(f'DCGM_FI_DEV_GPU_UTIL{{{LABELS},Hostname="a"}} 4294967295').utilization is None


def test_dcgm_both_forms_of_the_host_label_count_and_the_address_where_there_is_none():
    line = 'DCGM_FI_DEV_GPU_TEMP{{gpu="0",UUID="GPU-1"{}}} 40'
    assert one(line.format(',Hostname="upper"')).node == "upper"
    assert one(line.format(',hostname="lower"')).node == "lower"
    assert one(line.format("")).node == "fallback"


def test_dcgm_slices_of_one_card_stay_apart():
    lines = [
        f'DCGM_FI_DEV_FB_USED{{{LABELS},GPU_I_PROFILE="1g.10gb",GPU_I_ID="{at}",Hostname="a"}} {at}00' for at in (7, 8)
    ]
    lines.append(f'DCGM_FI_PROF_GR_ENGINE_ACTIVE{{{LABELS},GPU_I_PROFILE="1g.10gb",GPU_I_ID="7",Hostname="a"}} 0.95')
    found = read(lines, "").gpus
    assert [(gpu.gpu_instance, gpu.memory_used_bytes) for gpu in found] == [("7", 700 << 20), ("8", 800 << 20)]
    assert found[0].utilization == pytest.approx(0.95)
    assert len({gpu.key for gpu in found}) == 2


def test_dcgm_broken_lines_cost_themselves_alone():
    broken = [
        'DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="GPU-1"',
        'DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID=GPU-1} 40',
        'DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="GPU-1"} ',
        'DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="GPU-1"} N/A',
        'DCGM_FI_DEV_GPU_TEMP{gpu="0" UUID="GPU-1"} 40',
        "DCGM_FI_DEV_GPU_TEMP{} 40",
        'DCGM_FI_DEV_GPU_TEMP{gpu="zero",UUID="GPU-1"} 40',
        "\x00\ufffd garbage } {",
        "=== 5",
    ]
    found = read([*WHOLE.split("\n"), *broken], "")
    assert len(found.gpus) == 1 and found.num_bad_lines == len(broken)
    assert found.gpus[0].temperature_c == 41


def test_dcgm_older_spacing_escapes_and_timestamps_are_read():
    found = sample('DCGM_FI_DEV_GPU_TEMP{gpu="0", UUID = "GPU-1" ,name="a\\"b\\\\c\\nd",} 40 1700000000000')
    assert found is not None and found.value == "40"
    assert found.labels == {"gpu": "0", "UUID": "GPU-1", "name": 'a"b\\c\nd'}


def test_dcgm_figures_of_switches_and_links_and_other_exporters_are_left_alone():
    lines = [
        'DCGM_FI_DEV_NVSWITCH_TEMPERATURE_CURRENT{nvswitch="nvswitch0",Hostname="a"} 50',
        'DCGM_FI_DEV_NVSWITCH_LINK_FLIT_ERRORS{nvlink="1",nvswitch="nvswitch0",Hostname="a"} 0',
        "go_goroutines 12",
        'DCGM_FI_DEV_CPU_UTIL_TOTAL{cpu="0",Hostname="a"} 0.5',
    ]
    assert read(lines, "") == type(read([], ""))((), 0, 0)


@given(st.text(max_size=200))
def test_dcgm_any_text_is_read_without_an_error(text):
    read(text.split("\n"), "host")


@given(st.text(alphabet='DCGM_{}="\\,0123.gpu UID-', max_size=80))
def test_dcgm_anything_like_a_line_is_read_without_an_error(text):
    read([text, f'DCGM_FI_DEV_GPU_TEMP{{gpu="0",UUID="{text}"}} 4'], "host")


def test_targets_take_the_default_port_and_stand_once():
    assert targets_of(" a , b:1234,a:9400") == (Target("a"), Target("b", 1234))
    assert targets_of("") == ()


@pytest.mark.parametrize("text", ["a:", ":1", "a:b", "http://a:9400/metrics", "a:99999"])
def test_targets_that_are_none_are_an_error(text):
    with pytest.raises(PhalanxError, match="dcgm-exporter"):
        targets_of(text)
