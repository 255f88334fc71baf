"""Small seeded language models that really read and write the paged device pools of a stack.

They are made so that bits can be compared. Nothing but + - × ÷ and rounding is used, which IEEE 754 defines to the
last bit, and sums have an order that depends on positions alone (`total`). So a token's log-probability depends on the
tokens before it and on nothing else: not on the batch, the chunks of a prefill, decoding, or the device. Only what is
in the pools goes from one step to the next, as the pools store it.

| model   | pools                                                                                                     |
|---------|-----------------------------------------------------------------------------------------------------------|
| `mha`   | K and V rows                                                                                              |
| `mla`   | latent rows                                                                                               |
| `swa`   | K and V of full layers; of window layers with slots of their own                                          |
| `mamba` | K and V of attention layers; conv and temporal states, overwritten in place                               |
| `v4`    | a logical anchor, compressed entries (one for four tokens) riding on it; a window, with state rings on it |
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F

from refimpl import DevicePool, PoolSpec, presets

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64

VOCABULARY, WIDTH = 32, 16
LONGEST = 2048  # tokens that have a position
HEADS, HEAD = 2, 8
LATENT, ROPE = 8, 4
WINDOW = 12  # tokens: one page of 8 and part of another
CHANNELS, KEPT = 4, 3  # of a head of recurrent state; inputs that a convolution of four remembers
STATE = 4  # lanes of temporal state for each channel
RATIO, RING = 4, 8  # tokens of a compressed entry; ring slots of a page
ENTRY = (LATENT, 4)  # bytes of an entry: a signed byte for each lane, and their scale

Pools = Mapping[str, DevicePool]
Submit = Callable[[Callable[[], object]], object]


# ---- arithmetic whose bits depend on nothing but its operands


def total(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Sum, neighbours first, then sums of neighbours: zeros behind the end change nothing."""
    x = x.movedim(dim, -1)
    while x.shape[-1] > 1:
        if x.shape[-1] % 2:
            x = F.pad(x, (0, 1))
        x = x[..., ::2] + x[..., 1::2]
    return x[..., 0]


def exp(x: torch.Tensor) -> torch.Tensor:
    """Nearly e^x, of products alone."""
    y = 1 + x.clamp(-512, 512) / 1024
    for _ in range(10):
        y = y * y
    return y


def linear(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return total(x[..., None, :] * weights)


def normal(x: torch.Tensor) -> torch.Tensor:
    return x / root(total(x * x) * (1 / x.shape[-1]) + 1e-6)[..., None]


def root(x: torch.Tensor) -> torch.Tensor:
    """By Heron's steps, each of them IEEE's: torch's square root of a double is, on a CPU, one time in a hundred not.

    Twelve are enough for numbers from 0.001 to 10,000.
    """
    found = (1 + x) / 2
    for _ in range(12):
        found = (found + x / found) / 2
    return found


def squash(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + x.abs())


def attend(scores: torch.Tensor, values: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """`[query, key, head]`, `[query or 1, key, head, lane]`, `[query, key]` → `[query, head × lane]`."""
    weights = torch.where(seen[..., None], exp(scores), 0.0)
    mixed = total(weights[..., None] * values, 1) / total(weights, 1)[..., None]
    return mixed.flatten(1)


# ---- what a model computes at a time


@dataclass(frozen=True, eq=False)
class Piece:
    """Some tokens of a request: a chunk of its prompt, or one that is decoded.

    tokens     all of the request as far as it is known
    begin, end of those, what is computed
    slots      pool that owns indices -> for each token up to `end` its device slot (0: it has none any more);
               of a state pool the one slot that holds the request's state
    """

    tokens: Sequence[int]
    begin: int
    end: int
    slots: Mapping[str, torch.Tensor]

    def table(self, pool: DevicePool, name: str) -> torch.Tensor:
        return self.slots[name].to(pool.device)

    def positions(self, device: torch.device) -> torch.Tensor:
        return torch.arange(self.begin, self.end, device=device)

    def window(self, pool: DevicePool, name: str, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots of the last tokens up to each of the piece, `[token, width]`, and which of them there are."""
        positions = self.positions(pool.device)[:, None] - torch.arange(width - 1, -1, -1, device=pool.device)
        return self.table(pool, name)[positions.clamp(min=0)], positions >= 0


class Mixer(Protocol):
    """What a layer does beyond its own token: it writes rows of the piece, and reads those before."""

    def __call__(self, pools: Pools, x: torch.Tensor, piece: Piece) -> torch.Tensor: ...


Matrix = Callable[[int, int], torch.Tensor]
MakeMixer = Callable[[Matrix, int], Mixer]


class Attention:
    """K and V rows of all tokens before, or of a window of them."""

    def __init__(self, matrix: Matrix, layer: int, pool: str = "kv", window: int | None = None) -> None:
        self.layer, self.pool, self.window = layer, pool, window
        self.q, self.k, self.v = (matrix(HEADS * HEAD, WIDTH) for _ in range(3))

    def __call__(self, pools: Pools, x: torch.Tensor, piece: Piece) -> torch.Tensor:
        pool = pools[self.pool]
        rows, table = [pool.buffer(name, self.layer) for name in ("k", "v")], piece.table(pool, self.pool)
        for buffer, weights in zip(rows, (self.k, self.v), strict=True):
            buffer[table[piece.begin : piece.end]] = linear(x, weights).unflatten(1, (HEADS, HEAD)).to(BF16)
        queries = linear(x, self.q).unflatten(1, (HEADS, HEAD))
        if self.window:
            slots, seen = piece.window(pool, self.pool, self.window)
        else:
            slots = table[None, : piece.end]
            seen = torch.arange(piece.end, device=pool.device) <= piece.positions(pool.device)[:, None]
        keys, values = (buffer[slots].to(FP64) for buffer in rows)
        return attend(total(queries[:, None] * keys), values, seen)


class LatentAttention:
    """One latent row a token, from which keys and values of every head are made; its last lanes are for keys only."""

    def __init__(self, matrix: Matrix, layer: int) -> None:
        self.layer = layer
        self.q, self.down = matrix(HEADS * HEAD, WIDTH), matrix(LATENT + ROPE, WIDTH)
        self.k, self.v = matrix(HEADS * HEAD, LATENT + ROPE), matrix(HEADS * HEAD, LATENT)

    def __call__(self, pools: Pools, x: torch.Tensor, piece: Piece) -> torch.Tensor:
        pool = pools["kv"]
        rows, table = pool.buffer("latent", self.layer)[:, 0], piece.table(pool, "kv")
        rows[table[piece.begin : piece.end]] = linear(x, self.down).to(BF16)
        latents = rows[table[: piece.end]].to(FP64)
        queries = linear(x, self.q).unflatten(1, (HEADS, HEAD))
        keys = linear(latents, self.k).unflatten(1, (HEADS, HEAD))
        values = linear(latents[:, :LATENT], self.v).unflatten(1, (HEADS, HEAD))
        seen = torch.arange(piece.end, device=pool.device) <= piece.positions(pool.device)[:, None]
        return attend(total(queries[:, None] * keys), values[None], seen)


class Recurrence:
    """A convolution of four inputs, then a state that forgets and learns by as much as each token says.

    Half of the heads remember for long, the others for a few tokens.
    """

    def __init__(self, matrix: Matrix, layer: int) -> None:
        self.layer = layer
        self.channels = HEADS * CHANNELS + 2 * STATE
        self.into, self.kernel, self.rate = matrix(self.channels, WIDTH), matrix(self.channels, 4), matrix(HEADS, WIDTH)
        self.inertia = torch.tensor([4.0, 1.0], dtype=FP64, device=self.rate.device).repeat(HEADS // 2)

    def __call__(self, pools: Pools, x: torch.Tensor, piece: Piece) -> torch.Tensor:
        conv, temporal = (pools["mamba"].buffer(name, self.layer) for name in ("conv_0", "temporal"))
        slot = int(piece.slots["mamba"])
        inputs = torch.cat([conv[slot], linear(x, self.into).to(BF16).T], 1)
        conv[slot] = inputs[:, -KEPT:]
        mixed = squash(total(inputs.to(FP64).unfold(1, 4, 1) * self.kernel[:, None])).T
        values, write, read = mixed.split([HEADS * CHANNELS, STATE, STATE], 1)
        rate = 1 / (1 + exp(self.inertia - linear(x, self.rate)))[..., None, None]
        news = rate * values.unflatten(1, (HEADS, CHANNELS))[..., None] * write[:, None, None]
        states, kept = [temporal[slot]], 1 - rate
        for keep, new in zip(kept, news, strict=True):
            states.append((keep * states[-1].to(FP64) + new).to(FP32))
        temporal[slot] = states[-1]
        return normal(total(torch.stack(states[1:]).to(FP64) * read[:, None, None]).flatten(1))


class Compressed:
    """A window of quantised latents and, with `compress`, entries that stand for four tokens each.

    An entry is made of the tokens that it stands for and the four before. What it is made of is kept in a ring of eight
    for each page of the window, so that at the end of a page the ring holds just what the next one begins with.
    """

    def __init__(self, matrix: Matrix, layer: int, compress: bool = True) -> None:
        self.layer, self.compress = layer, compress
        self.q, self.down = matrix(HEADS * LATENT, WIDTH), matrix(LATENT, WIDTH)
        self.gather = matrix(2 * LATENT, WIDTH)

    def __call__(self, pools: Pools, x: torch.Tensor, piece: Piece) -> torch.Tensor:
        window = Entries(pools["swa"], self.layer, 1)
        window.write(piece.table(window.pool, "swa")[piece.begin : piece.end], linear(x, self.down))
        slots, seen = piece.window(window.pool, "swa", WINDOW)
        latents = window.read(slots)
        if self.compress:
            self._compress(pools, x, piece)
            entries = Entries(pools["c4"], self.layer, RATIO)
            last = torch.arange(piece.end // RATIO, device=x.device) * RATIO + RATIO - 1
            far = entries.read(piece.table(entries.pool, "kv")[last]).expand(len(x), -1, -1)
            # Each sum has its own tree: where the window begins must not depend on how many entries there are.
            far_seen = last <= piece.positions(x.device)[:, None]
            return self._attend(x, latents, seen) + (self._attend(x, far, far_seen) if len(last) else 0)
        return self._attend(x, latents, seen)

    def _attend(self, x: torch.Tensor, latents: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """One latent for all heads, key and value in one; nothing where nothing is seen."""
        queries, rows = linear(x, self.q).unflatten(1, (HEADS, LATENT)), latents[:, :, None]
        return torch.where(seen.any(1)[:, None], attend(total(queries[:, None] * rows), rows, seen), 0.0)

    def _compress(self, pools: Pools, x: torch.Tensor, piece: Piece) -> None:
        states = self._remember(pools["c4_state"], linear(x, self.gather).to(FP32), piece)
        ends = [end for end in range(piece.begin, piece.end) if end % RATIO == RATIO - 1]
        if not ends:
            return
        device = x.device
        positions = torch.tensor(ends, device=device)[:, None] - torch.arange(RING - 1, -1, -1, device=device)
        latents, scores = states[positions - piece.begin + RING].to(FP64).split(LATENT, -1)
        weights = torch.where((positions >= 0)[..., None], exp(scores), 0.0)
        entries = Entries(pools["c4"], self.layer, RATIO)
        slots = piece.table(entries.pool, "kv")[positions[:, -1]]
        entries.write(slots, total(weights * latents, 1) / total(weights, 1))

    def _remember(self, pool: DevicePool, new: torch.Tensor, piece: Piece) -> torch.Tensor:
        """Put states of a piece into the rings; returns the eight before it and its own."""
        rings = pool.buffer("c4_state", self.layer).view(FP32).unflatten(1, (RING, 2 * LATENT))
        table, page_size = piece.table(pool, "swa"), pool.spec.page_size
        before = table[torch.arange(piece.begin - RING, piece.begin, device=new.device).clamp(min=0)]
        states = torch.cat([rings[before // page_size, before % page_size % RING], new])
        positions = piece.positions(new.device)
        overwritten = (positions % page_size < page_size - RING) & (positions + RING < piece.end)
        slots = table[positions[~overwritten]]
        rings[slots // page_size, slots % page_size % RING] = new[~overwritten]
        return states


class Entries:
    """Quantised latents in page rows: the bytes of all entries of a page, then their scales, then padding."""

    def __init__(self, pool: DevicePool, layer: int, ratio: int) -> None:
        self.pool, self.ratio, self.page_size = pool, ratio, pool.spec.page_size
        count, rows = self.page_size // ratio, pool.buffer(pool.spec.name, layer)
        lanes, scales = rows[:, : count * ENTRY[0]], rows[:, count * ENTRY[0] : count * sum(ENTRY)]
        self.lanes = lanes.view(torch.int8).unflatten(1, (count, LATENT))
        self.scales = scales.view(FP32)

    def _at(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return slots // self.page_size, slots % self.page_size // self.ratio

    def write(self, slots: torch.Tensor, latents: torch.Tensor) -> None:
        scales = (latents.abs().amax(-1) * (1 / 127)).clamp(min=1e-30).to(FP32)
        quantised = (latents / scales.to(FP64)[..., None]).round().clamp(-127, 127)
        self.lanes[self._at(slots)], self.scales[self._at(slots)] = quantised.to(torch.int8), scales

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        return self.lanes[self._at(slots)].to(FP64) * self.scales[self._at(slots)].to(FP64)[..., None]


# ---- models


@dataclass(eq=False)
class TinyModel:
    """
    specs    pools by name, as `build_stack` takes them
    windows  pool -> tokens at the end of a prefix that its layers look at
    states   pools whose rows are states of requests
    """

    name: str
    specs: dict[str, PoolSpec]
    mixers: Sequence[Mixer]
    windows: dict[str, int]
    embedding: torch.Tensor
    places: torch.Tensor
    outs: list[torch.Tensor]
    states: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.states = tuple(n for n, s in self.specs.items() if any(c.unit == "slot" for c in s.components))

    @property
    def page_size(self) -> int:
        return next(iter(self.specs.values())).page_size

    @property
    def owners(self) -> list[str]:
        """Pools that own indices."""
        return [name for name, spec in self.specs.items() if not spec.indices_from]

    def forward(
        self,
        pools: Pools,
        pieces: Sequence[Piece],
        before_layer: Callable[[int], object] = lambda layer: None,
        submit: Submit = lambda work: work(),
    ) -> list[list[torch.Tensor]]:
        """One step of a batch, layer by layer; for each piece a list that is filled in when the work has run.

        Then it holds one tensor, for each token of the piece the distribution of the next, `[token, vocabulary]`.
        """
        hidden = [self._embed(piece) for piece in pieces]
        told: list[list[torch.Tensor]] = [[] for _ in pieces]
        for layer in range(len(self.mixers)):
            before_layer(layer)
            submit(partial(self._layer, layer, pools, pieces, hidden))
        submit(partial(self._tell, hidden, told))
        return told

    def _embed(self, piece: Piece) -> torch.Tensor:
        now = torch.tensor(piece.tokens[piece.begin : piece.end], device=self.embedding.device)
        return self.embedding[now] + self.places[piece.begin : piece.end]

    def _layer(self, layer: int, pools: Pools, pieces: Sequence[Piece], hidden: list[torch.Tensor]) -> None:
        for i, piece in enumerate(pieces):
            mixed = self.mixers[layer](pools, normal(hidden[i]), piece)
            hidden[i] = hidden[i] + linear(mixed, self.outs[layer])

    def _tell(self, hidden: list[torch.Tensor], told: list[list[torch.Tensor]]) -> None:
        for x, distribution in zip(hidden, told, strict=True):
            weights = exp(linear(normal(x), self.embedding) * 0.5)
            distribution.append(weights / total(weights)[:, None])


def log_probabilities(distribution: torch.Tensor, following: Sequence[int]) -> list[float]:
    """Of what follows, as far as it is known. One logarithm at a time, by one function, wherever the model ran."""
    return [math.log(row[token]) for row, token in zip(distribution.tolist(), following, strict=False)]


def _mixers(kinds: Mapping[int, MakeMixer], matrix: Matrix) -> list[Mixer]:
    return [kinds[layer](matrix, layer) for layer in sorted(kinds)]


def _stack(*pools: PoolSpec) -> dict[str, PoolSpec]:
    return {pool.name: pool for pool in pools}


Recipe = tuple[dict[str, PoolSpec], dict[int, MakeMixer], dict[str, int]]


def _mha(page_size: int) -> Recipe:
    return _stack(presets.mha(3, HEADS, HEAD, BF16, page_size)), dict.fromkeys(range(3), Attention), {}


def _mla(page_size: int) -> Recipe:
    latent = presets.mla(3, LATENT + ROPE, BF16, page_size, split=(LATENT, ROPE))
    return _stack(latent), dict.fromkeys(range(3), LatentAttention), {}


def _swa(page_size: int) -> Recipe:
    full, near = (1, 3), (0, 2)
    kinds: dict[int, MakeMixer] = dict.fromkeys(full, Attention)
    kinds |= dict.fromkeys(near, partial(Attention, pool="swa", window=WINDOW))
    kv, swa = (presets.mha(i, HEADS, HEAD, BF16, page_size, name=n) for n, i in (("kv", full), ("swa", near)))
    return _stack(kv, swa), kinds, {"swa": WINDOW}


def _mamba(page_size: int) -> Recipe:
    attention, recurrent = (1,), (0, 2, 3)
    kinds: dict[int, MakeMixer] = dict.fromkeys(attention, Attention)
    kinds |= dict.fromkeys(recurrent, Recurrence)
    channels = HEADS * CHANNELS + 2 * STATE
    states = presets.mamba(recurrent, [(channels, KEPT)], BF16, (HEADS, CHANNELS, STATE), FP32)
    return _stack(presets.mha(attention, HEADS, HEAD, BF16, page_size), states), kinds, {}


def _v4(page_size: int) -> Recipe:
    """Rings shorter than a page, so that they are overwritten in place; a whole page where they are not."""
    if page_size % RING:
        raise ValueError(f"a page of `v4` holds whole rings of {RING} tokens, got page_size {page_size}")
    every, c4 = (0, 1, 2), (1, 2)
    kinds: dict[int, MakeMixer] = {0: partial(Compressed, compress=False), 1: Compressed, 2: Compressed}
    entries = page_size // RATIO
    pools = _stack(
        PoolSpec("kv", 0, page_size, (), "logical"),
        presets.v4_paged("swa", every, page_size * sum(ENTRY) + 8, page_size, page_size, ENTRY, indices_from=None),
        presets.v4_paged("c4", c4, entries * sum(ENTRY) + 4, page_size, entries, ENTRY, indices_from="kv"),
        presets.v4_state("c4_state", c4, RING, 2 * LATENT * FP32.itemsize, page_size),
    )
    return pools, kinds, {"swa": WINDOW}


# name -> page size unless said otherwise, and what the model is made of
MODELS: dict[str, tuple[int, Callable[[int], Recipe]]] = {
    "mha": (8, _mha),
    "mla": (8, _mla),
    "swa": (8, _swa),
    "mamba": (8, _mamba),
    "v4": (16, _v4),
}


def model(name: str, device: str | torch.device = "cpu", page_size: int | None = None, seed: int = 0) -> TinyModel:
    """A model of `MODELS` with its weights on a device. A V4 page holds whole rings."""
    if name not in MODELS:
        raise ValueError(f"no model {name!r}; there are {', '.join(MODELS)}")
    usual, recipe = MODELS[name]
    specs, kinds, windows = recipe(usual if page_size is None else page_size)
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator, dtype=FP64) / math.sqrt(columns)).to(device)

    mixers = _mixers(kinds, matrix)
    return TinyModel(
        name,
        specs,
        mixers,
        windows,
        embedding=matrix(VOCABULARY, WIDTH) * 4,
        places=matrix(LONGEST, WIDTH),
        outs=[matrix(WIDTH, HEADS * (CHANNELS if isinstance(m, Recurrence) else HEAD)) for m in mixers],
    )


# ---- without a cache


def alone(
    tiny: TinyModel, tokens: Sequence[int], chunks: Iterable[int] = ()
) -> tuple[torch.Tensor, dict[str, DevicePool]]:
    """The distribution behind every token, by the model alone in pools of its own; and those pools.

    chunks  how many tokens at a time; what they leave follows at once
    """
    pools, slots = private_pools(tiny, len(tokens))
    told: list[torch.Tensor] = []
    begin = 0
    for count in itertools.chain(chunks, [len(tokens)]):
        if begin < len(tokens):
            piece = Piece(tokens, begin, min(begin + count, len(tokens)), slots)
            told += tiny.forward(pools, [piece])[0]
            begin = piece.end
    return torch.cat(told).cpu(), pools


def speak(tiny: TinyModel, prompt: Sequence[int], count: int, seed: int = 0) -> list[int]:
    """What the model says behind a prompt: tokens drawn from its distributions."""
    pools, slots = private_pools(tiny, len(prompt) + count)
    generator, tokens, begin = torch.Generator().manual_seed(seed), list(prompt), 0
    for _ in range(count):
        ((distribution,),) = tiny.forward(pools, [Piece(tokens, begin, len(tokens), slots)])
        begin = len(tokens)
        tokens.append(int(torch.multinomial(distribution[-1].cpu(), 1, generator=generator)))
    return tokens[len(prompt) :]


def private_pools(tiny: TinyModel, tokens: int) -> tuple[dict[str, DevicePool], dict[str, torch.Tensor]]:
    """Device pools for one request, and its slots, one after another."""
    pages = -(-tokens // tiny.page_size) + 1
    pools = {name: DevicePool(spec, pages, tiny.embedding.device) for name, spec in tiny.specs.items()}
    slots = {name: torch.arange(tiny.page_size, pages * tiny.page_size) for name in tiny.owners}
    return pools, slots | {name: torch.tensor([1]) for name in tiny.states}
