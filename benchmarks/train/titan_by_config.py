"""torchtitan's Trainer as 0.3 has it: our model, windows and tokenizer are configured classes of its own protocols.

Its models replicate by fully_shard over a mesh whose shards are of one rank, so this one does too: 0.3 has no
DistributedDataParallel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from titan_model import IS_COMPILED, PRECISION, Lines, Windows, begin_weights, positions_of
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer
from torchtitan.components.optimizer.optimizer import default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.config.configs import ParallelismConfig, TrainingConfig
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer
from windows import BETAS, LR, MAX_NORM, WEIGHT_DECAY, Objective, Settings


class _Model(BaseModel):
    """Logits of tokens; positions are those of whole windows."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        settings: Settings

        def update_from_config(self, *, config: Any, **_: Any) -> None:
            """Nothing: the settings say all."""

        def get_nparams_and_flops(self, model: torch.nn.Module, seq_len: int) -> tuple[int, int]:
            """Parameters, and 6 operations for each a token: only told, never compared."""
            count = sum(parameter.numel() for parameter in model.parameters())
            return count, 6 * count

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.decoder = Objective(config.settings).decoder

    def verify_module_protocol(self) -> None:
        """The decoder's modules are torch's, and `init_weights` begins them."""

    def init_weights(self, **_: Any) -> None:
        """Of torch's own modules."""
        begin_weights(self)

    def forward(self, tokens: torch.Tensor, **_: Any) -> torch.Tensor:
        """tokens: int64 [B, S]."""
        return self.decoder(tokens, positions_of(tokens), None)  # type: ignore[no-any-return]


class _Loader(Windows, BaseDataLoader):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        tokens: str
        settings: Settings

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, **_: Any) -> None:
        Windows.__init__(self, config.tokens, config.settings, dp_rank, dp_world_size)


class _NoTokenizer(BaseTokenizer):
    """Tokens come as they are."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *_: Any, **__: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        raise NotImplementedError


def _parallelize(model: Any, *, parallel_dims: Any, training: TrainingConfig, **_: Any) -> torch.nn.Module:
    layers = model.decoder.layers.values()
    if IS_COMPILED:
        for layer in layers:
            layer.compile()
    names = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
    precision = MixedPrecisionPolicy(
        param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
    )
    for module in (*layers, model):
        fully_shard(module, mesh=parallel_dims.get_mesh(names), mp_policy=precision)
    return model  # type: ignore[no-any-return]


class _Trainer(Lines, Trainer):
    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass


if not hasattr(torch.distributed, "set_timeout"):  # torch 2.13 has it by another name
    torch.distributed.set_timeout = torch.distributed.distributed_c10d._set_pg_timeout


def trainer_of(settings: Settings, tokens: str, ranks: int, folder: str) -> Trainer:
    """A trainer of these windows that prints a line a step. folder: for what it writes."""
    spec = ModelSpec(
        name="phalanx-decoder",
        flavor="given",
        model=_Model.Config(settings=settings),
        parallelize_fn=_parallelize,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=None,
    )
    config = _Trainer.Config(
        model_spec=spec,
        dump_folder=folder,
        tokenizer=_NoTokenizer.Config(),
        dataloader=_Loader.Config(tokens=tokens, settings=settings),
        optimizer=default_adamw(LR, betas=BETAS, weight_decay=WEIGHT_DECAY),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0, decay_type="cosine", min_lr_factor=0.1),
        training=TrainingConfig(
            local_batch_size=settings.batch // ranks,
            seq_len=settings.seq_len,
            steps=settings.steps,
            max_norm=MAX_NORM,
            mixed_precision_param=PRECISION,
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(
            data_parallel_replicate_degree=ranks,
            data_parallel_shard_degree=1,
            spmd_backend="partial_dtensor",
        ),
        loss=CrossEntropyLoss.Config(),
    )
    config.metrics.log_freq = 1
    return _Trainer(config)
