"""Which places of the node are taken: one for each rank, and on a GPU node one GPU for each."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from phalanx.agent.gangs import GangKey
from phalanx.agent.inventory import Gpu
from phalanx.core.errors import OutsideError


class Slots:
    """Safe from any thread. gpus: the node's; slot n has the n-th of them."""

    def __init__(self, num_slots: int, gpus: Sequence[Gpu]) -> None:
        self._num_slots, self._gpus = num_slots, tuple(gpus)
        self._taken: dict[GangKey, tuple[int, ...]] = {}
        self._lock = threading.Lock()

    def take(self, key: GangKey, num_ranks: int) -> Mapping[str, str]:
        """The environment with which ranks find their GPUs. Raises OutsideError where not enough slots are free."""
        with self._lock:
            taken = {slot for slots in self._taken.values() for slot in slots}
            free = [slot for slot in range(self._num_slots) if slot not in taken]
            if len(free) < num_ranks:
                raise OutsideError(f"{key} wants {num_ranks} slots, and {len(free)} of {self._num_slots} are free")
            self._taken[key] = tuple(free[:num_ranks])
        if not self._gpus:
            return {}
        return {"CUDA_VISIBLE_DEVICES": ",".join(self._gpus[slot].uuid for slot in free[:num_ranks])}

    def free(self, key: GangKey) -> None:
        """Gives the places of a gang back."""
        with self._lock:
            self._taken.pop(key, None)
