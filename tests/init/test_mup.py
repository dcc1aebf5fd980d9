"""μP by the shapes of two widths: variances, learning rates, and exponents of a network that has both."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gonio.errors import InvalidArgumentError
from gonio.init import lecun_, mup_, mup_groups


def network(n: int) -> nn.Module:
    return nn.ModuleDict(
        {
            "embed": nn.Embedding(10, n),
            "first": nn.Linear(3, n),
            "hidden": nn.Linear(n, 4 * n),
            "head": nn.Linear(4 * n, 5),
        }
    )


@pytest.mark.parametrize(("rule", "factors"), [("adam", (1, 1, 1 / 4, 1 / 4)), ("sgd", (4, 4, 1, 1 / 4))])
def test_the_rates_of_each_kind(rule: str, factors: tuple[float, ...]) -> None:
    wide, narrow = network(64), network(16)
    groups = mup_groups(wide, narrow, lr=0.1, rule=rule)
    rates = {id(p): group["lr"] for group in groups for p in group["params"]}
    assert len(rates) == len(list(wide.parameters()))
    for name, factor in zip(("embed", "first", "hidden", "head"), factors, strict=True):
        assert rates[id(wide[name].weight)] == pytest.approx(0.1 * factor), name
    assert rates[id(wide["hidden"].bias)] == pytest.approx(0.1 * (4 if rule == "sgd" else 1))
    assert rates[id(wide["head"].bias)] == pytest.approx(0.1)
    optimizer = torch.optim.Adam(groups)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(rates)


def test_at_the_width_of_the_base_nothing_changes() -> None:
    assert [group["lr"] for group in mup_groups(network(16), network(16), lr=0.1)] == [0.1]
    first, second = (torch.empty(30, 40) for _ in range(2))
    mup_(first, base=(30, 40), generator=torch.Generator().manual_seed(0))
    lecun_(second, generator=torch.Generator().manual_seed(0))
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("shape", "base", "variance"),
    [
        ((400, 300), (400, 300), 1 / 300),
        ((800, 100), (200, 100), 1 / 100),
        ((800, 400), (200, 100), 1 / 400),
        ((200, 800), (200, 100), 100 / 800**2),
        ((64, 128, 3, 3), (64, 32, 3, 3), 32 * 9 / (128 * 9) ** 2),
    ],
)
def test_the_variance_of_each_kind(shape: tuple[int, ...], base: tuple[int, ...], variance: float) -> None:
    weight = mup_(torch.empty(shape, dtype=torch.float64), base=base, generator=torch.Generator().manual_seed(0))
    assert float(weight.var()) == pytest.approx(variance, rel=0.03)


def test_refusals() -> None:
    with pytest.raises(InvalidArgumentError, match=r"at another width; found shapes \(3, 4\) and \(3, 4, 1\)"):
        mup_(torch.empty(3, 4), base=(3, 4, 1))
    with pytest.raises(InvalidArgumentError, match="the rule 'adam' or 'sgd'; found 'lion'"):
        mup_groups(network(4), network(4), lr=0.1, rule="lion")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"parameters of only one: 0\.bias, 0\.weight"):
        mup_groups(nn.Sequential(nn.Linear(2, 2)), nn.Sequential(), lr=0.1)
