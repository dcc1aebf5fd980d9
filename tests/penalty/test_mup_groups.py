"""Learning rates of μP: by the rules of Tensor Programs V, and by exponents of trained networks at several widths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gonio
from gonio.errors import InvalidArgumentError
from gonio.init import mup_
from gonio.measuring import Widths, widths


def perceptron(n: int) -> nn.Module:
    return nn.Sequential(nn.Linear(8, n), nn.ReLU(), nn.Linear(n, 2 * n), nn.ReLU(), nn.Linear(2 * n, 3))


def convolutional(n: int) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, n, 3), nn.BatchNorm2d(n), nn.Conv2d(n, n, 3, groups=n), nn.Conv2d(n, 2 * n, 1, groups=4)),
        *(nn.ConvTranspose2d(2 * n, n, 2, groups=2), nn.ConvTranspose2d(n, n, 2, groups=n), nn.Flatten()),
        nn.Linear(16 * n, 5),
    )


def drawn_(weight: Tensor, base: tuple[int, ...], gain: Any = 1.0) -> None:
    """`mup_` with torch's global seed, from which it does not draw by itself."""
    mup_(weight, base=base, gain=gain, generator=torch.Generator().manual_seed(int(torch.randint(2**31, ()))))


class Transformer(nn.Module):
    """One block of attention with products over d, an MLP, and a head, tied to the table or not."""

    def __init__(self, n: int, *, tied: bool = False, base: int = 64) -> None:
        super().__init__()
        self.base, self.tied = base, tied
        self.embed, self.position = nn.Embedding(32, n), nn.Parameter(torch.zeros(8, n))
        self.first, self.second, self.last = (nn.LayerNorm(n) for _ in range(3))
        self.qkv, self.out = nn.Linear(n, 3 * n, bias=False), nn.Linear(n, n, bias=False)
        self.up, self.down = nn.Linear(n, 4 * n), nn.Linear(4 * n, n)
        self.head = nn.Linear(n, 32, bias=False)
        for layer, ins, outs in ((self.qkv, 1, 3), (self.out, 1, 1), (self.up, 1, 4), (self.down, 4, 1)):
            drawn_(layer.weight, (outs * base, ins * base))
        drawn_(self.head.weight, (32, base))
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.position[: x.shape[1]]
        q, k, v = self.qkv(self.first(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=4.0 / q.shape[-1])
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        x = self.last(x + self.down(F.relu(self.up(self.second(x)))))
        scale = self.base**0.5 / x.shape[-1] if self.tied else 1.0
        return self.head(x * scale)[:, -1]


NETWORKS: dict[str, Callable[[int], nn.Module]] = {
    "perceptron": perceptron,
    "convolutional": convolutional,
    "transformer": Transformer,
    "tied transformer": lambda n: Transformer(n, tied=True),
}

# Of each parameter with the growth of its width, four times, in its inputs and outputs: Adam, SGD.
GOLDEN = {
    "perceptron": {
        "0.weight": (1, 4), "0.bias": (1, 4), "2.weight": (1 / 4, 1), "2.bias": (1, 4),
        "4.weight": (1 / 4, 1 / 4), "4.bias": (1, 1),
    },
    "convolutional": {
        "0.weight": (1, 4), "0.bias": (1, 4), "1.weight": (1, 4), "1.bias": (1, 4),
        "2.weight": (1, 4), "2.bias": (1, 4),  # depthwise: sums over the kernel alone
        "3.weight": (1 / 4, 1), "3.bias": (1, 4), "4.weight": (1 / 4, 1), "4.bias": (1, 4),
        "5.weight": (1, 4), "5.bias": (1, 4), "7.weight": (1 / 4, 1 / 4), "7.bias": (1, 1),
    },
    "transformer": {
        "position": (1, 4), "embed.weight": (1, 4), "first.weight": (1, 4), "first.bias": (1, 4),
        "second.weight": (1, 4), "second.bias": (1, 4), "last.weight": (1, 4), "last.bias": (1, 4),
        "qkv.weight": (1 / 4, 1), "out.weight": (1 / 4, 1), "up.weight": (1 / 4, 1), "up.bias": (1, 4),
        "down.weight": (1 / 4, 1), "down.bias": (1, 4), "head.weight": (1 / 4, 1 / 4),
    },
}  # fmt: skip
GOLDEN["tied transformer"] = {name: rates for name, rates in GOLDEN["transformer"].items() if name != "head.weight"}


def groups_of(name: str, rule: Any = "adam", *, decay: float | None = None) -> Any:
    wide, narrow = NETWORKS[name](64), NETWORKS[name](16)
    return gonio.param_groups(wide, decay, mup=True, base=narrow, lr=0.1, rule=rule), wide


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("rule", ["adam", "sgd"])
def test_the_factor_of_every_parameter(name: str, rule: str) -> None:
    groups, wide = groups_of(name, rule)
    column = 0 if rule == "adam" else 1
    assert dict(groups.factors) == {key: pytest.approx(rates[column]) for key, rates in GOLDEN[name].items()}
    rates = {id(p): group["lr"] for group in groups for p in group["params"]}
    assert sum(len(group["params"]) for group in groups) == len(list(wide.parameters()))
    for key, parameter in wide.named_parameters():
        assert rates[id(parameter)] == pytest.approx(0.1 * groups.factors[key]), key


def table_8(shape: Sequence[int], base: Sequence[int], rule: str, *, readout: bool) -> float:
    """The rates of the package `mup`, by the number of dims that grow.

    There the last layer divides its input by the growth r of its width, which its weight U does not know. Without this
    its weight is W = U/r. A step of U by η is one of W by η/r with Adam; with SGD, whose gradients of U are those of
    W over r, it is one by η/r².
    """
    ratios = [a / b for a, b in zip(shape, base, strict=True)]
    grown = [ratio for ratio in ratios if ratio != 1]
    if rule == "adam":
        factor, power = (1 / ratios[1] if len(grown) == 2 else 1.0), 1
    else:
        factor, power = (ratios[0] / ratios[1] if len(grown) == 2 else grown[0] if grown else 1.0), 2
    return factor / ratios[1] ** power if readout else factor


@pytest.mark.parametrize("name", ["perceptron", "transformer", "tied transformer"])
@pytest.mark.parametrize("rule", ["adam", "sgd"])
@pytest.mark.parametrize("width", [16, 24, 160])
def test_the_factors_are_those_of_the_other_formulation(name: str, rule: Any, width: int) -> None:
    wide, narrow = NETWORKS[name](width), NETWORKS[name](16)
    found = gonio.param_groups(wide, mup=True, base=narrow, lr=1.0, rule=rule)
    shapes = {key: p.shape for key, p in narrow.named_parameters()}
    for key, p in wide.named_parameters():
        expected = table_8(p.shape, shapes[key], rule, readout=key in ("4.weight", "head.weight"))
        assert found.factors[key] == pytest.approx(expected), key


def test_a_hidden_weight_that_is_not_square_takes_the_ratio_with_sgd() -> None:
    wide, narrow = (nn.Sequential(nn.Linear(2, n), nn.Linear(n, m), nn.Linear(m, 2)) for n, m in ((40, 80), (20, 10)))
    found = gonio.param_groups(wide, mup=True, base=narrow, lr=1.0, rule="sgd")
    assert found.factors["1.weight"] == pytest.approx(8 / 2)
    assert gonio.param_groups(wide, mup=True, base=narrow, lr=1.0).factors["1.weight"] == pytest.approx(1 / 2)


def test_the_product_of_rate_and_decay_stays_and_only_weights_decay() -> None:
    groups, wide = groups_of("transformer", "sgd", decay=0.3)
    names = {id(p): name for name, p in wide.named_parameters()}
    for group in groups:
        for name in (names[id(p)] for p in group["params"]):
            decays = name.endswith("weight") and name.split(".")[0] in ("qkv", "out", "up", "down", "head")
            assert group["lr"] * group["weight_decay"] == pytest.approx(0.1 * 0.3 if decays else 0.0), name
    assert all(group["weight_decay"] == 0 for group in groups_of("transformer")[0])


def test_at_the_width_of_the_base_all_factors_are_one() -> None:
    model = Transformer(16)
    assert {group["lr"] for group in gonio.param_groups(model, 0.1, mup=True, base=Transformer(16), lr=0.02)} == {0.02}


def test_the_reasons_and_an_optimizer(capsys: pytest.CaptureFixture[str]) -> None:
    groups, _ = groups_of("tied transformer")
    assert groups.reasons["up.weight"] == "hidden: 4 times as many inputs are summed, and Adam changes all alike"
    assert groups.reasons["embed.weight"] == (
        "input: nothing is summed over the width; tied: the outputs of head need × 0.25"
    )
    assert {group["reason"] for group in groups} == {
        "4 times as many inputs are summed, and Adam changes all alike",
        "nothing is summed over the width",
    }
    assert str(groups).startswith("lr 0.1 at the width of the base, rule adam\n  position       × 1 ")
    optimizer = torch.optim.AdamW(groups)
    optimizer.load_state_dict(optimizer.state_dict())
    assert {group["kind"] for group in optimizer.param_groups} == {"input", "hidden"}


def test_frozen_parameters_and_wrappers_and_a_base_without_values() -> None:
    with torch.device("meta"):
        narrow = perceptron(16)
    wide = perceptron(64)
    wide[0].requires_grad_(False)
    found = gonio.param_groups(torch.nn.DataParallel(wide), mup=True, base=narrow, lr=0.1)
    assert list(found.factors) == ["2.weight", "2.bias", "4.weight", "4.bias"]


class Experts(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.zeros(4, n, 2 * n))


def test_refusals() -> None:
    wide, narrow = perceptron(64), perceptron(16)

    def groups(model: nn.Module, base: nn.Module, **options: Any) -> Any:
        return gonio.param_groups(model, mup=True, base=base, **{"lr": 0.1, **options})

    with pytest.raises(InvalidArgumentError, match=r"at two widths; found parameters of only one: .*head\.weight"):
        groups(Transformer(64), Transformer(16, tied=True))
    with pytest.raises(
        InvalidArgumentError, match=r"cannot tell how 2\.weight grows .* \(8, 4, 3, 3\) and \(8, 4, 5, 5\)"
    ):
        groups(*(nn.Sequential(nn.Identity(), nn.Identity(), nn.Conv2d(4, 8, k)) for k in (3, 5)))
    with pytest.raises(InvalidArgumentError, match=r"how experts grows .* of a parameter that is no weight of a known"):
        groups(Experts(8), Experts(4))
    with pytest.raises(InvalidArgumentError, match=r"is 'adam' or 'sgd'; found 'lion'"):
        groups(wide, narrow, rule="lion")
    with pytest.raises(InvalidArgumentError, match=r"needs lr > 0; found 0"):
        groups(wide, narrow, lr=0)
    with pytest.raises(InvalidArgumentError, match=r"needs base=; found none"):
        gonio.param_groups(wide, mup=True, lr=0.1)  # type: ignore[call-overload]
    with pytest.raises(InvalidArgumentError, match=r"\(lr=\) belongs to μP; found mup=False"):
        gonio.param_groups(wide, 0.1, lr=0.1)  # type: ignore[call-overload]
    with pytest.raises(InvalidArgumentError, match=r"mup=True or matrices=True; found both"):
        gonio.param_groups(wide, matrices=True, mup=True, base=narrow, lr=0.1)  # type: ignore[call-overload]
    with pytest.raises(InvalidArgumentError, match=r"needs a finite weight_decay >= 0"):
        gonio.param_groups(wide, -1.0, mup=True, base=narrow, lr=0.1)


# --- trained ----------------------------------------------------------------------------------------------------------


def scaled_perceptron(n: int) -> nn.Module:
    """Initialised by μP from a width of 64; without biases of random size."""
    model = nn.Sequential(nn.Linear(8, n), nn.ReLU(), nn.Linear(n, n), nn.ReLU(), nn.Linear(n, 4))
    for layer, base in ((model[0], (64, 8)), (model[2], (64, 64)), (model[4], (4, 64))):
        drawn_(layer.weight, base, "relu" if base[0] == 64 else 1.0)
        nn.init.zeros_(layer.bias)
    return model


TRAINED: dict[str, tuple[Callable[[int], nn.Module], str, float]] = {
    "perceptron, Adam": (scaled_perceptron, "adam", 1e-2),
    "perceptron, SGD": (scaled_perceptron, "sgd", 0.3),
    "transformer, Adam": (Transformer, "adam", 3e-3),
    "transformer, SGD": (Transformer, "sgd", 0.3),
    "tied transformer, Adam": (lambda n: Transformer(n, tied=True), "adam", 3e-3),
}
OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {"adam": torch.optim.AdamW, "sgd": torch.optim.SGD}


def exponents(name: str, *, mup: bool) -> Widths:
    factory, rule, lr = TRAINED[name]
    inputs = torch.randn(32, 8) if "perceptron" in name else torch.randint(32, (32, 8))
    targets = torch.randint(4 if "perceptron" in name else 32, (32,))

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        plain = [{"params": list(model.parameters()), "weight_decay": 0.0}]
        groups = gonio.param_groups(model, mup=True, base=factory(64), lr=lr, rule=rule) if mup else plain
        return OPTIMIZERS[rule](groups, lr=lr)

    return widths(factory, (64, 128, 256), (inputs, targets), optimizer=optimizer, steps=5)


@pytest.mark.grid(3)
@pytest.mark.parametrize("name", TRAINED)
def test_with_the_rates_nothing_depends_on_the_width_and_without_them_it_does(name: str) -> None:
    with_rates = exponents(name, mup=True)
    # Attention divides by d, so at first its products, and with them the gradients of queries and keys, fall with the
    # width: SGD changes qkv by width^-0.27, at the limit of a finding. Adam does not see the size of a gradient.
    if name != "transformer, SGD":
        assert [finding.code for finding in with_rates.findings] == [], str(with_rates)
    assert all(abs(row.change or 0.0) < 0.35 for row in with_rates.values()), str(with_rates)
    without = exponents(name, mup=False)
    assert "G602" in {finding.code for finding in without.findings}, str(without)
