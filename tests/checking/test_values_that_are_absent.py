"""Tensors without values, weights without their scale, and packed weights that are 0 are named; no healthy ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import gonio
from catalog import seeded
from gonio.errors import InvalidArgumentError

State = dict[str, Tensor]
EMPTY = torch.empty(0)
FLOAT8 = torch.float8_e4m3fn


def found(source: object) -> set[tuple[str, str]]:
    return {(f.code, f.path) for f in gonio.check(source).findings if f.level != "info"}  # type: ignore[arg-type]


def sharded_model() -> State:
    """What one process of ZeRO-3 has of a model: norms are kept whole, and other parameters lie elsewhere."""
    made: State = {}
    for block in range(4):
        made |= {f"h.{block}.fc.weight": EMPTY, f"h.{block}.fc.bias": EMPTY, f"h.{block}.norm.weight": torch.ones(40)}
    return made | {"head.bias": torch.ones(9)}


@pytest.mark.parametrize("form", ["memory", "torch", "safetensors"])
def test_empty_tensors_beside_others_of_their_name_are_a_warning(form: str, tmp_path: Path) -> None:
    state, path = sharded_model(), tmp_path / f"model.{'pt' if form == 'torch' else 'safetensors'}"
    if form == "torch":
        torch.save({"module": state}, path)
    elif form == "safetensors":
        save_file(state, path)
    source = state if form == "memory" else path
    said = "8 of 13 tensors are empty, unlike others called bias, weight: "
    for findings in (gonio.check(source).findings, gonio.measure(source).findings):
        (finding,) = [f for f in findings if f.code == "G715"]
        assert finding.level == "warn"
        assert finding.found.startswith(said), finding.found


@pytest.mark.parametrize("state", [{}, {"a.weight": EMPTY, "a.bias": EMPTY}])
def test_a_file_without_a_value_is_a_warning(state: State, tmp_path: Path) -> None:
    save_file(state, tmp_path / "model.safetensors")
    checked = gonio.check(tmp_path / "model.safetensors")
    assert [(f.code, f.found) for f in checked.findings] == [
        ("G715", "none of 2 tensors has a value" if state else "it holds no tensor")
    ]
    assert not checked.intact
    assert str(checked.contents) == f"0 values in {'2 tensors (2 float32)' if state else '0 tensors'}, 1 file"
    assert state or checked.verdict == "Nothing to check: it holds no tensor."


def test_sides_of_0_that_a_model_really_has_are_no_finding() -> None:
    layers = {"none.weight": torch.ones(3, 0), "none.bias": torch.ones(3), "no.weight": torch.ones(0, 3)}
    rest = {"no.bias": EMPTY, "some.weight": seeded(4, 3), "some.bias": torch.ones(4)}
    rest |= {"no._extra_state": EMPTY.byte(), "some._extra_state": torch.ones(9, dtype=torch.uint8)}
    observer = {"observer.min_val": EMPTY, "other.min_val": torch.tensor(0.5), "observer.scale": torch.ones(4)}
    assert found({**layers, **rest, **observer}) == set()


def scaled(name: str, seed: int) -> State:
    weight = seeded(32, 64, seed=seed)
    scale = weight.abs().amax(1, keepdim=True) / 448
    return {f"{name}.weight": (weight / scale).to(FLOAT8), f"{name}.weight_scale": scale}


def test_a_weight_without_the_scale_that_others_have_is_not_measured(tmp_path: Path) -> None:
    state = scaled("a", 0) | scaled("b", 1) | {"plain.weight": seeded(32, 64, seed=2).to(FLOAT8)}
    save_file({n: t.contiguous() for n, t in state.items() if n != "b.weight_scale"}, tmp_path / "model.safetensors")
    path = tmp_path / "model.safetensors"
    assert found(path) == {("G715", "b")}
    measured = gonio.measure(path)
    assert measured["b"].status == "skipped"
    assert "float8_e4m3fn up to 448, without the scale that other weights of the file have" in measured["b"].reason
    plain = state["plain.weight"].double()
    assert measured["plain"].frobenius == pytest.approx(float(plain.norm()), rel=1e-6)
    after = {"b.weight": state["b.weight"], **scaled("a", 0)}
    assert gonio.measure({"b.weight": torch.ones(32, 64)}, after)["b"].status == "not compared"


def packed(zero: set[int]) -> State:
    """Blocks and scales of MXFP4; scales of 0 are 2⁻¹²⁷."""
    draw, made = torch.Generator().manual_seed(0), {}
    for layer in range(4):
        blocks = torch.randint(0, 256, (2, 8, 3, 16), dtype=torch.uint8, generator=draw)
        scales = torch.full((2, 8, 3), 0 if layer in zero else 120, dtype=torch.uint8)
        made |= {f"layers.{layer}.up_blocks": blocks, f"layers.{layer}.up_scales": scales}
    return made


def test_codes_that_are_0_unlike_their_siblings_are_a_warning() -> None:
    assert found(packed(set())) == set()
    (finding,) = gonio.check(packed({2})).findings
    assert (finding.code, finding.path) == ("G709", "layers.2.up_scales")
    assert finding.found == "every value is 0, unlike in its 3 siblings of other layers"
    masks = {f"layers.{i}.mask": torch.full((8, 8), i != 2) for i in range(4)}  # one layer attends to everything
    assert found(masks) == set()
    every = gonio.check(packed({0, 1, 2, 3})).findings
    assert [f.code for f in every] == ["G101"] * 4


def test_a_matrix_of_zeros_with_short_rows_is_named() -> None:
    (finding,) = gonio.check({"down.weight": torch.zeros(200, 4), "up.weight": seeded(4, 200)}).findings
    assert (finding.code, finding.path) == ("G101", "down")
    ids = {"ids": torch.zeros(1, 512, dtype=torch.int64), "mask": torch.zeros(64, 64, dtype=torch.bool)}
    assert gonio.check({**ids, "up.weight": seeded(4, 200)}).findings == ()


def test_an_adapter_that_holds_nothing_is_named_when_it_is_compared(tmp_path: Path) -> None:
    save_file({}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
    assert found(tmp_path) == {("G715", "")}
    with pytest.raises(InvalidArgumentError, match="it holds no tensor"):
        gonio.measure({"a.weight": torch.eye(4)}, tmp_path)
