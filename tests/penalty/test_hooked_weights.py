"""Weights that torch's hooks and parametrizations compute, whatever their names: each is one weight, as it is now."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import gonio
from catalog import seeded
from gonio import regularizers as R

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated in favor of:FutureWarning")

HOOKS = {
    "weight norm": lambda layer: torch.nn.utils.weight_norm(layer),
    "weight norm of all": lambda layer: torch.nn.utils.weight_norm(layer, dim=None),
    "spectral norm": lambda layer: torch.nn.utils.spectral_norm(layer).eval(),
    "pruning": lambda layer: prune.l1_unstructured(layer, "weight", amount=0.5),
}


def half_squares(weight: Tensor) -> float:
    return 0.5 * float(weight.detach().double().square().sum())


@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
def test_a_penalty_is_of_the_weight_that_the_next_forward_uses(hook) -> None:
    model = nn.Sequential(hook(nn.Linear(4, 4)), nn.ReLU(), nn.Linear(4, 2))
    penalty = gonio.Penalty(model, [("0", R.L2(1.0))])
    with torch.no_grad():
        for number, parameter in enumerate(model[0].parameters()):
            parameter.copy_(seeded(*parameter.shape, seed=number))
    value = float(penalty().detach())
    model(seeded(2, 4))
    assert value == pytest.approx(half_squares(model[0].weight), rel=1e-5)


@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
def test_gradients_are_added_after_a_backward(hook) -> None:
    model, x = nn.Sequential(hook(nn.Linear(4, 4)), nn.ReLU(), nn.Linear(4, 2)), seeded(2, 4)
    penalty = gonio.Penalty(model, [("0", R.L2(1.0))])
    (model(x).sum() + penalty()).backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x).sum().backward()
    penalty.add_grads_()
    for parameter, grad in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, grad)


def test_summaries_are_of_the_weight_that_the_next_forward_uses() -> None:
    layer = torch.nn.utils.weight_norm(nn.Linear(4, 3))
    before = gonio.lab.filter_summary(nn.Sequential(layer))["layers"]["0"]["norms"]
    layer.weight_g.data.mul_(10)
    after = gonio.lab.filter_summary(nn.Sequential(layer))["layers"]["0"]["norms"]
    assert after == pytest.approx([10 * norm for norm in before], rel=1e-5)


def test_computed_weights_of_any_name_count_once() -> None:
    attention = nn.MultiheadAttention(8, 2)
    parametrizations.spectral_norm(attention, "in_proj_weight")
    value = float(gonio.Penalty(attention.eval(), [(None, R.L2(1.0))])().detach())
    weights = (attention.in_proj_weight, attention.out_proj.weight)
    assert value == pytest.approx(sum(map(half_squares, weights)), rel=1e-5)
    groups = gonio.param_groups(attention, 0.1)
    assert "parametrizations.in_proj_weight.original" in groups.decayed
    assert "parametrizations.in_proj_weight.original" in gonio.param_groups(attention, matrices=True).matrices


@pytest.mark.parametrize("normed", [torch.nn.utils.weight_norm, parametrizations.weight_norm])
def test_a_normed_recurrent_weight_counts_once(normed) -> None:
    layer = normed(nn.LSTM(3, 4), "weight_ih_l0")
    value = float(gonio.Penalty(layer, [(None, R.L2(1.0))])().detach())
    assert value == pytest.approx(half_squares(layer.weight_ih_l0) + half_squares(layer.weight_hh_l0), rel=1e-5)
    scales = [n for n in dict(layer.named_parameters()) if n.endswith(("weight_ih_l0_g", "original0"))]
    groups = gonio.param_groups(layer, 0.1)
    assert groups.spared[scales[0]] == "one number per unit"
    assert len(groups.decayed) == 2
    measured = [path for path, row in gonio.measure(layer).items() if row.status == "measured"]
    assert sorted(measured) == ["weight_hh_l0", "weight_ih_l0"]


@pytest.mark.parametrize(
    "normed",
    [
        lambda m: gonio.parametrize_(m, gonio.parametrizations.WeightNorm(), where="0"),
        lambda m: torch.nn.utils.weight_norm(m[0], dim=None),
        lambda m: torch.nn.utils.weight_norm(m[0]),
    ],
)
def test_magnitudes_are_no_matrices_also_with_a_penalty(normed) -> None:
    """What a penalty says of a parameter is not what the parameter is."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3))
    normed(model)
    penalty = gonio.Penalty(model, [(None, R.L2(0.1))])
    groups = gonio.param_groups(model, matrices=True, penalty=penalty)
    (magnitude,) = [name for name in groups.others if name.startswith("0") and "bias" not in name]
    assert groups.others[magnitude] == "one number per unit"
    assert sum(name.startswith("0") for name in groups.matrices) == 1


def test_numbers_that_are_not_finite_are_refused() -> None:
    for value in (float("nan"), float("inf"), -1.0):
        with pytest.raises(gonio.errors.InvalidArgumentError, match="a finite weight_decay >= 0"):
            gonio.param_groups(nn.Linear(2, 2), value)
    with pytest.raises(gonio.errors.InvalidArgumentError, match=r"param_groups\(rule=\) belongs to μP"):
        gonio.param_groups(nn.Linear(2, 2), 0.1, rule="sgd")
