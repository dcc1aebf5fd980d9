"""Orthogonal filters: the nearest ones, exactly, in value and in derivatives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

from catalog import seeded
from gonio import geometry
from gonio import parametrizations as P
from gonio.errors import InvalidArgumentError
from gonio.parametrizations.orthogonal import polar
from parametrizations.layers import LAYERS, make, sample

SHAPES = [(1, 1, 1), (1, 1, 7), (1, 8, 1), (1, 4, 6), (1, 6, 4), (2, 3, 3), (1, 9, 9), (3, 2, 18)]
EVERY = pytest.mark.parametrize("shape", SHAPES, ids=str)


def defect(matrices: Tensor) -> float:
    small = matrices if matrices.shape[-2] <= matrices.shape[-1] else matrices.mT
    return float((small @ small.mT - torch.eye(small.shape[-2], dtype=small.dtype)).abs().max())


def nearest(matrices: Tensor) -> Tensor:
    u, _, vh = torch.linalg.svd(matrices, full_matrices=False)
    return u @ vh


@EVERY
def test_the_polar_factor_is_the_nearest_orthogonal_matrix(shape: tuple[int, ...]) -> None:
    matrices = seeded(*shape, dtype=torch.float64)
    torch.testing.assert_close(polar(matrices), nearest(matrices))
    assert defect(polar(matrices)) < 1e-13


@EVERY
def test_derivatives_of_the_polar_factor(shape: tuple[int, ...]) -> None:
    point = seeded(*shape, dtype=torch.float64).requires_grad_()
    assert gradcheck(polar, (point,), check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(polar, (point,))


def test_the_derivative_at_equal_singular_values() -> None:
    """The derivative of an SVD is NaN at every orthogonal matrix."""
    point = (3 * nearest(seeded(1, 5, 8, dtype=torch.float64))).requires_grad_()
    assert gradcheck(polar, (point,))
    polar(point.float()).sum().backward()
    assert bool(point.grad.isfinite().all())


@pytest.mark.parametrize("condition", [1.0, 1.9, 2.1, 10.0, 100.0])  # corrected above 2
def test_rounding_of_float32_is_repaired(condition: float) -> None:
    u = nearest(seeded(64, 64, dtype=torch.float64))
    v = nearest(seeded(64, 200, seed=1, dtype=torch.float64))
    values = torch.logspace(0, torch.tensor(condition).log10().item(), 64, dtype=torch.float64)
    matrices = ((u * values) @ v).unsqueeze(0)
    found = polar(matrices.float())
    assert defect(found) < 3e-6
    torch.testing.assert_close(found.double(), u @ v.unsqueeze(0), rtol=0, atol=3e-7 * condition**2 + 1e-6)


def test_well_conditioned_matrices_need_no_correction(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, columns = nearest(seeded(32, 32)), nearest(seeded(32, 144, seed=1))
    well, ill = (rows @ torch.diag(torch.linspace(1, most, 32)) @ columns for most in (1.9, 300.0))

    def error(found: Tensor, matrix: Tensor) -> float:
        return float((found.double() - nearest(matrix.double())).norm())

    assert error(polar(well), well) < 2 * error(nearest(well), well)  # an SVD in float32
    corrected = torch.func.vmap(polar)(well.unsqueeze(0))[0]
    torch.testing.assert_close(corrected, polar(well), atol=1e-6, rtol=0)  # each is within 3e-7 of the exact entries
    repaired = defect(polar(ill))
    monkeypatch.setattr("gonio.parametrizations.orthogonal._well_conditioned", lambda values: True)
    assert defect(polar(ill)) > 10 * repaired


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_layers_of_every_dtype(name: str, dtype: torch.dtype) -> None:
    """torch's own refuses half precision on CPU."""
    layer = make(name).to(dtype)
    P.attach(layer, "weight", P.Orthogonal(scale=2.0))
    matrices = geometry.matrix_view(layer.weight.detach(), geometry.layout_of(layer)).double() / 2
    assert defect(matrices) <= 10 * matrices.shape[-1] * torch.finfo(dtype).eps
    assert P.parametrization_of(layer).holds(layer.weight)


@pytest.mark.parametrize("name", LAYERS)
def test_attaching_projects_to_the_nearest(name: str) -> None:
    layer, before = make(name).double(), make(name).double().weight.detach()
    P.attach(layer, "weight", P.Orthogonal())
    layout = geometry.layout_of(layer)
    expected = geometry.unview(nearest(geometry.matrix_view(before, layout)), before.shape, layout)
    torch.testing.assert_close(layer.weight, expected)
    torch.testing.assert_close(layer._parameters["weight"], expected)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_training_stays_orthogonal_and_well_conditioned(momentum: float) -> None:
    layer = make("conv2d")
    P.attach(layer, "weight", P.Orthogonal())
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=momentum)
    x = sample(layer)
    target = seeded(*layer(x).shape, seed=3)
    losses = []
    for _ in range(50):
        loss = (layer(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert P.parametrization_of(layer).holds(layer.weight)
    values = torch.linalg.svdvals(layer._parameters["weight"].detach().flatten(1))
    assert float(values.min()) > 0.99
    assert float(values.max()) < 3
    assert momentum > 0 or float(values.min()) >= 1 - 1e-5  # plain steps only raise them


def test_a_rank_deficient_weight_is_completed() -> None:
    layer = make("linear").double()
    with torch.no_grad():
        layer.weight[2] = layer.weight[1]
        layer.weight[3] = 0
    P.attach(layer, "weight", P.Orthogonal())
    assert P.parametrization_of(layer).holds(layer.weight)


def test_one_row_is_the_sphere() -> None:
    layer = nn.Conv2d(4, 4, 3, groups=4)
    twin = nn.Conv2d(4, 4, 3, groups=4)
    twin.load_state_dict(layer.state_dict())
    P.attach(layer, "weight", P.Orthogonal())
    P.attach(twin, "weight", P.Sphere())
    torch.testing.assert_close(layer.weight, twin.weight)


def test_it_does_not_hold_elsewhere() -> None:
    orthogonal = P.Orthogonal()
    assert orthogonal.holds(torch.eye(3))
    assert not orthogonal.holds(2 * torch.eye(3))
    assert not orthogonal.holds(torch.zeros(3, 3))
    assert not orthogonal.holds(torch.eye(3) + 1e-4)
    with pytest.raises(InvalidArgumentError, match="finite scale > 0"):
        P.Orthogonal(scale=0.0)
