"""What replicas that tell each other less hold and exchange: bytes of a rank, and seconds of a step.

Let S be the parameters of a rank's shard and R the replicas. Local updates hold the outer momentum and what a round
began with, 8 S bytes, and sum 12 S bytes (parameters and both moments) over the replicas once a round. PowerSGD holds
errors, 4 S, and while it runs the matrices that it takes apart, 4 S; r (n + m) fp32 numbers of each matrix are summed.
Where it leaves out the embedding and the head, S is without them, and they are summed as they are.
1-bit Adam holds the errors of the worker, 4 S, and of the server, 4 S / R, and while it runs three vectors of 4 S;
S (1 + 16 / 64) bits go to the servers, as much comes back from them.
"""

from __future__ import annotations

from phalanx.planner.collectives import Group, all_gather_s, all_reduce_s, all_to_all_s
from phalanx.planner.network import Cluster
from phalanx.planner.parameters import attention_inputs
from phalanx.planner.shape import ModelShape, RunShape
from phalanx.spec.layout import Layout

_BITS = 1 + 16 / 64


def held_bytes(run: RunShape, layout: Layout, shard: int, ends: int) -> int:
    """Beside AdamW's moments. shard: parameters of the rank's shard; ends: of the embedding and the head among them."""
    if run.local_steps:
        return 8 * shard
    if run.compression == "powersgd":
        return 8 * (shard if run.compresses_ends else shard - ends)
    if run.compression == "onebit_adam":
        return (4 + 12) * shard + 4 * shard // layout.dp_replicate
    return 0


def exchange_s(
    model: ModelShape, run: RunShape, layout: Layout, cluster: Cluster, parameters: float, shares: tuple[float, float]
) -> float:
    """A step's part of what replicas exchange, beside nothing else; 0 where fully_shard sums over them. parameters: of
    the rank, before dp_shard and cp cut them. shares: of the links' bandwidth that is reached.
    """
    if layout.dp_replicate == 1 or not run.has_apart_replicas:
        return 0.0
    shards = layout.dp_shard * layout.cp
    group = cluster.group(layout.dp_replicate, shards * layout.tp, *shares)
    if run.local_steps:
        return 3 * all_reduce_s(4 * parameters / shards, group) / run.local_steps
    if run.compression == "powersgd":
        return _powersgd_s(model, run, shards, group)
    num_bytes = _BITS * parameters / shards / 8
    return all_to_all_s(num_bytes, group) + all_gather_s(num_bytes, group)


def _powersgd_s(model: ModelShape, run: RunShape, shards: int, group: Group) -> float:
    """Sums of P over the rows of a rank's pieces, of Q over the columns, and of what is sent as it is."""
    inputs = attention_inputs(model)
    rows = sum(each for each, _ in inputs) + model.dim
    columns = sum(each for _, each in inputs) + model.value_width
    num_products = 2 if model.gated_ffn else 1
    rows += num_products * model.ffn_dim + model.dim
    columns += num_products * model.dim + model.ffn_dim
    ends = 1 if model.tie_embeddings else 2
    rows, columns, plain = model.n_layers * rows, model.n_layers * columns, 0
    if run.compresses_ends:
        rows, columns = rows + ends * model.vocab_size, columns + ends * model.dim
    else:
        plain = ends * model.vocab_size * model.dim
    rank_bytes = 4 * run.compression_rank
    products = all_reduce_s(rank_bytes * rows / shards, group) + all_reduce_s(rank_bytes * columns, group)
    return products + (all_reduce_s(4 * plain / shards, group) if plain else 0.0)
