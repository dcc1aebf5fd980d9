"""Held norms: exact over thousands of steps, in every layout; what a hold refuses; undo and state."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import gonio
from catalog import seeded
from gonio.errors import AlreadyAppliedError, InvalidArgumentError, NoMatchError, NotApplicableError
from gonio.geometry import layout_of, matrix_view
from gonio.measuring import step_rotation
from gonio.optim.holding import CHECKED
from gonio.optim.vectors import Vectors, factors_of
from gonio.optim.vectors import norms_of as norms_together
from laws.support import reloaded

LAYERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "linear": (lambda: nn.Linear(7, 5), "weight"),
    "conv": (lambda: nn.Conv2d(4, 6, 3), "weight"),
    "grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2), "weight"),
    "depthwise": (lambda: nn.Conv1d(4, 4, 3, groups=4), "weight"),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3), "weight"),
    "transposed grouped": (lambda: nn.ConvTranspose2d(4, 6, 2, groups=2), "weight"),
    "attention": (lambda: nn.MultiheadAttention(8, 2), "in_proj_weight"),
    "LSTM": (lambda: nn.LSTM(3, 5), "weight_hh_l0"),
}
SUMS = ("matrix", "filters", "columns")  # norms that are sums over entries
NORMS = (*SUMS, "spectral")


def norms_of(weight: Tensor, layout: Any, norm: str) -> Tensor:
    """The reference: norms of the matrix view in float64."""
    rows = matrix_view(weight.detach().double(), layout)
    if norm == "spectral":
        return torch.linalg.matrix_norm(rows, 2)
    return rows.norm(dim={"matrix": (1, 2), "filters": 2, "columns": 1}[norm])


def two_layers(**options: float) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, **options)


def one_layer() -> tuple[nn.Linear, torch.optim.Optimizer]:
    layer = nn.Linear(4, 3)
    return layer, torch.optim.SGD(layer.parameters(), lr=0.1)


def drift(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 0) -> None:
    """Steps along random gradients that are not orthogonal to the weights."""
    draw = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=draw).to(p.dtype) + p.detach()
        optimizer.step()


@pytest.mark.parametrize("step", ["free", "fixed"])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("layer", LAYERS)
def test_norms_stay_in_every_layout(layer: str, norm: str, step: str) -> None:
    make, name = LAYERS[layer]
    torch.manual_seed(0)
    module = make()
    layout, weight = layout_of(module, name), module.get_parameter(name)
    if (layer, norm) == ("depthwise", "columns"):
        with pytest.raises(NoMatchError, match=r"its columns have one entry each, which could not move"):
            gonio.hold_(module, torch.optim.SGD(module.parameters(), lr=0.1), norm=norm, step=step)
        return
    before, value = norms_of(weight, layout, norm), weight.detach().clone()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    held = gonio.hold_(module, optimizer, norm=norm, step=step)
    assert torch.equal(weight, value), "the initial radius changes no weight"
    drift(module, optimizer, 20)
    assert not torch.allclose(weight, value)
    assert torch.allclose(norms_of(weight, layout, norm), before, rtol=1e-6)
    held.undo_()
    drift(module, optimizer, 3)
    assert not torch.allclose(norms_of(weight, layout, norm), before, rtol=1e-3), "a negative control"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "norm", "tolerance"),
    [
        (torch.float32, "matrix", 1e-6),
        pytest.param(torch.float32, "filters", 1e-6, marks=pytest.mark.slow),
        pytest.param(torch.float32, "columns", 1e-6, marks=pytest.mark.slow),
        (torch.bfloat16, "filters", 2**-8),  # one rounding of the entries
        pytest.param(torch.float64, "filters", 1e-14, marks=pytest.mark.slow),
    ],
)
def test_ten_thousand_steps(dtype: torch.dtype, norm: str, tolerance: float) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(24, 16, dtype=dtype)
    before = norms_of(layer.weight, layout_of(layer), norm)
    optimizer = torch.optim.SGD([layer.weight], lr=0.01)
    gonio.hold_(layer, optimizer, norm=norm)
    draw = torch.Generator().manual_seed(0)
    for _ in range(10_000):
        layer.weight.grad = torch.randn(16, 24, generator=draw).to(dtype)
        optimizer.step()
    assert float((norms_of(layer.weight, layout_of(layer), norm) / before - 1).abs().max()) <= tolerance


def test_the_norm_of_a_million_entries_is_right() -> None:
    """One float32 sum over all entries is off by 1e-4 here, and the hold would drift with it."""
    weight = seeded(1024, 2048)
    layer = nn.Linear(2048, 1024, bias=False)
    layer.weight.data = weight.clone()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    gonio.hold_(layer, optimizer)
    for _ in range(3):
        layer.weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert float(layer.weight.detach().double().norm() / weight.double().norm()) == pytest.approx(1, abs=2e-7)


def test_a_spectral_norm_is_held_where_the_others_change() -> None:
    """A layer too large for an exact decomposition by 48 steps, and a training that diverges, which raises nothing."""
    torch.manual_seed(0)
    layer = nn.Linear(90, 70, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
    print_ = str(gonio.hold_(layer, optimizer, norm="spectral", radius=1.5))
    assert "weight: spectral norm of 1 matrix held at 1.5" in print_
    before = norms_of(layer.weight, layout_of(layer), "matrix")
    drift(layer, optimizer, 10)
    found = norms_of(layer.weight, layout_of(layer), "spectral")
    torch.testing.assert_close(found, torch.full_like(found, 1.5), rtol=1e-4, atol=0)
    assert not torch.allclose(norms_of(layer.weight, layout_of(layer), "matrix"), before, rtol=1e-2)
    for _ in range(CHECKED):
        layer.weight.grad = torch.full_like(layer.weight, torch.inf)
        optimizer.step()
    assert layer.weight.isnan().any()


# --- steps --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_hyperballs_formula(norm: str, dtype: torch.dtype) -> None:
    """w ← R·unit(w − ηR·unit(u)) written from the paper, with Adam's update u."""
    torch.manual_seed(0)
    plain, held = (nn.Conv2d(3, 5, 2, dtype=dtype) for _ in range(2))
    held.load_state_dict(plain.state_dict())
    order, dims = {"matrix": ("fro", (0, 1)), "spectral": (2, (0, 1)), "filters": (2, 1), "columns": (2, 0)}[norm]
    size = partial(torch.linalg.norm, ord=order, dim=dims, keepdim=True)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.05) for m in (plain, held)]
    gonio.hold_(held, optimizers[1], norm=norm, step="fixed")
    for seed in range(4):
        w = plain.weight.detach().double().flatten(1).clone()
        for m, opt in zip((plain, held), optimizers, strict=True):
            m.weight.grad = seeded(5, 3, 2, 2, seed=seed, dtype=dtype)
            opt.step()
        u = w - plain.weight.detach().double().flatten(1)
        radius = size(w)
        moved = w - 0.05 * radius * u / size(u)
        expected = radius * moved / size(moved)
        tolerance = 1e-5 if dtype is torch.float32 else 1e-12  # u is a difference of float32 numbers
        assert torch.allclose(held.weight.detach().double().flatten(1), expected, rtol=tolerance, atol=tolerance)
        plain.weight.data = held.weight.detach().clone()


def test_the_free_step_is_a_projection() -> None:
    plain, held = (nn.Linear(4, 3) for _ in range(2))
    held.load_state_dict(plain.state_dict())
    radius = plain.weight.detach().norm()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (plain, held)]
    gonio.hold_(held, optimizers[1])
    for m, opt in zip((plain, held), optimizers, strict=True):
        m.weight.grad = torch.ones(3, 4)
        opt.step()
    expected = plain.weight * radius / plain.weight.norm()
    assert torch.allclose(held.weight, expected, rtol=1e-6)


@pytest.mark.parametrize("rate", [1e-4, 0.03, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_fixed_step_turns_every_layer_by_arctan_of_the_rate(rate: float, dtype: torch.dtype) -> None:
    """Layers of any width and gradient; SGD, whose update is orthogonal to the weight of a scale-invariant layer."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 40, bias=False), nn.BatchNorm1d(40, affine=False), nn.ReLU(),
        nn.Linear(40, 300, bias=False), nn.BatchNorm1d(300, affine=False),
    ).to(dtype)  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    gonio.hold_(model, optimizer, step="fixed")
    tracker = gonio.Tracker(model, optimizer=optimizer, every=1, figures="training")
    for seed in range(3):
        optimizer.zero_grad()
        x = seeded(32, 6, seed=seed, dtype=dtype)
        (model(x) * seeded(32, 300, seed=seed + 9, dtype=dtype)).sum().backward()
        optimizer.step()
    turned = [row["rotation"] for row in tracker.rows]
    # eps of batch norm leaves 1e-5 of the gradient along the weight; at 1e-4, float32 rounds the change to 6e-4 of it
    assert turned == pytest.approx([math.atan(rate)] * 6, rel=2e-3 if dtype is torch.float32 else 1e-3)


def test_weights_without_gradient_stay() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    gonio.hold_(model, optimizer, step="fixed")
    before = model[1].weight.detach().clone()
    model[0](torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert torch.equal(model[1].weight, before)


# --- radius and magnitude ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", NORMS)
def test_a_radius_is_set_at_once_and_undone_to_the_bit(norm: str) -> None:
    layer = nn.Conv2d(3, 4, 3)
    before = layer.weight.detach().clone()
    held = gonio.hold_(layer, torch.optim.SGD(layer.parameters(), lr=0.1), norm=norm, radius=2.5)
    assert torch.allclose(norms_of(layer.weight, layout_of(layer), norm), torch.tensor(2.5).double(), rtol=1e-6)
    held.undo_()
    assert torch.equal(layer.weight, before)


@pytest.mark.parametrize("options", [{}, {"magnitude": "learned"}])
def test_the_end_of_a_hold_keeps_what_was_trained(options: dict[str, Any]) -> None:
    """A weight that no step has changed gets back its first value, as after any undo."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = model[2].weight.detach().clone()
    held = gonio.hold_(model, optimizer, norm="filters", radius=1.0, **options)
    model[:2](seeded(5, 4)).square().sum().backward()
    optimizer.step()
    expected = model[0].weight.detach().clone()
    held.undo_()
    assert torch.allclose(model[0].weight, expected, rtol=1e-6)
    assert torch.equal(model[2].weight, first)


def test_learned_magnitudes_have_their_own_rate_and_keep_the_function() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    x, expected = seeded(5, 4), model(seeded(5, 4)).detach()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    held = gonio.hold_(model, optimizer, norm="filters", radius=1.0, magnitude="learned", magnitude_lr=0.5)
    assert torch.allclose(model(x), expected, rtol=1e-5, atol=1e-6)
    rates = [(group["lr"], group["weight_decay"], len(group["params"])) for group in optimizer.param_groups]
    assert rates == [(0.01, 0.1, 2), (0.5, 0.0, 2), (0.01, 0.0, 2)]  # biases, gains, directions
    raw, gains = model[0]._parameters["weight"], model[0].weight_parametrization.magnitude
    before = gains.detach().clone()
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    assert torch.allclose(raw.norm(dim=1), torch.ones(8), rtol=1e-6)
    assert torch.allclose(model[0].weight.norm(dim=1), gains.abs(), rtol=1e-5)
    assert float((gains.detach() - before).abs().min()) > 0.1, "the gains move at their own rate"
    trained = model(x).detach()
    held.undo_()
    assert torch.allclose(model(x), trained, rtol=1e-5, atol=1e-6)
    assert [len(group["params"]) for group in optimizer.param_groups] == [4]
    assert type(model[0]) is nn.Linear
    assert set(optimizer.state) <= set(model.parameters())


def test_gains_that_a_norm_removes_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.LayerNorm(8), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(NotApplicableError, match=r"learn the magnitude of layer '0': a normalisation layer after it"):
        gonio.hold_(model, optimizer, norm="filters", magnitude="learned")
    assert len(optimizer.param_groups) == 1
    gonio.hold_(model, optimizer, where="2", norm="filters", magnitude="learned")
    gonio.hold_(model, optimizer, where="0", norm="filters")


# --- decay, groups, schedules -----------------------------------------------------------------------------------------


def test_decay_of_held_weights_is_set_to_0_and_said() -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW([{"params": [model.weight]}, {"params": [model.bias]}], lr=0.1, weight_decay=0.3)
    held = gonio.hold_(model, optimizer)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0, 0.3]
    assert held.notes == ("weight decay of 0.3 is 0 for weight: on a held weight it only rescales the step",)
    held.undo_()
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.3]


def test_a_group_with_other_weights_is_split_and_joined_again() -> None:
    model, optimizer = two_layers(momentum=0.5, weight_decay=0.3)
    before = [id(p) for p in optimizer.param_groups[0]["params"]]
    held = gonio.hold_(model, optimizer, where="1")
    first, second = optimizer.param_groups
    assert [id(p) for p in second["params"]] == [id(model[1].weight)]
    assert (first["weight_decay"], second["weight_decay"], second["momentum"]) == (0.3, 0, 0.5)
    drift(model, optimizer, 2)
    held.undo_()
    assert [[id(p) for p in group["params"]] for group in optimizer.param_groups] == [before]


@pytest.mark.parametrize("options", [{}, {"norm": "filters", "magnitude": "learned"}])
@pytest.mark.parametrize("groups", ["one group", "a group of weights"])
def test_groups_that_a_state_dict_has_made_anew_are_joined_again(options: dict[str, Any], groups: str) -> None:
    model, _ = two_layers()
    weights, biases = [model[0].weight, model[1].weight], [model[0].bias, model[1].bias]
    given = [[*model.parameters()]] if groups == "one group" else [weights, biases]
    optimizer = torch.optim.AdamW([{"params": each} for each in given], lr=0.01, weight_decay=0.3)
    before = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
    held = gonio.hold_(model, optimizer, **options)
    drift(model, optimizer, 2)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    held.undo_()
    assert [[id(p) for p in group["params"]] for group in optimizer.param_groups] == before
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.3}
    assert {id(p) for p in optimizer.state} == {id(p) for p in model.parameters()}


def test_the_decay_comes_back_where_the_rest_of_a_group_is_gone() -> None:
    model, optimizer = two_layers(weight_decay=0.3)
    held = gonio.hold_(model, optimizer)
    del optimizer.param_groups[0]
    held.undo_()
    (group,) = optimizer.param_groups
    assert (len(group["params"]), group["weight_decay"]) == (2, 0.3)


def test_a_schedule_that_would_miss_a_group_is_refused() -> None:
    model, optimizer = two_layers(weight_decay=0.3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(NotApplicableError, match=r"the optimizer has a schedule, .* Call hold_ before the schedule"):
        gonio.hold_(model, optimizer, where="1")
    optimizer.param_groups[0]["weight_decay"] = 0
    gonio.hold_(model, optimizer, where="1", step="fixed")
    drift(model, optimizer, 1)
    schedule.step()
    w = model[1].weight.detach().clone()
    drift(model, optimizer, 1)
    assert 0 < float(step_rotation(w, model[1].weight).rotation) <= math.atan(0.01) * 1.001


class NotesItsRate(torch.optim.AdamW):
    """Its groups have their first learning rate from the start, as those of a schedule have."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.01, weight_decay=0.3)
        self.defaults["initial_lr"] = 0.01
        for group in self.param_groups:
            group["initial_lr"] = 0.01


def test_a_first_learning_rate_that_the_class_notes_itself_is_no_schedule() -> None:
    model = two_layers()[0]
    optimizer = NotesItsRate(model.parameters())
    held = gonio.hold_(model, optimizer, where="1", radius=2.0)
    drift(model, optimizer, 2)
    assert float(model[1].weight.detach().norm()) == pytest.approx(2.0)
    held.undo_()
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(NotApplicableError, match="the optimizer has a schedule"):
        gonio.hold_(model, optimizer, where="1")


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_weight_is_held_once() -> None:
    model, optimizer = two_layers()
    held = gonio.hold_(model, optimizer, where="0")
    with pytest.raises(AlreadyAppliedError, match=r"hold_: cannot be applied twice to '0'; found a hold of 'weight'"):
        gonio.hold_(model, torch.optim.AdamW(model.parameters()))
    other = gonio.hold_(model, optimizer, where="1")
    other.undo_()
    held.undo_()
    gonio.hold_(model, optimizer)


def test_tied_weights_are_held_once() -> None:
    model = nn.ModuleDict({"table": nn.Embedding(6, 4), "head": nn.Linear(4, 6, bias=False)})
    model["head"].weight = model["table"].weight
    held = gonio.hold_(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert [change.path for change in held.changes] == ["head"]


@pytest.mark.parametrize("options", [{}, {"norm": "filters", "magnitude": "learned"}])
def test_quantised_weights_are_left_out(options: dict[str, Any]) -> None:
    """As in layers that derive from nn.Linear and store integers, in an optimizer that was given all parameters."""
    model, _ = two_layers()
    model[1].weight = nn.Parameter(model[1].weight.detach().mul(100).to(torch.int8), requires_grad=False)
    held = gonio.hold_(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
    assert [change.path for change in held.changes] == ["0"]
    assert "1 stays: its weight is quantised to int8" in held.notes


def test_weights_of_zeros_are_refused() -> None:
    layer = nn.Linear(4, 3)
    with torch.no_grad():
        layer.weight[1] = 0
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    gonio.hold_(layer, optimizer).undo_()
    with pytest.raises(NotApplicableError, match=r"the norm of 1 of its vectors is 0 or not finite in torch.float32"):
        gonio.hold_(layer, optimizer, norm="filters")
    table = nn.Embedding(5, 3, padding_idx=0)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    with pytest.raises(NoMatchError, match=r"hold_: no module of the model is suitable"):
        gonio.hold_(table, optimizer)  # tables are held on request only
    gonio.hold_(table, optimizer, where=nn.Embedding, norm="filters", radius=1.0)
    drift(table, optimizer, 2)
    assert torch.allclose(table.weight.norm(dim=1)[1:], torch.ones(4), rtol=1e-6)


def test_weights_outside_of_the_optimizer_are_named() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    torch.nn.utils.parametrizations.weight_norm(model[0])
    held = gonio.hold_(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert held.notes == ("0 stays: its weight is computed from other parameters",)
    with pytest.raises(NoMatchError, match=r"matches no suitable module; .* 0 \(its weight is computed"):
        gonio.hold_(model, torch.optim.SGD(model.parameters(), lr=0.1), where="0")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"norm": "rows"}, r"norm=\) is one of 'matrix', 'spectral', 'filters', 'columns'; found 'rows'"),
        ({"step": "half"}, r"step=\) is one of 'free', 'fixed'; found 'half'"),
        ({"radius": 0}, r"radius=\) is 'initial' or a positive number; found 0"),
        ({"radius": True}, r"radius=\) is 'initial' or a positive number; found True"),
        ({"magnitude": "fixed"}, r"magnitude=\) is one of None, 'learned'"),
        ({"magnitude": "learned"}, r"holds filters; found norm='matrix'"),
        ({"magnitude_lr": 0.1}, r"found magnitude_lr=0.1 without gains"),
    ],
)
def test_errors(options: dict[str, Any], match: str) -> None:
    layer, optimizer = one_layer()
    with pytest.raises(InvalidArgumentError, match=match):
        gonio.hold_(layer, optimizer, **options)
    drift(layer, optimizer, 1)


# --- state ------------------------------------------------------------------------------------------------------------


def test_a_resumed_training_is_the_same_to_the_last_bit() -> None:
    """The radius is that of the first training, whatever the resumed model was initialised with."""

    def start(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        return model, optimizer, gonio.hold_(model, optimizer, norm="filters", step="fixed")

    model, optimizer, held = start(0)
    drift(model, optimizer, 5)
    parts = {"model": model, "optimizer": optimizer, "held": held}
    state = reloaded({name: part.state_dict() for name, part in parts.items()})
    drift(model, optimizer, 5, seed=1)
    other, resumed, again = start(1)
    other.load_state_dict(state["model"])
    resumed.load_state_dict(state["optimizer"])
    drift(other, resumed, 5, seed=1)
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name
    assert all(torch.equal(again.state_dict()[name], r) for name, r in held.state_dict().items())
    with pytest.raises(InvalidArgumentError, match=r"has a radius of shape \(1, 8, 1\) for 0.weight; found none"):
        again.load_state_dict({})


def test_copies_of_the_model_are_free() -> None:
    model, optimizer = one_layer()
    gonio.hold_(model, optimizer)
    twin = copy.deepcopy(model)
    own = torch.optim.SGD(twin.parameters(), lr=0.1)
    gonio.hold_(twin, own, norm="columns", radius=2.0)
    drift(twin, own, 2)
    drift(model, optimizer, 2)
    torch.testing.assert_close(twin.weight.detach().norm(dim=0), torch.full((4,), 2.0))
    assert not torch.allclose(model.weight.detach().norm(dim=0), torch.full((4,), 2.0))


def test_a_copy_of_the_handle_has_the_radii() -> None:
    model, optimizer = two_layers()
    held = gonio.hold_(model, optimizer, norm="filters")
    drift(model, optimizer, 2)
    for twin in (copy.deepcopy(held), pickle.loads(pickle.dumps(held))):
        assert str(twin) == str(held)
        assert twin.state_dict().keys() == held.state_dict().keys()
        assert all(torch.equal(twin.state_dict()[name], radius) for name, radius in held.state_dict().items())
    drift(model, optimizer, 1)
    held.undo_()


def test_a_copy_of_the_optimizer_is_free_and_says_so() -> None:
    model, optimizer = two_layers()
    held = gonio.hold_(model, optimizer)
    drift(model, optimizer, 1)
    other, twin = copy.deepcopy((model, optimizer))
    with pytest.warns(gonio.errors.GonioWarning, match="this SGD has the norms that hold_ held, but nothing holds"):
        drift(other, twin, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drift(other, twin, 1)  # said once
        held.undo_()
        drift(*copy.deepcopy((model, optimizer)), 1)  # the end of a hold takes the radii away
        other, twin = copy.deepcopy((model, optimizer))
        gonio.hold_(other, twin)
        drift(other, twin, 1)


def test_a_model_that_moves_is_followed() -> None:
    model, optimizer = one_layer()
    gonio.hold_(model, optimizer, radius=3.0)
    model.double()
    drift(model, optimizer, 2)
    assert float(model.weight.detach().norm()) == pytest.approx(3, rel=1e-6)


# --- many weights at once ---------------------------------------------------------------------------------------------


def batch_of_layers(dtype: torch.dtype) -> tuple[list[Vectors], list[Tensor]]:
    """Every layout with every norm, a long sum and a vector of 0."""
    made = {name: make() for name, (make, _) in LAYERS.items()}
    vectors, weights = [], []
    for norm in NORMS:
        for name, module in made.items():
            tensor = LAYERS[name][1]
            weight = module.get_parameter(tensor).detach().to(dtype)
            vectors.append(Vectors(layout_of(module, tensor), weight.ndim, norm))
            weights.append(weight)
    layer = nn.Linear(4, 3)
    for norm in NORMS:
        vectors.append(Vectors(layout_of(layer), 2, norm))
        weights.append(torch.cat([seeded(2, 4), torch.zeros(1, 4)]).to(dtype))
    vectors.append(Vectors(layout_of(layer), 2, "matrix"))
    weights.append(seeded(512, 2048).to(dtype))
    return vectors, weights


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_norms_of_many_weights_are_those_of_each(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    vectors, weights = batch_of_layers(dtype)
    together = norms_together(vectors, iter(weights))
    for each, weight, found in zip(vectors, weights, together, strict=True):
        alone = each.norms(weight)
        assert (found.shape, found.dtype) == (alone.shape, alone.dtype)
        # filters and columns are the same operation; sums over rows are in float64, so at most the last bit may differ
        eps = torch.finfo(found.dtype).eps if each.norm == "matrix" else 0.0
        torch.testing.assert_close(found, alone, rtol=eps, atol=0)


def test_factors_of_many_weights_are_those_of_each() -> None:
    vectors, weights = batch_of_layers(torch.float32)
    norms = norms_together(vectors, weights)
    radii = [torch.rand(each.shape, generator=torch.Generator().manual_seed(i)) for i, each in enumerate(norms)]
    for norm, radius, found in zip(norms, radii, factors_of(radii, norms, 0.3), strict=True):
        assert torch.equal(found, torch.where(norm > 0, 0.3 * radius / norm, 0))
        assert found.shape == norm.shape


class Operations(TorchDispatchMode):
    """Counts what is dispatched, without views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        views = {"detach", "view", "unflatten", "flatten", "unsqueeze", "expand", "split", "split_with_sizes", "alias"}
        self.count += function.__name__.split(".")[0] not in views
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("step", "each"), [("free", 2), ("fixed", 9)])
@pytest.mark.parametrize("norm", SUMS)
def test_a_further_weight_costs_few_operations(norm: str, step: str, each: int) -> None:
    """Those that read and write it: a norm and a product; with a fixed step also the copy and the change.

    The norm of a matrix is that of its rows' norms: one operation more, and two with a fixed step, which has two norms.
    """
    each += (1 if step == "free" else 2) if norm == "matrix" else 0

    def operations(count: int, *, held: bool) -> int:
        model = nn.ModuleList(nn.Linear(4, 3, bias=False) for _ in range(count))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
        if held:
            gonio.hold_(model, optimizer, norm=norm, step=step)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        for _ in range(CHECKED):  # the first steps measure once more
            optimizer.step()
        with Operations() as counted:
            optimizer.step()
        return counted.count

    added = [operations(count, held=True) - operations(count, held=False) for count in (5, 6)]
    assert added[1] - added[0] == each


@pytest.mark.parametrize("step", ["free", "fixed"])
def test_weights_of_several_dtypes_are_held_together(step: str) -> None:
    model = nn.ModuleList(nn.Linear(6, 4, bias=False, dtype=d) for d in (torch.float32, torch.float64, torch.bfloat16))
    before = [layer.weight.detach().double().norm() for layer in model]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    gonio.hold_(model, optimizer, step=step)
    drift(model, optimizer, 5)
    for layer, norm, eps in zip(model, before, (1e-6, 1e-14, 2**-8), strict=True):
        assert float(layer.weight.detach().double().norm()) == pytest.approx(float(norm), rel=eps)
