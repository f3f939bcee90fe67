"""What a GPU reports of itself: XID errors and uncorrectable memory errors. Pure.

An exporter shows the *last* XID until the driver is loaded again, so only a change is news: a GPU that is seen for the
first time with an old XID is shown with it, and raises no incident.
"""

from __future__ import annotations

from dataclasses import dataclass

# Those that an application itself causes (NVIDIA's XID catalogue); told as such.
APPLICATION_XIDS = frozenset({13, 31, 43, 45})


@dataclass(frozen=True, slots=True)
class GpuReading:
    """A GPU's last figures; None: it does not tell. gpu_instance: of a MIG slice, "" for a whole GPU. index: on its
    node. utilization from 0 to 1; ecc_uncorrectable since the driver was loaded.
    """

    node: str
    index: int
    uuid: str
    name: str = ""
    gpu_instance: str = ""
    utilization: float | None = None
    memory_used_bytes: float | None = None
    memory_total_bytes: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    sm_clock_mhz: float | None = None
    xid: int | None = None
    ecc_uncorrectable: int | None = None

    @property
    def key(self) -> str:
        """Names the GPU or slice."""
        name = self.uuid or f"{self.node}/{self.index}"
        return f"{name}/{self.gpu_instance}" if self.gpu_instance else name


@dataclass(frozen=True, slots=True)
class GpuFault:
    """One fault. key: the same for the same fault."""

    node: str
    key: str
    message: str


@dataclass(frozen=True, slots=True)
class FaultCounts:
    """What was last seen of a GPU's faults."""

    xid: int = 0
    ecc_uncorrectable: int = 0


def gpu_faults(before: FaultCounts | None, now: GpuReading) -> tuple[FaultCounts, tuple[GpuFault, ...]]:
    """What is remembered after a reading, and what is new in it. before: None for a GPU that was never seen."""
    known = before or FaultCounts(now.xid or 0, now.ecc_uncorrectable or 0)
    xid = known.xid if now.xid is None else now.xid
    ecc = known.ecc_uncorrectable if now.ecc_uncorrectable is None else now.ecc_uncorrectable
    faults: list[GpuFault] = []
    where = f"GPU {now.index} of {now.node} ({now.uuid or 'no uuid'})"
    if xid and xid != known.xid:
        origin = ", usually the application's own fault" if xid in APPLICATION_XIDS else ""
        faults.append(GpuFault(now.node, f"{now.key}-xid{xid}", f"{where} reports XID {xid}{origin}"))
    if ecc > known.ecc_uncorrectable:
        message = f"{where} counts {ecc} uncorrectable memory errors, {ecc - known.ecc_uncorrectable} of them new"
        faults.append(GpuFault(now.node, f"{now.key}-ecc{ecc}", message))
    return FaultCounts(xid, ecc), tuple(faults)
