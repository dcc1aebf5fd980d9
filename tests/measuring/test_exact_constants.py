"""`gonio.certify` beside the exact constant of small piecewise-linear networks: all their regions in the plane."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import gonio
from gonio import parametrizations as P
from gonio.errors import NotApplicableError
from gonio.seeding import generator
from gonio.surgery.facts import _STATED, Facts, register

SIDE = 1e4  # of the square that is enumerated; regions of these networks that reach beyond it begin inside


class Abs(nn.Module):
    def forward(self, x):
        return x.abs()


class MaxMin(nn.Module):
    def forward(self, x):
        a, b = x.chunk(2, 1)
        return torch.cat((torch.maximum(a, b), torch.minimum(a, b)), 1)


class Skip(nn.Module):
    def __init__(self, *branch):
        super().__init__()
        self.branch = nn.Sequential(*branch)

    def forward(self, x):
        return x + self.branch(x)


# --- the enumeration ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Region:
    """A convex polygon of inputs, and the affine map on it by its values at (0, 0), (1, 0) and (0, 1)."""

    polygon: Tensor
    values: Tensor

    @property
    def jacobian(self) -> Tensor:
        return (self.values[1:] - self.values[0]).flatten(1).T

    @property
    def norm(self) -> float:
        return float(torch.linalg.matrix_norm(self.jacobian, 2))

    def cut(self, at: Tensor) -> list[tuple[Region, bool]]:
        """The parts where an affine function with these three values is positive, and where it is negative."""
        heights = at[0] + self.polygon @ (at[1:] - at[0])
        found = []
        for side in (heights, -heights):
            corners = []
            for i in range(len(side)):
                here, there = side[i - 1], side[i]
                if here >= 0:
                    corners.append(self.polygon[i - 1])
                if (here > 0 > there) or (here < 0 < there):
                    corners.append(torch.lerp(self.polygon[i - 1], self.polygon[i], here / (here - there)))
            if len(corners) > 2 and float(side.max()) > 1e-9:
                found.append((Region(torch.stack(corners), self.values), side is heights))
        return found


def _by_entry(region: Region, count: int, difference, change) -> Iterator[Region]:
    """Cut at the zeros of `difference(values, i)` for i < count; `change(values, i, positive)` is the map there."""
    parts = [region]
    for i in range(count):
        parts = [
            Region(part.polygon, change(part.values.flatten(1).clone(), i, positive).view_as(part.values))
            for whole in parts
            for part, positive in whole.cut(difference(whole.values.flatten(1), i))
        ]
    yield from parts


def _through(layer: nn.Module, region: Region) -> Iterator[Region]:
    """The regions of one layer behind a region."""
    size = region.values[0].numel()
    if isinstance(layer, (nn.ReLU, nn.LeakyReLU, Abs)):
        slope = -1.0 if isinstance(layer, Abs) else getattr(layer, "negative_slope", 0.0)

        def bend(values, i, positive):
            values[:, i] *= 1.0 if positive else slope
            return values

        yield from _by_entry(region, size, lambda values, i: values[:, i], bend)
    elif isinstance(layer, MaxMin):
        half = size // 2

        def sort(values, i, positive):
            return values if positive else values[:, _swapped(size, i, i + half)]

        yield from _by_entry(region, half, lambda values, i: values[:, i] - values[:, i + half], sort)
    elif isinstance(layer, Skip):
        for part in regions(layer.branch, region):
            yield Region(part.polygon, part.values + region.values)
    else:  # affine
        yield Region(region.polygon, layer(region.values))


def _swapped(size: int, i: int, j: int) -> list[int]:
    return [{i: j, j: i}.get(k, k) for k in range(size)]


def regions(layers: Sequence[nn.Module], region: Region | None = None) -> Iterator[Region]:
    """All regions of a sequence of layers on the square of :data:`SIDE`."""
    if region is None:
        corners = SIDE / 2 * torch.tensor([[-1, -1], [1, -1], [1, 1], [-1, 1]], dtype=torch.float64)
        region = Region(corners, torch.tensor([[0, 0], [1, 0], [0, 1]], dtype=torch.float64))
    first, *rest = layers
    for part in _through(first, region):
        yield from regions(rest, part) if rest else [part]


# --- the networks -------------------------------------------------------------------------------------


def _signal() -> list[nn.Module]:
    """From two numbers to a signal of one channel."""
    return [nn.Linear(2, 6), nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 2, 3, padding=1), nn.LeakyReLU(0.2)]


NETWORKS = {
    "two-layers": lambda: [nn.Linear(2, 6, bias=False), nn.ReLU(), nn.Linear(6, 3, bias=False)],
    "three-layers": lambda: [nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2)],
    "leaky": lambda: [nn.Linear(2, 5), nn.LeakyReLU(-0.7), nn.Linear(5, 3), nn.LeakyReLU(0.1)],
    "absolute": lambda: [nn.Linear(2, 4), Abs(), nn.Linear(4, 3), Abs(), nn.Linear(3, 2)],
    "max-min": lambda: [nn.Linear(2, 6), MaxMin(), nn.Linear(6, 4), MaxMin(), nn.Linear(4, 2)],
    "residual": lambda: [
        nn.Linear(2, 4),
        Skip(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)),
        nn.ReLU(),
        nn.Linear(4, 3),
    ],
    "convolutions": lambda: [*_signal(), nn.Conv1d(2, 2, 3, stride=2), nn.ReLU(), nn.AvgPool1d(2), nn.Flatten()],
    "batch-norm": lambda: [nn.Linear(2, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)],
}
QUICK = ("two-layers", "leaky", "max-min", "residual", "batch-norm")
CASES = [
    pytest.param(name, seed, marks=() if name in QUICK and not seed else pytest.mark.slow, id=f"{name}-{seed}")
    for name in NETWORKS
    for seed in range(4)
]


def made(name: str, seed: int) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(100 + seed)
        model = nn.Sequential(*NETWORKS[name]()).double().eval()
        for norm in model.modules():
            if isinstance(norm, nn.BatchNorm1d):
                norm.running_var.uniform_(0.3, 3)
                norm.weight.data.normal_()
    return model.requires_grad_(False)


def centres(*found: Region) -> Tensor:
    return torch.stack([region.polygon.mean(0) for region in found])


def steepest(found: Sequence[Region]) -> Region:
    return max(found, key=lambda region: region.norm)


@pytest.fixture
def own_layers_are_stated():
    kept = dict(_STATED)
    for kind in (Abs, MaxMin):
        register(kind, Facts(lipschitz=1.0))
    yield
    _STATED.clear()
    _STATED.update(kept)


@pytest.mark.usefixtures("own_layers_are_stated")
@pytest.mark.parametrize(("name", "seed"), CASES)
def test_bounds_enclose_the_exact_constant_and_the_lower_one_equals_it(name, seed):
    model = made(name, seed)
    region = steepest(list(regions(model)))
    exact = region.norm
    bounds = gonio.certify(model, centres(region), steps=60)
    assert bounds.lower <= exact * (1 + 1e-9)
    assert bounds.lower == pytest.approx(exact, rel=1e-3)
    assert exact <= bounds.upper
    assert bounds.upper < 20 * exact  # a vacuous bound would hold as well


def _orthogonal(*layers):
    """The layers with orthonormal rows or columns, folded."""
    model = nn.Sequential(*layers)
    gonio.parametrize_(model, P.Orthogonal(), where=nn.Linear)
    gonio.fold_(model)
    return model


def _positive(*layers):
    """All units active everywhere that matters: a chain of numbers, of which one grows the most in every layer."""
    model = nn.Sequential(*layers)
    for layer in model:
        if isinstance(layer, nn.Linear):
            grown = torch.diag(torch.tensor([3.0, 0.5, 0.25, 0.1]))
            layer.weight.data = grown[: layer.out_features, : layer.in_features].clone()
    return model


TIGHT = {
    "orthogonal, sorted": lambda: _orthogonal(nn.Linear(2, 6), MaxMin(), nn.Linear(6, 6), MaxMin()),
    "orthogonal, absolute": lambda: _orthogonal(nn.Linear(2, 4), Abs(), nn.Linear(4, 4), Abs()),
    "growing": lambda: _positive(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)),
    "growing beside itself": lambda: _positive(nn.Linear(2, 2), Skip(nn.ReLU()), nn.Linear(2, 2)),
}


@pytest.mark.usefixtures("own_layers_are_stated")
@pytest.mark.parametrize("name", TIGHT)
def test_both_bounds_equal_the_exact_constant_where_no_layer_wastes_any(name):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = TIGHT[name]().double().requires_grad_(False)
    region = steepest(list(regions(model)))
    exact = region.norm
    bounds = gonio.certify(model, centres(region), steps=60)
    assert bounds.upper == pytest.approx(exact, rel=1e-6)
    assert bounds.lower == pytest.approx(exact, rel=1e-3)


def test_random_examples_find_the_constant_too():
    model = made("two-layers", 0)
    exact = steepest(list(regions(model))).norm
    found = gonio.certify(model, torch.randn(500, 2, generator=generator(0)))
    assert 0.99 * exact <= found.lower <= exact * (1 + 1e-9)


def test_examples_without_a_gradient_do_not_hide_the_others():
    """The last region of this network is flat; its quotient 0 / 0 once ended the ascent of all examples."""
    found = list(regions(made("two-layers", 2)))
    assert min(region.norm for region in found) == 0
    bounds = gonio.certify(made("two-layers", 2), centres(*found))
    assert bounds.lower == pytest.approx(steepest(found).norm, rel=1e-3)


# --- negative controls --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [name if name in QUICK[:2] else pytest.param(name, marks=pytest.mark.slow) for name in NETWORKS]
)
def test_the_jacobian_at_every_point_is_that_of_its_region(name):
    model = made(name, 0)
    found = list(regions(model))
    points = 2 * torch.randn(60, 2, generator=generator(0), dtype=torch.float64)
    listed = torch.stack([region.jacobian for region in found])
    for point in points:
        own = torch.autograd.functional.jacobian(lambda x: model(x[None]).flatten(), point)
        assert float((listed - own).abs().amax((1, 2)).min()) < 1e-12
    area = sum(_area(region.polygon) for region in found)
    assert area == pytest.approx(SIDE**2, rel=1e-9)  # the regions tile the square


def _area(polygon: Tensor) -> float:
    x, y = polygon.T
    return abs(float((x * y.roll(-1) - x.roll(-1) * y).sum())) / 2


def test_an_enumeration_without_its_steepest_region_is_noticed():
    found = sorted(regions(made("three-layers", 1)), key=lambda region: region.norm)
    bounds = gonio.certify(made("three-layers", 1), centres(found[-1]), steps=60)
    assert max(region.norm for region in found[:-1]) < 0.999 * bounds.lower


def test_a_slope_that_is_stated_too_small_is_noticed():
    kept = dict(_STATED)
    try:
        register(Abs, Facts(lipschitz=0.5))
        model = _orthogonal(nn.Linear(2, 4), Abs(), nn.Linear(4, 4), Abs()).double()
        assert max(region.norm for region in regions(model.requires_grad_(False))) > 0
        with pytest.raises(NotApplicableError, match="two inputs show a constant of"):
            gonio.certify(model, torch.randn(8, 2, generator=generator(0)))
    finally:
        _STATED.clear()
        _STATED.update(kept)
