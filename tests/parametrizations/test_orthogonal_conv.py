"""Convolutions under OrthogonalConv are orthogonal operators, against explicit matrices that torch computes."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

import gonio
from gonio import parametrizations as P
from gonio.errors import InvalidArgumentError, NotApplicableError
from ranks import group

KINDS = {1: (nn.Conv1d, nn.ConvTranspose1d), 2: (nn.Conv2d, nn.ConvTranspose2d), 3: (nn.Conv3d, nn.ConvTranspose3d)}
CHANNELS = ((4, 4), (2, 6), (6, 2))
COMBINATIONS = [  # 512
    *product((1,), (1, 2, 3, 4, 5), (1, 2, 3), (1, 2), (1, 2), CHANNELS, (False, True)),
    *product((2,), (1, 2, 3), (1, 2), (1, 2), (1, 2), CHANNELS, (False, True)),
    *product((3,), (2, 3), (1, 2), (1,), (1,), ((3, 3), (2, 4)), (False,)),
]
Combination = tuple[int, int, int, int, int, tuple[int, int], bool]


def attached(combination: Combination) -> nn.Module:
    dims, kernel, stride, dilation, groups, (inputs, outputs), transposed = combination
    options: dict[str, Any] = {"stride": stride, "dilation": dilation, "groups": groups, "bias": False}
    if not transposed:
        options["padding_mode"] = "circular"
    torch.manual_seed(0)
    layer = KINDS[dims][transposed](inputs, outputs, kernel, **options).double()
    P.attach(layer, "weight", P.OrthogonalConv())
    return layer


def periodic_operator(weight: Tensor, combination: Combination) -> Tensor:
    """The dense matrix on a periodic grid that the kernel does not wrap around twice.

    A transposed convolution is the adjoint of the convolution with the same weight: this is the latter's.
    """
    dims, kernel, stride, dilation, groups, _, _ = combination
    reach = dilation * (kernel - 1)
    size = stride * math.ceil((reach + 2) / stride)
    channels = weight.shape[1] * groups
    pixels = torch.eye(channels * size**dims, dtype=weight.dtype).reshape(-1, channels, *[size] * dims)
    padded = nn.functional.pad(pixels, [0, reach] * dims, mode="circular") if reach else pixels
    convolve = getattr(nn.functional, f"conv{dims}d")
    return convolve(padded, weight, None, stride, 0, dilation, groups).flatten(1).mT


@pytest.mark.parametrize("combinations", [COMBINATIONS[::8], pytest.param(COMBINATIONS, marks=pytest.mark.slow)])
def test_every_combination_is_orthogonal(combinations: list[Combination]) -> None:
    """Kernels, strides, dilations, groups, both shapes and transposed: every singular value is 1 within 1e-10."""
    for combination in combinations:
        layer = attached(combination)
        operator = periodic_operator(layer.weight.detach(), combination)
        read = operator[:, operator.abs().amax(0) > 0]  # pixels that stride and dilation leave out
        values = torch.linalg.svdvals(read)
        assert float((values - 1).abs().max()) < 1e-10, combination
        assert layer.weight_parametrization.holds(layer.weight), combination


@pytest.mark.parametrize("combinations", [COMBINATIONS[5::50], pytest.param(COMBINATIONS, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-10)])
def test_grids_of_4_to_32_points_in_both_precisions(
    combinations: list[Combination], dtype: torch.dtype, tolerance: float
) -> None:
    """By blocks of the operator in frequencies; a kernel that wraps around a small grid is summed by it.

    The rank of a block is the smaller of its outputs and the inputs that are read; all other singular values are 0.
    """
    for combination in combinations:
        dims, kernel, stride, dilation, groups, _, _ = combination
        layer = attached(combination)
        weight = layer.weight_parametrization(layer._parameters["weight"].detach().to(dtype)).double()
        phases = len({tap * dilation % stride for tap in range(kernel)})
        for size in (size for size in (4, 8, 16, 32) if size % stride == 0 and size**dims <= 1024):
            for part in weight.chunk(groups):
                values = torch.linalg.svdvals(fourier_blocks(part, size, stride, dilation))
                rank = min(part.shape[0], part.shape[1] * phases**dims)
                assert float((values[..., :rank] - 1).abs().max()) < tolerance, (combination, size)
                assert float(values[..., rank:].abs().sum()) < tolerance * values.numel(), (combination, size)


def fourier_blocks(weight: Tensor, size: int, stride: int, dilation: int) -> Tensor:
    """Blocks of a group's periodic operator: outputs at one frequency of the coarse grid, inputs at all that alias."""
    dims = weight.ndim - 2
    kernel = weight.new_zeros(*weight.shape[:2], *[size] * dims)
    for tap in product(*map(range, weight.shape[2:])):
        kernel[(slice(None), slice(None), *(t * dilation % size for t in tap))] += weight[(..., *tap)]
    symbol = torch.fft.fftn(kernel, dim=tuple(range(2, kernel.ndim)))
    coarse = size // stride
    for axis in range(dims):
        symbol = symbol.unflatten(2 + 2 * axis, (stride, coarse))
    aliases, points = [2 + 2 * a for a in range(dims)], [3 + 2 * a for a in range(dims)]
    return symbol.permute(*points, 0, 1, *aliases).flatten(dims + 1) / stride ** (dims / 2)


def test_orthogonal_filters_are_not_an_orthogonal_operator() -> None:
    """The negative control: what Orthogonal guarantees is not enough, and `holds` and the matrix see it."""
    layer = nn.Conv2d(4, 4, 3, padding_mode="circular", bias=False).double()
    P.attach(layer, "weight", P.Orthogonal())
    values = torch.linalg.svdvals(periodic_operator(layer.weight.detach(), (2, 3, 1, 1, 1, (4, 4), False)))
    assert float((values - 1).abs().max()) > 0.1
    judge = P.OrthogonalConv()
    judge.bind(layer.weight.detach(), gonio.geometry.layout_of(layer))
    assert not judge.holds(layer.weight)


def test_the_inverse_is_exact_for_its_own_kernels() -> None:
    """Peeling finds the factors of a product: kernels of random generators, and those with one tap."""
    for combination in COMBINATIONS[::7]:
        layer = attached(combination)
        map_ = layer.weight_parametrization
        raw = torch.randn(layer.weight.shape, generator=gonio.seeding.generator(1), dtype=torch.float64)
        weight = map_.weight_of(raw)
        again = map_.weight_of(map_.right_inverse(weight))
        assert float((again - weight).abs().max()) < 1e-9, combination


@pytest.mark.parametrize("shape", [(4, 4, 3, 3), (6, 3, 5, 5), (5, 5, 3)])
def test_delta_orthogonal_weights_stay(shape: tuple[int, ...]) -> None:
    weight = gonio.init.delta_orthogonal_(torch.empty(shape, dtype=torch.float64), generator=gonio.seeding.generator(0))
    assert P.OrthogonalConv().distance(weight) < 1e-7  # the root of a difference of 1e-16


def test_distance_is_that_of_the_replaced_weight() -> None:
    """0.87 for random 4×4×3×3 numbers, computed here from the weight before and after."""
    layer = nn.Conv2d(4, 4, 3, padding_mode="circular", bias=False).double()
    before = layer.weight.detach().clone()
    promised = P.OrthogonalConv().distance(before)
    P.attach(layer, "weight", P.OrthogonalConv())
    after = layer.weight.detach()
    best = float((after * before).sum() / after.square().sum()) * after
    assert promised == pytest.approx(float((best - before).norm() / before.norm()), rel=1e-9)
    assert 0.3 < promised < 1


def test_zero_padding_has_norms_of_at_most_one() -> None:
    """Full padding keeps norms exactly; same padding only bounds them."""
    layer = nn.Conv2d(3, 5, 3, bias=False).double()
    P.attach(layer, "weight", P.OrthogonalConv())
    x = torch.randn(2, 3, 6, 6, generator=gonio.seeding.generator(0), dtype=torch.float64)
    kernel = layer.weight.detach()
    full = nn.functional.conv2d(x, kernel, padding=2)
    assert float(full.norm()) == pytest.approx(float(x.norm()), rel=1e-12)
    same = nn.functional.conv2d(x, kernel, padding=1)
    assert float(same.norm()) < float(x.norm())


def test_training_keeps_single_precision_operators_orthogonal() -> None:
    """After 20 steps of SGD with momentum and decay, on grids of 4² to 32²; goal 1e-4."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1, padding_mode="circular", bias=False),
        nn.ReLU(),
        nn.Conv2d(8, 8, 4, stride=2, padding=1, padding_mode="circular", bias=False),
    )
    gonio.parametrize_(model, P.OrthogonalConv())
    before = model[0].weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    x = torch.randn(4, 2, 8, 8, generator=gonio.seeding.generator(0))
    for _ in range(20):
        optimizer.zero_grad()
        model(x).square().mean().neg().backward()
        optimizer.step()
    assert float((model[0].weight.detach() - before).abs().max()) > 1e-3, "the weights do not move"
    for layer, size in product((model[0], model[2]), (4, 8, 16, 32)):
        symbol = torch.fft.fft2(layer.weight.detach().double(), s=(size, size)).permute(2, 3, 0, 1)
        if layer.stride == (1, 1):
            assert float((torch.linalg.svdvals(symbol) - 1).abs().max()) < 1e-4
        assert layer.weight_parametrization.holds(layer.weight)


def test_linear_layers_have_the_polar_factor() -> None:
    raw = torch.randn(3, 5, generator=gonio.seeding.generator(0), dtype=torch.float64)
    torch.testing.assert_close(P.OrthogonalConv(scale=2.0).weight_of(raw), P.Orthogonal(scale=2.0).weight_of(raw))


def test_sharded_weights_are_those_of_the_whole(tmp_path: Path) -> None:
    """A linear layer has no projections; torch's propagation of views of empty shards does not end."""
    raw = torch.randn(3, 5, generator=gonio.seeding.generator(0), dtype=torch.float64)
    expected = raw.clone().requires_grad_()
    P.OrthogonalConv().weight_of(expected)[0].sum().backward()
    with group(tmp_path):
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        sharded = distribute_tensor(raw, mesh, [Shard(0)]).requires_grad_()
        found = P.OrthogonalConv().weight_of(sharded)
        assert found.placements == sharded.placements
        found.full_tensor()[0].sum().backward()
        torch.testing.assert_close(found.full_tensor(), P.OrthogonalConv().weight_of(raw))
        torch.testing.assert_close(sharded.grad.full_tensor(), expected.grad)


def test_what_it_refuses() -> None:
    for scale in (0, -1, float("inf"), float("nan")):
        with pytest.raises(InvalidArgumentError, match="OrthogonalConv needs a finite scale > 0"):
            P.OrthogonalConv(scale=scale)
    with pytest.raises(NotApplicableError, match="padding_mode='reflect' repeats pixels"):
        P.attach(nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"), "weight", P.OrthogonalConv())
