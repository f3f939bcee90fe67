"""What this node has and is called."""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass

import psutil
import pynvml  # type: ignore[import-untyped]

from phalanx.agent.options import Options
from phalanx.core.errors import PhalanxError
from phalanx.core.files import write_atomically
from phalanx.gang.network import network_environ

LOG = logging.getLogger(__name__)
MAX_SLOTS = 65_536


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. index: in the driver's order."""

    index: int
    name: str
    uuid: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Inventory:
    """What a node offers. num_slots: ranks that may run at once."""

    host: str
    address: str
    num_slots: int
    num_cpus: int
    memory_bytes: int
    gpus: tuple[Gpu, ...]
    nvlink_domain: str
    rail: str
    leaf_switch: str


def take_inventory(options: Options) -> Inventory:
    """Looks at the machine. Raises PhalanxError where more slots are asked for than there are GPUs, or the address is
    none of this machine's.
    """
    gpus = visible(find_gpus(), os.environ)
    network_environ(options.address)
    if not 0 <= options.slots <= MAX_SLOTS:
        raise PhalanxError(
            "options.slots", value=options.slots, expected=f"from 0 to {MAX_SLOTS}", remedy="correct or leave it out"
        )
    num_cpus = len(os.sched_getaffinity(0))
    if gpus and options.slots > len(gpus):
        raise PhalanxError(
            "options.slots",
            value=options.slots,
            expected=f"at most one rank for each of the {len(gpus)} GPUs",
            remedy="lower it, or leave it out",
        )
    return Inventory(
        host=socket.gethostname(),
        address=options.address,
        num_slots=options.slots or len(gpus) or num_cpus,
        num_cpus=num_cpus,
        memory_bytes=psutil.virtual_memory().total,
        gpus=gpus,
        nvlink_domain=options.nvlink_domain,
        rail=options.rail,
        leaf_switch=options.leaf_switch,
    )


def find_gpus() -> tuple[Gpu, ...]:
    """The GPUs that NVIDIA's driver knows, in its order; none where there is no driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        LOG.info("no GPUs: %s", error)
        return ()
    try:
        return tuple(_gpu(index) for index in range(pynvml.nvmlDeviceGetCount()))
    finally:
        pynvml.nvmlShutdown()


def _gpu(index: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    name, uuid = pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetUUID(handle)
    return Gpu(index, str(name), str(uuid), int(pynvml.nvmlDeviceGetMemoryInfo(handle).total))


def visible(gpus: tuple[Gpu, ...], environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Those of `gpus` that CUDA_VISIBLE_DEVICES leaves to this process, as CUDA reads it: in its order, up to the first
    name that is none.
    """
    if "CUDA_VISIBLE_DEVICES" not in environ:
        return gpus
    chosen: list[Gpu] = []
    for name in environ["CUDA_VISIBLE_DEVICES"].split(","):
        found = [gpu for gpu in gpus if name.strip() == str(gpu.index) or (name and gpu.uuid.startswith(name.strip()))]
        if len(found) != 1 or found[0] in chosen:
            break
        chosen += found
    return tuple(chosen)


def node_id(options: Options) -> str:
    """The node's name: given, or made once and kept in the state folder."""
    if options.node:
        return options.node
    path = options.state_dir / "node-id"
    if not path.exists():
        write_atomically(path, f"{socket.gethostname()}-{secrets.token_hex(4)}\n".encode())
    return path.read_text().strip()
