"""Fans equal counted connections; variance scaling preserves norm or RMS in real forward passes of forty layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import sqrt

import pytest
import torch
from torch import Tensor, nn

from gonio.errors import InvalidArgumentError, UnknownNameError
from gonio.geometry import Layout, layout_of
from gonio.init import Fans, fans, he_, lecun_, variance_scaling_, xavier_
from gonio.init.variance import CUT_STD
from init.layers import LAYERS, fresh, signal
from references.init import counted_fans

FAN_SHAPES = [
    ((6, 4, 3), False, 1, (1,)),
    ((6, 2, 3), False, 2, (2,)),
    ((4, 1, 3, 3), False, 4, (1, 1)),
    ((8, 4, 3, 2), False, 1, (2, 2)),
    ((4, 6, 3, 3), True, 1, (1, 1)),
    ((4, 3, 3, 3), True, 2, (2, 2)),
    ((4, 1, 2, 2), True, 4, (2, 1)),
    ((2, 3, 2, 2, 1), False, 1, (1, 2, 1)),
]


@pytest.mark.parametrize(("shape", "transposed", "groups", "stride"), FAN_SHAPES)
def test_fans_equal_counted_connections(
    shape: tuple[int, ...], transposed: bool, groups: int, stride: tuple[int, ...]
) -> None:
    found = fans(shape, Layout(transposed=transposed, groups=groups, stride=stride))
    expected = counted_fans(shape, transposed=transposed, groups=groups, stride=stride)
    assert (found.fan_in, found.fan_out) == pytest.approx(expected)


def test_linear_embedding_and_stacked_blocks() -> None:
    assert fans((5, 3)) == Fans(3.0, 5.0)
    assert fans((12, 3), Layout(blocks=3)) == Fans(3.0, 4.0)
    assert fans((3, 5), Layout(transposed=True)) == Fans(3.0, 5.0)  # Hugging Face's Conv1D


def test_where_torch_counts_wrong() -> None:
    """Negative control: if torch is repaired, `Differs:` in the documentation has to go."""
    torch_fans = nn.init._calculate_fan_in_and_fan_out
    assert torch_fans(torch.empty(4, 1, 3, 3)) == (9, 36)  # depthwise: true fan_out 9
    assert torch_fans(torch.empty(4, 6, 3, 3)) == (54, 36)  # as ConvTranspose2d(4, 6, 3): true (36, 54)
    assert fans((4, 6, 3, 3), Layout(transposed=True)) == Fans(36.0, 54.0)


@pytest.mark.parametrize("name", LAYERS)
def test_norm_and_rms_are_preserved_by_real_layers(name: str) -> None:
    layer = LAYERS[name]
    layout = layout_of(layer)
    # signs have no spread of their own: |W|² is its mean for every draw, and only the input is random
    variance_scaling_(layer.weight, preserve="norm", distribution="rademacher", layout=layout, generator=fresh())
    assert signal(layer)[0] == pytest.approx(1, abs=0.04)
    variance_scaling_(layer.weight, preserve="rms", distribution="rademacher", layout=layout, generator=fresh())
    assert signal(layer)[1] == pytest.approx(1, abs=0.04)


@pytest.mark.parametrize(
    ("name", "wrong"), [("Conv2d→32 g4 s1", "norm"), ("Conv2d→32 g1 s2", "norm"), ("ConvTranspose2d→32 g1 s2", "rms")]
)
def test_torchs_fans_would_not_preserve_them(name: str, wrong: str) -> None:
    """Negative control: groups, stride, transposition."""
    layer = LAYERS[name]
    nn.init.kaiming_normal_(layer.weight, mode="fan_out" if wrong == "norm" else "fan_in", nonlinearity="linear")
    norm, rms = signal(layer)
    assert abs((norm if wrong == "norm" else rms) - 1) > 0.2


@pytest.mark.parametrize(
    ("distribution", "reach"), [("uniform", sqrt(3)), ("truncated_normal", 2 / CUT_STD), ("rademacher", 1.0)]
)
def test_bounded_distributions_reach_their_bounds(distribution: str, reach: float) -> None:
    weight = variance_scaling_(torch.empty(500, 400), distribution=distribution, gain=3.0, generator=fresh())
    std = 3 / sqrt(400)
    assert float(weight.std()) == pytest.approx(std, rel=0.01)
    assert 0.99 * reach * std < float(weight.abs().max()) <= reach * std * (1 + 1e-6)
    if distribution == "rademacher":
        torch.testing.assert_close(weight.abs(), torch.full_like(weight, std))


def test_a_callable_distribution() -> None:
    def laplace(shape: torch.Size, generator: torch.Generator) -> Tensor:
        u = torch.rand(shape, generator=generator) - 0.5
        return -u.sign() * torch.log1p(-2 * u.abs()) / sqrt(2)

    weight = variance_scaling_(torch.empty(300, 300), distribution=laplace, generator=fresh())
    assert float(weight.std()) == pytest.approx(1 / sqrt(300), rel=0.02)


NAMED: list[tuple[Callable[..., Tensor], Callable[..., Tensor]]] = [
    (he_, partial(nn.init.kaiming_normal_, nonlinearity="relu")),
    (partial(he_, preserve="norm"), partial(nn.init.kaiming_normal_, nonlinearity="relu", mode="fan_out")),
    (partial(he_, distribution="uniform"), partial(nn.init.kaiming_uniform_, nonlinearity="relu")),
    (lecun_, partial(nn.init.kaiming_normal_, nonlinearity="linear")),
    (xavier_, nn.init.xavier_uniform_),
    (partial(xavier_, distribution="normal", gain=2.0), partial(nn.init.xavier_normal_, gain=2.0)),
]


@pytest.mark.parametrize("shape", [(5, 7), (64, 32), (8, 4, 3), (8, 4, 3, 3), (4, 3, 2, 2, 2)])
def test_named_cases_are_torchs_numbers_where_torch_is_right(shape: tuple[int, ...]) -> None:
    for ours, torchs in NAMED:
        expected = torchs(torch.empty(shape), generator=fresh())
        torch.testing.assert_close(ours(torch.empty(shape), generator=fresh()), expected, rtol=0, atol=1e-6)


def test_gain_accepts_names_and_callables() -> None:
    for gain in ("relu", torch.relu, nn.ReLU(), sqrt(2)):
        weight = variance_scaling_(torch.empty(8, 8), gain=gain, generator=fresh())
        torch.testing.assert_close(weight, he_(torch.empty(8, 8), generator=fresh()))


def test_without_a_generator_two_layers_do_not_start_equal_and_the_global_one_stays() -> None:
    before = torch.get_rng_state()
    assert not torch.equal(xavier_(torch.empty(9, 9)), xavier_(torch.empty(9, 9)))
    assert torch.equal(torch.get_rng_state(), before)


def test_memory_format_and_requires_grad_survive() -> None:
    weight = nn.Parameter(torch.empty(4, 3, 5, 5).contiguous(memory_format=torch.channels_last))
    assert he_(weight, generator=fresh()) is weight
    assert weight.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(weight.detach(), he_(torch.empty(4, 3, 5, 5), generator=fresh()))


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: he_(torch.empty(3, 4, device="meta")), r"shape \(3, 4\) on the meta device.*to_empty"),
        (lambda: xavier_(torch.empty(0, 4)), r"found shape \(0, 4\), which has no entries"),
        (lambda: lecun_(torch.zeros(3, 4, dtype=torch.int64)), r"floating-point weight; found dtype torch\.int64"),
        (lambda: he_(nn.LazyLinear(3).weight), r"a lazy layer, which has no shape yet\. Run one batch"),
        (lambda: variance_scaling_(torch.empty(3, 3), preserve="fan_in"), r"found 'fan_in'.*mode='fan_in' is 'rms'"),
        (lambda: he_(torch.empty(3, 3), distribution=lambda *_: torch.zeros(2)), r"shape \(3, 3\); found \(2,\)"),
        (lambda: fans((4, 4, 3, 3), Layout(stride=(2,))), r"one stride per kernel.* has 2; found stride=\(2,\)"),
        (lambda: fans((4, 3), Layout(groups=3)), r"groups=3.* 3 equal parts; found shape \(4, 3\)"),
    ],
)
def test_refusals(call: Callable[[], object], match: str) -> None:
    with pytest.raises(InvalidArgumentError, match=match):
        call()


def test_an_unknown_distribution() -> None:
    with pytest.raises(UnknownNameError, match="no distribution named 'gauss'"):
        variance_scaling_(torch.empty(3, 3), distribution="gauss")
