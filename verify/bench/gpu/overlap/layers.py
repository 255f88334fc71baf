"""Transformer layers that compute on a pool: they read the rows of a prefix from it, and write those of new tokens.

Weights are random, and all layers of a model share one set: it is larger than a GPU's cache, so that each layer reads
its weights from memory as it would if they were its own. What is left out takes little of a layer's time: rotary
embeddings, what ranks send each other, and the choice of experts (see `Shape.intermediate`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import CausalBias, causal_lower_right

from refimpl import DevicePool, PoolSpec

Matrix = Callable[[int, int], torch.Tensor]
Layer = Callable[[torch.Tensor, DevicePool, int, "Rows"], torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """What a rank of a model computes, beside what its pool says.

    heads         of queries
    intermediate  lanes inside the gated MLP; of a mixture of experts, those of all experts that a token meets
    query_rank    MLA: lanes between the two projections of queries
    latent        MLA: lanes of a row from which keys and values are made; the others are keys of every head
    head_dim      MLA: lanes of a head's values, and of its keys without the shared ones
    """

    hidden: int
    heads: int
    intermediate: int
    query_rank: int = 0
    latent: int = 0
    head_dim: int = 0


class Rows(NamedTuple):
    """Device slots: new tokens are `first` to `end`, and attend to everything from `base` on."""

    base: int
    first: int
    end: int


def layers(shape: Shape, spec: PoolSpec, device: str, seed: int) -> Layer:
    """`(x, pool, layer, rows)` → x after that layer; x is `[new token, hidden]`, bfloat16."""
    generator = torch.Generator(device).manual_seed(seed)

    def matrix(lanes_in: int, lanes_out: int) -> torch.Tensor:
        drawn = torch.empty(lanes_in, lanes_out, dtype=torch.bfloat16, device=device)
        return drawn.normal_(0, lanes_in**-0.5, generator=generator)

    attention = LatentAttention(shape, spec, matrix) if shape.latent else GroupedAttention(shape, spec, matrix)
    up, down = matrix(shape.hidden, 2 * shape.intermediate), matrix(shape.intermediate, shape.hidden)

    def layer(x: torch.Tensor, pool: DevicePool, number: int, rows: Rows) -> torch.Tensor:
        x = x + attention(_normal(x), pool, number, rows)
        gate, lanes = (_normal(x) @ up).chunk(2, -1)
        return x + (F.silu(gate) * lanes) @ down

    return layer


class GroupedAttention:
    """Several heads of queries share one of K and V."""

    def __init__(self, shape: Shape, spec: PoolSpec, matrix: Matrix) -> None:
        k = spec.component("k")
        self.heads, self.head_dim, own = (shape.heads, k.head_count), k.lanes, shape.heads * k.lanes
        self.qkv = matrix(shape.hidden, own + 2 * k.head_count * k.lanes)
        self.out = matrix(own, shape.hidden)

    def __call__(self, x: torch.Tensor, pool: DevicePool, layer: int, rows: Rows) -> torch.Tensor:
        queries, shared = self.heads
        q, *kv = (x @ self.qkv).unflatten(-1, (-1, self.head_dim)).split((queries, shared, shared), 1)
        held = [pool.buffer(name, layer) for name in ("k", "v")]
        for buffer, new in zip(held, kv, strict=True):
            buffer[rows.first : rows.end] = new
        k, v = (buffer[rows.base : rows.end] for buffer in held)
        return _attend(q, k, v).flatten(1) @ self.out


class LatentAttention:
    """Keys and values of every head are made from one latent row a token, as prefills of DeepSeek's models do it."""

    def __init__(self, shape: Shape, spec: PoolSpec, matrix: Matrix) -> None:
        self.shape, lanes = shape, spec.component("latent").lanes
        self.shared = lanes - shape.latent
        self.q = matrix(shape.hidden, shape.query_rank), matrix(shape.query_rank, self._all(self.shared))
        self.row, self.kv = matrix(shape.hidden, lanes), matrix(shape.latent, self._all(shape.head_dim))
        self.out = matrix(shape.heads * shape.head_dim, shape.hidden)

    def _all(self, more: int) -> int:
        return self.shape.heads * (self.shape.head_dim + more)

    def __call__(self, x: torch.Tensor, pool: DevicePool, layer: int, rows: Rows) -> torch.Tensor:
        heads, latent, dim = self.shape.heads, self.shape.latent, self.shape.head_dim
        buffer = pool.buffer("latent", layer)
        buffer[rows.first : rows.end] = (x @ self.row)[:, None]
        held = buffer[rows.base : rows.end]
        q = (_normal(x @ self.q[0]) @ self.q[1]).unflatten(-1, (heads, -1))
        k, v = (_normal(held[:, 0, :latent]) @ self.kv).unflatten(-1, (heads, -1)).split(dim, -1)
        k = torch.cat([k, held[..., latent:].expand(-1, heads, -1)], -1)
        return _attend(q, k, F.pad(v, (0, self.shared)))[..., :dim].flatten(1) @ self.out


def _normal(x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:])


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """`[token, head, lane]` each; the last query is of the last key's token."""
    mask = _causal(len(q), len(k))
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    return out[0].transpose(0, 1)


@cache
def _causal(queries: int, keys: int) -> CausalBias:
    return causal_lower_right(queries, keys)
