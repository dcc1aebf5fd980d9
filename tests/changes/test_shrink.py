"""`shrink_intruders_`: planted intruders scaled exactly, undone exactly, as peft's mitigation; `shrink_change_`."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from catalog import seeded
from foreign import torchvision
from gonio import parametrizations
from gonio.editing.twin import copy_of
from gonio.errors import InvalidArgumentError, NoMatchError, NotApplicableError
from gonio.measuring import difference
from gonio.surgery import Edited, parametrize_, shrink_change_, shrink_intruders_


def pair(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    """A network, and a copy with a planted direction in two of its layers."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(60, 80), nn.Conv2d(6, 48, 3), nn.ConvTranspose2d(48, 40, 2), nn.Linear(8, 3)).to(
        dtype
    )
    tuned = copy.deepcopy(base)
    with torch.no_grad():
        tuned[0].weight += (seeded(80, 1) @ seeded(1, 60, seed=1)).to(dtype)
        tuned[1].weight += (seeded(48, 1, seed=2) @ seeded(1, 54, seed=3)).reshape(48, 6, 3, 3).to(dtype)
        tuned[2].weight += 1e-3 * seeded(48, 40, 2, 2, seed=4).to(dtype)
    return base, tuned


@pytest.mark.parametrize("factor", [0.0, 0.5, 1.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_the_planted_directions_are_scaled_and_nothing_else(factor: float, dtype: torch.dtype) -> None:
    base, tuned = pair(dtype)
    before = {name: value.clone() for name, value in tuned.state_dict().items()}
    edited = shrink_intruders_(tuned, base, factor=factor)
    assert [change.path for change in edited.changes] == ["0", "1"]
    for path in ("0.weight", "1.weight"):
        left, values, right = torch.linalg.svd(before[path].double().flatten(1), full_matrices=False)
        exact = before[path].double().flatten(1) + (factor - 1) * values[0] * left[:, :1] @ right[:1]
        tolerance = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 3e-2}[dtype]
        torch.testing.assert_close(tuned.state_dict()[path].double().flatten(1), exact, atol=tolerance, rtol=tolerance)
    for name, value in tuned.state_dict().items():
        if name not in ("0.weight", "1.weight"):
            assert torch.equal(value, before[name])
    edited.undo_()
    assert all(torch.equal(value, before[name]) for name, value in tuned.state_dict().items())


def test_a_model_without_intruders_stays() -> None:
    base, _ = pair()
    tuned = copy.deepcopy(base)
    with torch.no_grad():
        tuned[0].weight *= 1.1
    edited = shrink_intruders_(tuned, base.state_dict())
    assert edited.changes == ()
    assert torch.equal(tuned[0].weight, base[0].weight * 1.1)


def test_it_removes_what_the_measurement_finds() -> None:
    base, tuned = pair()
    assert [t.path for t in difference(base, tuned).intruders] == ["0", "1"]
    shrink_intruders_(tuned, base, factor=0.0)
    assert difference(base, tuned).intruders == ()


@pytest.mark.parametrize("rank", [40, 48])
def test_it_equals_the_mitigation_of_peft(rank: int) -> None:
    torchvision()  # peft imports transformers, and that torchvision
    peft = pytest.importorskip("peft")
    from peft.tuners.lora.intruders import reduce_intruder_dimension

    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 40))
    target = ["0"] if rank == 48 else ["1"]
    config = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=target, init_lora_weights=False)
    model = peft.get_peft_model(copy.deepcopy(base), config)
    with torch.no_grad():  # one strong direction; the rank is full, so that peft's truncation loses nothing
        layer = model.base_model.model[int(target[0])]
        layer.lora_B.default.weight.mul_(1e-3)
        layer.lora_B.default.weight[:, 0] = seeded(layer.out_features, seed=5)
        layer.lora_A.default.weight[0] = seeded(layer.in_features, seed=1)
    ours = copy.deepcopy(model).merge_and_unload()
    edited = shrink_intruders_(ours, base, factor=0.75)
    assert [change.path for change in edited.changes] == target
    reduce_intruder_dimension(model, mitigation_lambda=0.75, logging_sink=None)
    theirs = model.merge_and_unload()
    for mine, exact in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, exact, atol=1e-5, rtol=1e-4)


def test_refusals() -> None:
    base, tuned = pair()
    with pytest.raises(InvalidArgumentError, match=r"needs a factor >= 0; found -1"):
        shrink_intruders_(tuned, base, factor=-1)
    with pytest.raises(
        NotApplicableError, match=r"cannot change layer '0': the base has no weight of its path and shape"
    ):
        shrink_intruders_(tuned, {"other.weight": torch.ones(2, 2)})
    with pytest.raises(NoMatchError, match="shrink_intruders_"):
        shrink_intruders_(tuned, base, where=nn.BatchNorm2d)
    kept = tuned[0].weight.detach().clone()
    with torch.no_grad():
        tuned[1].weight[0, 0, 0, 0] = float("nan")
    with pytest.raises(NotApplicableError, match="values that are not finite"):
        shrink_intruders_(tuned, base)
    assert torch.equal(tuned[0].weight, kept), "rolled back"


def test_layers_that_the_base_lacks_are_noted() -> None:
    base, tuned = pair()
    state = base.state_dict()
    del state["1.weight"]
    edited = shrink_intruders_(tuned, state)
    assert "1: the base has no weight of this path and shape" in str(edited)


@pytest.mark.parametrize("factor", [0.0, 0.125, 1.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_the_whole_change_is_scaled_biases_included(factor: float, dtype: torch.dtype) -> None:
    base, tuned = pair(dtype)
    with torch.no_grad():
        tuned[3].bias += 1.0
    before = {name: value.clone() for name, value in tuned.state_dict().items()}
    edited = shrink_change_(tuned, base.state_dict(), factor=factor)
    assert [change.path for change in edited.changes] == ["0", "1", "2", "3"]
    for name, old in base.state_dict().items():
        exact = old.double() + factor * (before[name].double() - old.double())
        tolerance = {torch.float64: 1e-15, torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype]
        torch.testing.assert_close(tuned.state_dict()[name].double(), exact, atol=tolerance, rtol=tolerance)
        if factor in (0.0, 1.0):
            assert torch.equal(tuned.state_dict()[name], before[name] if factor else old)
    edited.undo_()
    assert all(torch.equal(value, before[name]) for name, value in tuned.state_dict().items())


def test_a_change_is_scaled_where_it_is_asked_and_known() -> None:
    base, tuned = pair()
    before = copy.deepcopy(tuned)
    shrink_change_(tuned, base, where="0", factor=0.0)
    assert torch.equal(tuned[0].weight, base[0].weight)
    assert torch.equal(tuned[1].weight, before[1].weight)
    state = {name: value for name, value in base.state_dict().items() if not name.startswith("3")}
    assert "3.weight, 3.bias: the base has no weight of this path and shape" in str(shrink_change_(tuned, state))
    del state["0.bias"]  # a part of a layer is named, too
    said = str(shrink_change_(tuned, state))
    assert "0.bias, 3.weight, 3.bias: the base has no weight" in said
    assert "0  the change of weight scaled by 0.5" in said


def test_what_a_change_cannot_be_scaled_by() -> None:
    base, tuned = pair()
    with pytest.raises(InvalidArgumentError, match="needs a factor >= 0; found -1"):
        shrink_change_(tuned, base, factor=-1)
    with pytest.raises(NotApplicableError, match="the base has no weight of its path and shape"):
        shrink_change_(tuned, {})
    with pytest.raises(NoMatchError, match="shrink_change_"):
        shrink_change_(nn.Sequential(nn.ReLU()), {})
    with torch.no_grad():
        tuned[2].weight[0, 0, 0, 0] = torch.nan
    before = {name: value.clone() for name, value in tuned.state_dict().items()}
    with pytest.raises(NotApplicableError, match="it or its base has values that are not finite"):
        shrink_change_(tuned, base)
    for name, value in tuned.state_dict().items():  # a refused verb has changed nothing
        assert torch.equal(value.nan_to_num(7), before[name].nan_to_num(7))


def test_a_weight_that_is_computed_is_left_out() -> None:
    base, tuned = pair()
    parametrize_(tuned, parametrizations.WeightNorm(), where="0")
    before = tuned[0].weight.detach().clone()
    edited = shrink_intruders_(tuned, base, factor=0.0)
    assert [change.path for change in edited.changes] == ["1"]
    assert "0 stays: its weight is computed by a parametrization" in edited.notes
    assert torch.equal(tuned[0].weight, before)


class Exp(nn.Module):
    """A parametrization of a user."""

    def forward(self, raw: torch.Tensor) -> torch.Tensor:
        return raw.exp()


def of_a_user(layer: nn.Module) -> None:
    nn.utils.parametrize.register_parametrization(layer, "weight", Exp())


def of_gonio(layer: nn.Module) -> None:
    parametrize_(layer, parametrizations.Sphere())


COMPUTED = {
    "a parametrization of a user": (of_a_user, "its weight is computed by a parametrization"),
    "gonio": (of_gonio, "its weight is computed by a parametrization"),
    "weight norm": (nn.utils.parametrizations.weight_norm, "its weight is computed by a parametrization"),
    "spectral norm": (nn.utils.parametrizations.spectral_norm, "its weight is computed by a parametrization"),
    "orthogonal": (nn.utils.parametrizations.orthogonal, "its weight is computed by a parametrization"),
    "old weight norm": (
        nn.utils.weight_norm,
        r"a hook of torch.nn.utils computes its weight: use remove_weight_norm()",
    ),
    "old spectral norm": (nn.utils.spectral_norm, "a hook of torch.nn.utils computes its weight: use remove_spectral"),
}


def changed(base: nn.Module) -> nn.Module:
    tuned = copy_of(base)
    with torch.no_grad():
        for seed, parameter in enumerate(tuned.parameters()):
            parameter += 0.5 * seeded(*parameter.shape, seed=seed).to(parameter)
    return tuned


@pytest.mark.filterwarnings("ignore:`?torch.nn.utils.weight_norm")
@pytest.mark.parametrize("kind", COMPUTED)
def test_a_change_of_a_weight_that_is_computed_is_left_out(kind: str) -> None:
    compute, why = COMPUTED[kind]
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4)).double()
    compute(base[0])
    base.eval()
    tuned = changed(base)
    before = {name: value.clone() for name, value in tuned.state_dict().items()}
    edited = shrink_change_(tuned, base)
    assert [change.path for change in edited.changes] == ["1"]
    assert any(note.startswith("0 stays: ") and why in note for note in edited.notes), edited.notes
    assert not any("original" in note or "weight_parametrization" in note for note in edited.notes)
    for name, value in tuned.state_dict().items():
        assert torch.equal(value, before[name]) == name.startswith("0.")
    edited.undo_()
    with pytest.raises(NoMatchError, match=re.escape(why)):
        shrink_change_(tuned, base, where="0*")


def test_a_change_of_a_pruned_weight_is_scaled_where_the_masks_are_the_same() -> None:
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(6, 5)).double()
    prune.random_unstructured(base[0], "weight", 7)
    tuned = changed(base)
    ends = [(layer.weight_orig * layer.weight_mask).detach() for layer in (base[0], tuned[0])]
    shrink_change_(tuned, base, factor=0.25)
    tuned(torch.zeros(1, 6, dtype=torch.float64))  # the hook computes the weight anew
    torch.testing.assert_close(tuned[0].weight, ends[0] + 0.25 * (ends[1] - ends[0]), rtol=1e-12, atol=1e-12)
    tuned[0].weight_mask[0] = 1 - tuned[0].weight_mask[0]
    with pytest.raises(NoMatchError, match="its pruning mask is another one in the base"):
        shrink_change_(tuned, base)


@pytest.mark.parametrize("verb", [shrink_change_, shrink_intruders_], ids=lambda verb: verb.__name__)
def test_the_factors_of_an_adapter_are_left_out(verb: Callable[..., Edited]) -> None:
    torchvision()  # peft imports transformers, and that torchvision
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
    base = peft.get_peft_model(network, peft.LoraConfig(target_modules=["0"], r=2))
    tuned = changed(base)
    before = {name: value.clone() for name, value in tuned.state_dict().items()}
    edited = verb(tuned, base)
    assert {change.path for change in edited.changes} <= {"base_model.model.1"}
    note = "base_model.model.0 stays: an adapter of peft computes its weight: merge and unload it first"
    assert [note for note in edited.notes if "model.0" in note] == [note]
    assert all(torch.equal(tuned.state_dict()[name], before[name]) for name in before if "model.0" in name)


def test_the_base_may_have_weights_that_gonio_computes() -> None:
    base, tuned = pair(torch.float64)
    effective = base[0].weight.detach().clone()
    parametrize_(base, parametrizations.WeightNorm(), where="0")
    with torch.no_grad():
        base[0].weight_parametrization.magnitude *= 3
    shrink_change_(tuned, base, where="0", factor=0.0)
    torch.testing.assert_close(tuned[0].weight, 3 * effective, rtol=1e-12, atol=1e-12)
