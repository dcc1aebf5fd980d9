"""Additive masks of attention hold −inf on purpose; anything else that is infinite is damage."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gonio

CAUSAL = nn.Transformer.generate_square_subsequent_mask(12)
MASKS = {
    "causal": CAUSAL,
    "of a batch": CAUSAL.expand(2, 1, 12, 12).contiguous(),
    "half": CAUSAL.half(),
    "bfloat16": CAUSAL.bfloat16(),
    "of blocks": torch.zeros(8, 8).masked_fill(torch.eye(8).bool(), -torch.inf),
}


def changed(place: tuple[int, int], value: float) -> Tensor:
    mask = CAUSAL.clone()
    mask[place] = value
    return mask


DAMAGED = {
    "one NaN": changed((3, 3), torch.nan),
    "one +inf": changed((0, 5), torch.inf),
    "one number": changed((4, 2), 0.5),
    "one −inf among zeros": torch.zeros(12, 12).index_put_(
        (torch.tensor(3), torch.tensor(4)), torch.tensor(-torch.inf)
    ),
    "few −inf among zeros": torch.zeros(40, 40).fill_diagonal_(-torch.inf),
    "a vector": torch.tensor([0.0, -torch.inf, -torch.inf, 0.0]),
}


def found_in(tensor: Tensor) -> tuple[set[str], set[str]]:
    state = {"fc.weight": torch.randn(8, 8, generator=torch.Generator().manual_seed(0)), "mask": tensor}
    checked, measured = gonio.check(state), gonio.measure(state)
    return {f.code for f in checked.findings}, {f.code for f in measured.findings}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_no_damage(name: str) -> None:
    assert found_in(MASKS[name]) == (set(), set())
    checked = gonio.check({"mask": MASKS[name]})
    assert checked.intact
    assert checked["mask"].mask
    compared = gonio.measure({"mask": MASKS[name], "fc": torch.eye(3)}, {"mask": MASKS[name], "fc": torch.eye(3)})
    assert compared.findings == ()
    assert compared["mask"].reason == "an additive mask: every value is 0 or −inf"
    assert any("additive masks, of 0 and −inf alone: 1 tensor" in str(note) for note in checked.notes)


@pytest.mark.parametrize("name", DAMAGED)
def test_other_infinite_values_are(name: str) -> None:
    checked, measured = found_in(DAMAGED[name])
    assert "G001" in checked
    assert "G001" in measured
    tensor = {"fc": torch.eye(3), "mask": DAMAGED[name]}
    assert "G001" in {f.code for f in gonio.measure(tensor, tensor).findings}


def test_a_model_with_a_mask_is_healthy() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    model.register_buffer("mask", CAUSAL)
    assert not [finding for finding in gonio.measure(model).findings if finding.level == "error"]
    assert gonio.measure(model)["mask"].reason == "an additive mask: every value is 0 or −inf"
