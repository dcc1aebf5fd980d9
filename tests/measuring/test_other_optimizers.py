"""The state of optimizers that keep something else than moments of the parameter's shape belongs to the weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import gonio
from gonio.measuring.reading.source import optimizer_of

# Several weights of each shape, so that the file's order does not tell which state is whose.
SHAPES = [(24, 8), (8, 8), (8, 8), (24, 8), (8,), (8,)]
WEIGHTS = {
    f"h.{i}.weight": torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i, shape in enumerate(SHAPES)
}


def adafactor(shape: tuple[int, ...]) -> dict[str, Any]:
    """The state of `transformers.optimization.Adafactor`, 5.23."""
    kept: dict[str, Any] = {"step": 3, "RMS": 0.5}
    if len(shape) < 2:
        return {**kept, "exp_avg_sq": torch.rand(shape)}
    return {**kept, "exp_avg_sq_row": torch.rand(shape[:-1]), "exp_avg_sq_col": torch.rand(shape[:-2] + shape[-1:])}


def adafactor_of_torch(shape: tuple[int, ...]) -> dict[str, Any]:
    """The state of `torch.optim.Adafactor`, 2.13."""
    kept: dict[str, Any] = {"step": torch.tensor(3.0)}
    if len(shape) < 2:
        return {**kept, "variance": torch.rand(shape)}
    rows, columns = [*shape[:-1], 1], [*shape[:-2], 1, shape[-1]]
    return {**kept, "row_var": torch.rand(rows), "col_var": torch.rand(columns)}


def adafactor_with_momentum(shape: tuple[int, ...]) -> dict[str, Any]:
    return {**adafactor(shape), "exp_avg": torch.randn(shape)}


def eight_bits(shape: tuple[int, ...]) -> dict[str, Any]:
    """The state of `bitsandbytes.optim.AdamW8bit`, 0.50.2, in its `state_dict()`."""
    entries = torch.Size(shape).numel()
    kept: dict[str, Tensor] = {}
    for i in (1, 2):
        kept |= {f"state{i}": torch.randint(256, shape, dtype=torch.uint8), f"qmap{i}": torch.linspace(0, 1, 256)}
        kept[f"absmax{i}"] = torch.rand(-(-entries // 256))
    return {"step": 3, "__bnb_optimizer_quant_state__": kept}


def in_an_inner_mapping(shape: tuple[int, ...]) -> dict[str, Any]:
    """The state of `bitsandbytes.optim.AdamW32bit`, 0.50.2."""
    return {"step": 3, "__bnb_optimizer_quant_state__": {"state1": torch.randn(shape), "state2": torch.rand(shape)}}


FORMS: dict[str, tuple[Callable[[tuple[int, ...]], dict[str, Any]], int]] = {  # and the tensors that are not moments
    "Adafactor": (adafactor, 8),
    "Adafactor of torch": (adafactor_of_torch, 10),
    "Adafactor with momentum": (adafactor_with_momentum, 8),
    "8 bits": (eight_bits, 36 - 12),  # scales of one block are single numbers
    "an inner mapping": (in_an_inner_mapping, 12),
}


def state_of(form: str, shapes: list[tuple[int, ...]]) -> dict[str, Any]:
    torch.manual_seed(0)
    states = {i: FORMS[form][0](shape) for i, shape in enumerate(shapes)}
    return {"state": states, "param_groups": [{"lr": 1e-3, "params": [*range(len(shapes))]}]}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["a folder", "a file"])
def test_no_state_belongs_to_no_weight_and_each_tensor_is_told(form: str, kind: str, tmp_path: Path) -> None:
    state, source = state_of(form, SHAPES), tmp_path
    if kind == "a folder":
        save_file(WEIGHTS, tmp_path / "model.safetensors")
        torch.save(state, tmp_path / "optimizer.pt")
    else:
        source = tmp_path / "last.ckpt"
        torch.save({"model": WEIGHTS, "optimizer": state}, source)
    found = gonio.check(source)
    assert "G801" not in {f.code for f in found.findings}, found.findings
    said = [note for note in found.notes if "only checked for NaN and infinity" in note]
    assert f"{FORMS[form][1]} tensors" in said[0]


@pytest.mark.parametrize("form", ["Adafactor", "Adafactor with momentum"])
def test_moments_of_another_shape_are_a_misfit_all_the_same(form: str, tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    torch.save(state_of(form, [*SHAPES[:-1], (9,)]), tmp_path / "optimizer.pt")
    assert [(f.code, f.path) for f in gonio.check(tmp_path).findings] == [("G801", "optimizer.pt: state.5")]


def test_values_in_an_inner_mapping_are_looked_at() -> None:
    state = state_of("an inner mapping", SHAPES)
    state["state"][1]["__bnb_optimizer_quant_state__"]["state1"][0, 0] = torch.nan
    held = optimizer_of({"model": WEIGHTS, "optimizer": state})
    assert {*held.parameters[1].tensors} == {"state1", "state2"}
    found = gonio.measure({"model": WEIGHTS, "optimizer": state})
    assert ("G001", "error") in {(f.code, f.level) for f in found.findings}
