"""torch's pipeline stage, with memory for what comes from other stages only as long as it is needed.

torch's own has it for every micro-batch of a step, for inputs and for gradients of outputs, from the first step on: of
a pipeline with many micro-batches more than the activations that its schedule keeps in flight. Here memory is there
when the receive is posted, and is let go of when the pass's backward, or the first half of it, is over.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import _make_tensor_from_meta
from torch.distributed.pipelining.stage import _RecvInfo


class Stage(PipelineStage):  # type: ignore[misc, unused-ignore]
    """As torch's, to the last bit."""

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        super()._setup_forward_recv_info(num_microbatches, has_backward)
        for infos in self.args_recv_info.values():
            _let_go(infos)

    def _create_grad_recv_info(self, act_send_info: dict[int, Any]) -> tuple[_RecvInfo, ...]:
        infos: tuple[_RecvInfo, ...] = super()._create_grad_recv_info(act_send_info)
        _let_go(infos)
        return infos

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Receives of a micro-batch's input."""
        self._provide(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)  # type: ignore[no-any-return, unused-ignore]

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Receives of the gradient of a micro-batch's output."""
        if self.has_backward and not self.is_last:
            self._provide(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)  # type: ignore[no-any-return, unused-ignore]

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **keywords: Any) -> None:
        """Gradients of a micro-batch: of all, or of its input alone."""
        super().backward_one_chunk(bwd_chunk_id, *args, **keywords)
        _let_go(self.args_recv_info[bwd_chunk_id])
        _let_go(self.grad_recv_info[bwd_chunk_id])

    def _provide(self, infos: Iterable[_RecvInfo]) -> None:
        for info in infos:
            if not info.is_root_arg and info.buffer is None and info.tensor_meta is not None:
                info.buffer = _make_tensor_from_meta(info.tensor_meta, self.device)


def _let_go(infos: Iterable[_RecvInfo]) -> None:
    for info in infos:
        info.buffer = None
