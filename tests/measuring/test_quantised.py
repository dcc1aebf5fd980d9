"""Quantised weights that are damaged, or of torch's own kinds; those of each stored format are in the bank of files."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bank.files.packings import COLUMNS, ROWS, as_bytes, four_bits, packed_integers
from gonio.measuring import difference, measure

DAMAGE: dict[str, Callable[[dict[str, Tensor]], object]] = {
    "no description": lambda s: s.pop("w.weight.quant_state.bitsandbytes__nf4"),
    "a description of another shape": lambda s: s.update(
        {"w.weight.quant_state.bitsandbytes__nf4": as_bytes({"shape": [999, 999], "blocksize": 32})}
    ),
    "a description that is no JSON": lambda s: s.update({"w.weight.quant_state.bitsandbytes__nf4": torch.ones(9)}),
    "a block size of 0": lambda s: s.update(
        {"w.weight.quant_state.bitsandbytes__nf4": as_bytes({"shape": [ROWS, COLUMNS], "blocksize": 0})}
    ),
    "no scales": lambda s: s.pop("w.weight.absmax"),
    "too few scales": lambda s: s.update({"w.weight.absmax": torch.ones(3)}),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_packed_weight_that_cannot_be_read_has_a_row_with_the_reason(name: str) -> None:
    state, _, _ = four_bits(nested=False)
    DAMAGE[name](state)
    row = measure({**state, "v.weight": torch.eye(3)})["w"]
    assert row.status == "skipped"
    assert row.reason.startswith(("cannot be read: dequantising needs", "uint8: packed or quantised weights"))


def test_five_bits_are_not_read() -> None:
    state = {
        "w.qweight": torch.zeros(10, ROWS, dtype=torch.int32),
        "w.qzeros": torch.zeros(4, 2, dtype=torch.int32),
        "w.scales": torch.ones(4, ROWS),
        "w.g_idx": torch.zeros(64, dtype=torch.int32),
    }
    assert measure(state)["w.qweight"].reason == "int32: packed or quantised weights, whose scale is not known here"


@pytest.mark.filterwarnings("ignore")  # torch says that this package moves
def test_torch_s_quantised_layers_and_their_state_dicts_are_dequantised(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(12, 8), nn.Conv2d(3, 4, 3))
    model.qconfig = torch.ao.quantization.default_qconfig
    prepared = torch.ao.quantization.prepare(model)
    prepared[0](torch.ones(2, 12))
    prepared[1](torch.ones(2, 3, 5, 5))
    quantised = torch.ao.quantization.convert(prepared)
    torch.save(quantised.state_dict(), tmp_path / "q.pt")
    layers = {path: quantised[int(path)].weight().dequantize() for path in ("0", "1")}
    for source in (quantised, quantised.state_dict(), tmp_path / "q.pt"):
        found = measure(source)
        for path, weight in layers.items():
            plain = measure({"w.weight": weight})["w"]
            assert found[path].status == "measured", found[path].reason
            assert found[path].frobenius == pytest.approx(plain.frobenius, rel=1e-6)
            assert any("dequantised" in note for note in found[path].notes)
    dynamic = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(12, 8)), {nn.Linear}, dtype=torch.qint8)
    assert measure(dynamic)["0"].status == "measured"
    mixed = measure(nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), dynamic), batch=torch.randn(3, 6))
    assert [(signal.path, signal.gradient_rms) for signal in mixed.signals] == [("0", None), ("1", None)]


HOSTILE: dict[str, Callable[[dict[str, Tensor]], object]] = {
    "a shape of floats": lambda s: s.update({"w.weight_shape": torch.tensor([16.0, float("nan")])}),
    "a negative shape": lambda s: s.update({"w.weight_shape": torch.tensor([16, -64])}),
    "a shape without values": lambda s: s.update({"w.weight_shape": torch.ones(2, dtype=torch.int64, device="meta")}),
    "groups out of range": lambda s: s.update({"w.weight_g_idx": torch.full((COLUMNS,), 99, dtype=torch.int32)}),
    "zero points of another shape": lambda s: s.update({"w.weight_zero_point": torch.ones(3, 3, dtype=torch.int32)}),
    "a part that is new": lambda s: s.update({"w.weight_rotation": torch.eye(3)}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_packed_integers_that_do_not_fit_are_named(name: str) -> None:
    state, _, _ = packed_integers(4, 4)
    HOSTILE[name](state)
    row = next(row for row in measure(state).values() if row.name.startswith("w.weight") and row.status == "skipped")
    assert row.reason.startswith(("cannot be read: ", "int32: packed or quantised weights", "packed, and its part"))
    before = {"w.weight": torch.ones(ROWS, COLUMNS), "v.weight": torch.eye(3)}
    assert difference(before, {**state, "v.weight": torch.eye(3)})["w"].status == "not compared"


def eight_bits(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    """A weight, its codes in 8-bit floats, and their scale for each matrix."""
    weight = 0.02 * torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))
    scale = weight.abs().amax((-2, -1), keepdim=True) / 448
    return weight, (weight / scale).to(torch.float8_e4m3fn), scale


@pytest.mark.parametrize(
    "key", ["l.weight_quantizer._scale", "l.quantizer.weight_scale", "l.fake_quant.scale", "l_scale", "a.l_scale"]
)
def test_eight_bits_whose_scale_may_lie_beside_the_layer_are_not_measured_without_it(key: str) -> None:
    weight, codes, scale = eight_bits(256, 192)
    layer = "a.l" if key.startswith("a.") else "l"
    file = {f"{layer}.weight": codes, key: scale.reshape(1)}
    found = measure(file)[layer]
    assert found.frobenius is None
    assert found.reason == f"float8_e4m3fn, and how {key} scales it is not known"
    assert difference({f"{layer}.weight": weight}, file)[layer].status == "not compared"
    alone = measure({f"{layer}.weight": codes, f"{layer}_bias": torch.zeros(256), "other.scale": scale.reshape(1)})
    assert alone[layer].frobenius == pytest.approx(float(codes.double().norm())), "the control: nothing of its own"


def test_the_scale_of_one_stack_of_experts_is_no_zero_point_of_another() -> None:
    (_, a, s), (_, b, t) = eight_bits(4, 256, 128), eight_bits(4, 128, 128)
    at = "m.experts"
    file = {f"{at}.up": a, f"{at}.up_scale_inv": s, f"{at}.down": b, f"{at}.down_scale_inv": t}
    found = measure({"m.gate.weight": torch.randn(4, 128), **file})
    for path, codes, scale in ((f"{at}.up", a, s), (f"{at}.down", b, t)):
        assert found[path].frobenius == pytest.approx(float((codes.double() * scale.double()).norm()), rel=1e-6)


def test_an_observer_that_has_seen_no_values_has_lost_none() -> None:
    quantization = torch.ao.quantization
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    with warnings.catch_warnings(action="ignore"):  # torch.ao is deprecated
        prepared = quantization.prepare_qat(model.train())
    found = measure(prepared)
    assert [finding for finding in found.findings if finding.code == "G001"] == []
    reasons = {row.reason for row in found.values() if row.name.endswith(("min_val", "max_val"))}
    assert "the range of an observer that has seen no values yet" in reasons
    prepared(torch.randn(5, 8))
    prepared[0].activation_post_process.activation_post_process.max_val.fill_(float("nan"))
    assert "G001" in [finding.code for finding in measure(prepared).findings]
