"""The suite's own eyes: the fill tells every place apart, and a wrong byte is reported by its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from refimpl import DevicePool, HostPool, oracle, presets, slots_of
from verify import fill, matrix
from verify.matrix import Cell, Mismatch, Trial
from verify.toys import TOYS


@pytest.mark.parametrize("toy", TOYS)
def test_no_two_words_of_a_pool_are_alike(toy: str) -> None:
    """Joined over the rounds, even the tails of odd rows are unique, and no byte is poison or zero."""
    spec = TOYS[toy](16)
    seen: set[bytes] = set()
    words = 0
    for c in spec.components:
        for layer in spec.layers_of(c):
            turns = [fill.layer_bytes(spec, 5, c.name, layer, turn) for turn in range(fill.rounds(spec))]
            assert all(turn.min() > 0 and turn.max() < fill.POISON for turn in turns)
            for first in range(0, fill.head_bytes(c), fill.WORD):
                joined = np.concatenate([turn[..., first : first + fill.WORD] for turn in turns], axis=-1)
                rows = joined.reshape(-1, joined.shape[-1])
                words += len(rows)
                seen |= {row.tobytes() for row in rows}
    assert len(seen) == words


@pytest.mark.parametrize("toy", TOYS)
def test_a_word_names_its_place(toy: str) -> None:
    spec = TOYS[toy](4)
    for c in spec.components:
        for layer in spec.layers_of(c):
            rows = fill.layer_bytes(spec, 3, c.name, layer)
            for page, token, head in np.ndindex(rows.shape[:3]):
                number = fill.number(rows[page, token, head, : fill.WORD])
                if number is not None:  # rows narrower than a word show it over several rounds
                    assert fill.place(spec, 3, number) == fill.Place(c.name, layer, page, token, head, 0)


def test_the_pattern_of_older_upstream_tests_cannot_tell_layers_apart() -> None:
    """A bf16 counter plus the number of the layer: past 512 the sum is the counter again. The fill keeps them apart."""
    counter = torch.arange(16 * 1024).bfloat16()
    assert torch.equal(counter[1024:] + 0, counter[1024:] + 1)
    spec = presets.mha(2, 2, 64, torch.bfloat16, 16)
    layers = [fill.layer_bytes(spec, 8, "k", layer) for layer in (0, 1)]
    assert (layers[0].reshape(-1, 4) != layers[1].reshape(-1, 4)).any(axis=1).all()


def swap_layers(host: HostPool, device: DevicePool) -> None:
    a, b = device.buffer("k", 0), device.buffer("k", 1)
    kept = a.clone()
    a.copy_(b)
    b.copy_(kept)


def leave_out_a_token(host: HostPool, device: DevicePool) -> None:
    device.view("v", 2)[1, 3] = torch.full_like(device.view("v", 2)[1, 3].view(torch.uint8), 255).view(torch.bfloat16)


def spill_into_a_page(host: HostPool, device: DevicePool) -> None:
    device.view("k", 0)[0, 0] = device.view("k", 0)[1, 0]


WRONG: dict[str, tuple[Callable[[HostPool, DevicePool], None], str]] = {
    "layers swapped": (
        swap_layers,
        "k of layer 0, page 1, token 0, head 0, word 0: "
        "expected [k of layer 0, page 2, token 0, head 0, word 0], "
        "found [k of layer 1, page 2, token 0, head 0, word 0]",
    ),
    "a token left out": (
        leave_out_a_token,
        "v of layer 2, page 1, token 3, head 0, word 0: "
        "expected [v of layer 2, page 2, token 3, head 0, word 0], found poison (never written)",
    ),
    "a page that nobody asked for": (
        spill_into_a_page,
        "k of layer 0, page 0, token 0, head 0, word 0: expected poison (never written), "
        "found [k of layer 0, page 2, token 0, head 0, word 0]",
    ),
}


@pytest.mark.parametrize("fault", WRONG)
def test_the_first_wrong_word_is_decoded(fault: str) -> None:
    """Load host page 2 to device page 1, then damage the device."""
    damage, message = WRONG[fault]
    trial = Trial(Cell("mha", "page_first", "torch", "load"), TOYS["mha"](4), 0)
    fill.fill_host(trial.host)
    oracle.load(trial.host, trial.device.pool, slots_of([2], 4), slots_of([1], 4))
    oracle.load(trial.host, trial.expected_device.pool, slots_of([2], 4), slots_of([1], 4))
    damage(trial.host, trial.device.pool)
    assert matrix.first_wrong_word(trial.device.pool, trial.expected_device.pool, trial.host) == message


@pytest.mark.parametrize("at", ["guard before", "guard after", "gap between rows"])
def test_a_byte_outside_every_row_is_noticed(at: str) -> None:
    cell = replace(Cell("mha", "page_first", "torch", "load"), rows="strided")
    trial = Trial(cell, TOYS["mha"](4), 0)
    whole = trial.device.whole[0]
    row = TOYS["mha"](4).component("k").row_bytes
    whole[{"guard before": 0, "guard after": -1, "gap between rows": 64 + row}[at]] = 0
    with pytest.raises(Mismatch, match="outside every row"):
        trial.run()
