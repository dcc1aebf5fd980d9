"""Advice on normalisation and training: each rule finds its case, is silent beside it, and says what is true."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import gonio
from catalog import seeded
from gonio import nn as gnn
from gonio import parametrizations as P
from gonio.errors import InvalidArgumentError
from gonio.measuring import measure
from gonio.measuring.findings.rules import ADVICE, HEAD_RULES
from measuring.nets import Residual

IMAGES = seeded(4, 3, 8, 8)


def loader_of(samples: int, batch: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.zeros(samples, 1)), batch_size=batch, **options)


def convolutions(norm: Callable[[int], nn.Module], *, bias: bool = True) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3, bias=bias), norm(8), nn.ReLU(), nn.Conv2d(8, 4, 3, bias=bias), norm(4))


def norm_groups(channels: int) -> nn.Module:
    return nn.GroupNorm(2, channels)


def pooled(norm: nn.Module) -> nn.Sequential:
    """A norm on 1×1 maps."""
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), norm)


class Recurrent(nn.Module):
    """One norm at every time step."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.cell, self.norm = nn.RNNCell(3, 8), norm

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(4, 8)
        for step in range(3):
            h = self.norm(self.cell(x[:, step], h))
        return h


def decaying(model: nn.Module, *, weight_decay: float = 1e-4) -> dict[str, Any]:
    return {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=weight_decay)}


def sgd_of(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def replaced_head() -> Setup:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = sgd_of(model)
    model[2] = nn.Linear(8, 3)
    return model, {"optimizer": optimizer}


def frozen_layer(layer: nn.Module) -> nn.Module:
    return copy.deepcopy(layer).requires_grad_(False)


def frozen(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    return model


class Applied(nn.Module):
    """A function between two layers."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(6, 8), nn.Linear(8, 2), function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


Setup = tuple[nn.Module, dict[str, Any]]


def found(setup: Setup) -> dict[str, str]:
    model, options = setup
    return {finding.code: finding.found for finding in measure(model, **options).findings if finding.code in ADVICE}


# code → (setups that it must find, setups beside them on which it must stay silent)
def cases() -> dict[str, tuple[list[Setup], list[Setup]]]:
    batch_norms, group_norms = convolutions(nn.BatchNorm2d), convolutions(norm_groups)
    sync = convolutions(nn.SyncBatchNorm)
    plain = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    checkpointed = nn.Sequential(checkpoint_wrapper(convolutions(nn.BatchNorm2d)))
    half = nn.Linear(6, 2).bfloat16()
    return {
        "G401": (
            [(batch_norms, {"loader": loader_of(100, 7)}), (sync, {"loader": loader_of(100, 2)})],
            [
                (batch_norms, {"loader": loader_of(100, 8)}),
                (group_norms, {"loader": loader_of(100, 2)}),
                (convolutions(gnn.SwitchableNorm2d), {"loader": loader_of(100, 2)}),
                (frozen(convolutions(nn.BatchNorm2d)), {"loader": loader_of(100, 2)}),
                (batch_norms, {}),
                (batch_norms, {"loader": DataLoader(TensorDataset(torch.zeros(9, 1)), batch_size=None)}),
            ],
        ),
        "G402": (
            [(batch_norms, {"loader": loader_of(65, 16)}), (batch_norms.eval(), {"loader": loader_of(1, 16)})],
            [
                (batch_norms, {"loader": loader_of(66, 16)}),
                (batch_norms, {"loader": loader_of(64, 16)}),
                (batch_norms, {"loader": loader_of(65, 16, drop_last=True)}),
                (group_norms, {"loader": loader_of(65, 16)}),
                (batch_norms, {}),
            ],
        ),
        "G403": (
            [(pooled(nn.GroupNorm(8, 8)), {"batch": IMAGES}), (nn.Sequential(nn.LayerNorm(1)), {})],
            [
                (pooled(nn.GroupNorm(4, 8)), {"batch": IMAGES}),
                (pooled(nn.GroupNorm(8, 8)), {}),  # on larger maps all is well
                (convolutions(lambda n: nn.GroupNorm(n, n)), {"batch": IMAGES}),
                (nn.Sequential(nn.LayerNorm(2), nn.RMSNorm(1)), {}),
            ],
        ),
        "G404": (
            [(Recurrent(nn.BatchNorm1d(8)), {}), (Recurrent(nn.BatchNorm1d(8)), {"batch": IMAGES[:, :, :3, 0]})],
            [
                (Recurrent(nn.LayerNorm(8)), {}),
                (Recurrent(nn.BatchNorm1d(8, track_running_stats=False)), {}),
                (nn.Sequential(nn.LSTM(3, 4)), {}),
                (batch_norms, {"batch": IMAGES}),
            ],
        ),
        "G405": (
            [(batch_norms, decaying(batch_norms)), (group := convolutions(norm_groups, bias=False), decaying(group))],
            [
                (batch_norms, decaying(batch_norms, weight_decay=0)),
                (group_norms, decaying(group_norms)),  # the biases do not grow with the weights
                (plain, decaying(plain)),
                (batch_norms, {}),
            ],
        ),
        "G407": (
            [(chain(1), {}), (chain(3), {}), (zeroed(convolutions(nn.BatchNorm2d), 1), {})],
            [
                (chain(None), {}),
                (nn.Sequential(nn.Linear(6, 6), Residual(zeroed(nn.Sequential(nn.Linear(6, 6)), 0))), {}),
                (nn.ModuleList([chain(1)]), {}),  # cannot be traced
            ],
        ),
        "G408": (
            [(biased(-100.0), {"batch": seeded(64, 6)}), (biased(-100.0, units=8), {"batch": seeded(64, 6)})],
            [
                (biased(0.0), {"batch": seeded(64, 6)}),
                (biased(-100.0), {}),
                (biased(0.0), {"batch": seeded(1, 6)}),  # half of the units are 0 on a single sample
                (biased(0.0), {"batch": seeded(1, 6).expand(64, 6)}),
                (biased(-100.0, units=4), {"batch": seeded(64, 6)}),
                (zeroed(nn.Sequential(nn.Linear(6, 64), nn.Linear(64, 64), nn.Tanh()), 1), {"batch": seeded(64, 6)}),
            ],
        ),
        "G409": (
            [
                (scaled(chain(None), 3, 100), {"batch": seeded(64, 6)}),
                (scaled(chain(None), 3, 1e-3), {"batch": seeded(64, 6)}),
                (scaled(normed(), 1, 100), {"batch": IMAGES}),
            ],
            [
                (chain(None), {"batch": 100 * seeded(64, 6)}),
                (scaled(chain(None), 3, 100), {}),
                (zeroed(chain(None), 3), {"batch": seeded(64, 6)}),  # G407
                (nn.Sequential(nn.Flatten(), nn.Softmax(1)), {"batch": 100 * IMAGES}),
            ],
        ),
        "G410": (
            [(normed(), {"batch": 3 + 5 * IMAGES}), (scaled(normed(), 0, 10), {"batch": IMAGES})],
            [
                (normed(), {"batch": IMAGES}),
                (normed(), {"batch": seeded(4, 3, 8, 8, seed=1)}),
                (normed(), {}),
                (convolutions(nn.BatchNorm2d), {"batch": 3 + 5 * IMAGES}),  # it has seen no batch
            ],
        ),
        "G412": (
            [(deep(0.02), {"batch": seeded(64, 6)}), (deep(2.0), {"batch": seeded(64, 6)})],
            [
                (deep(0.02), {}),
                (deep(0.3), {"batch": seeded(64, 6)}),  # a factor of about 100
                (deep(0.02, norm=True), {"batch": seeded(64, 6)}),
                (deep(0.0), {"batch": seeded(64, 6)}),  # G101
                (nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 2)), {"batch": 1e9 * seeded(64, 6)}),
            ],
        ),
        "G416": (
            [*((Cut(how), {"batch": seeded(8, 6)}) for how in ("detach", "no_grad", "unused"))],
            [
                *((Cut(how), {"batch": seeded(8, 6)}) for how in ("", "frozen", "not called")),
                (Cut("detach"), {}),
                (zeroed(chain(None), 3), {"batch": seeded(64, 6)}),
                (nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 2)), {"batch": seeded(8, 6)}),
            ],
        ),
        "G418": (
            [(nn.Linear(6, 2), {"optimizer": sgd_of(nn.Linear(6, 2))}), replaced_head()],
            [
                (plain, decaying(plain)),
                (plain, {}),
                (plain[0], decaying(plain)),
                (frozen_layer(nn.Linear(6, 2)), {"optimizer": sgd_of(nn.Linear(6, 2))}),
                (half, {"optimizer": sgd_of(copy.deepcopy(half).float())}),  # a copy that is trained
            ],
        ),
        "G417": (
            [(Applied(torch.log), {"batch": seeded(64, 6)}), (chain(None), {"batch": seeded(64, 6) / 0})],
            [
                (Applied(torch.log), {}),
                (Applied(torch.exp), {"batch": seeded(64, 6)}),
            ],
        ),
        "G101": (
            [(zero_gains(normed()), {}), (zero_gains(nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8))), {})],
            [(normed(), {}), (nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8, elementwise_affine=False)), {})],
        ),
        "G415": (
            [(half_loaded(trained=2), {}), (half_loaded(trained=3), {}), (half_loaded(trained=3).bfloat16(), {})],
            [
                *((half_loaded(trained=n), {}) for n in (0, 1, 4)),
                (half_loaded(trained=2, dtype=torch.complex64), {}),
                (adapters_at_their_start(), {}),
                *((model, {}) for model in (normed(), plain, convolutions(nn.BatchNorm2d))),
            ],
        ),
        "G411": (
            [(forgotten(normed()), {}), (as_built(normed()), {}), (drawn_in_all(4, trained=True), {})],
            [
                (drawn_in_all(4), {}),
                *((normed(), {}), (convolutions(nn.BatchNorm2d), {}), (forgotten(convolutions(nn.BatchNorm2d)), {})),
                *((drawn(kind), {}) for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)),
            ],
        ),
        "G406": (
            [(checkpointed, {})],
            [
                (nn.Sequential(checkpoint_wrapper(group_norms)), {}),
                (nn.Sequential(checkpoint_wrapper(convolutions(gnn.SwitchableNorm2d))), {}),
                (nn.Sequential(checkpoint_wrapper(plain), *batch_norms), {}),
            ],
        ),
    }


class Attends(nn.Module):
    """Four heads, of which the queries of some are enlarged; `causal`: each token sees those before it."""

    def __init__(self, heads: tuple[int, ...] = (), factor: float = 1.0, *, causal: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.qkv, self.out, self.causal = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16), causal
        with torch.no_grad():
            for head in heads:
                self.qkv.weight[4 * head : 4 * head + 4] *= factor

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(attended.transpose(1, 2).flatten(2))


TOKENS = {"batch": seeded(8, 12, 16)}


# code → (setups that it must find, setups beside them on which it must stay silent)
def cases_of_heads() -> dict[str, tuple[list[Setup], list[Setup]]]:
    return {
        "G413": (
            [(Attends((2,), 300), TOKENS), (Attends((0, 1), 300, causal=True), TOKENS)],
            [
                (Attends(), TOKENS),
                (Attends((2,), 20), TOKENS),
                (Attends((2,), 300), {}),  # without a batch
                (nn.Sequential(nn.Linear(16, 4)), TOKENS),
            ],
        ),
        "G414": (
            [(Attends((0, 1, 3), 1000), TOKENS), (Attends((0, 1, 2, 3), 1000, causal=True), TOKENS)],
            [
                (Attends(), TOKENS),
                (Attends((0, 1), 1000), TOKENS),  # half of the heads
                (Attends((0, 1, 3), 10), TOKENS),
                (Attends((0, 1, 3), 1000), {}),
                (Attends(causal=True), {"batch": seeded(8, 1, 16)}),  # a single token has no choice
                (Attends((0, 1, 3), 1000), {"batch": seeded(8, 1, 16).expand(8, 12, 16)}),  # equal tokens
            ],
        ),
    }


@pytest.mark.parametrize("code", HEAD_RULES)
def test_a_rule_on_heads_finds_its_cases_and_not_those_beside_them(code: str) -> None:
    ill, well = cases_of_heads()[code]
    for of, setups in ((True, ill), (False, well)):
        for model, options in setups:
            measured = [finding for finding in measure(model, **options).findings if finding.code == code]
            assert bool(measured) == of, (code, model, options)
    (one,) = [finding for finding in measure(ill[0][0], **ill[0][1]).findings if finding.code == code]
    said = {
        "G413": r"the largest logit is \d+, in head 2; 1 of 4 heads exceed 100",
        "G414": "3 of 4 heads attend to one",
    }
    assert re.match(said[code], one.found)


def test_an_optimizer_of_a_part_of_the_model_is_a_remark() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    (one,) = [f for f in measure(model, optimizer=sgd_of(model[2])).findings if f.code == "G418"]
    said = "2 parameters of the model that require a gradient are not in the optimizer: 0.weight, 0.bias"
    assert (one.level, one.found) == ("info", said)
    setup, options = replaced_head()
    (one,) = [f for f in measure(setup, **options).findings if f.code == "G418"]
    said = "2 parameters of the model that require a gradient are not in the optimizer: 2.weight, 2.bias; the optimizer"
    assert (one.level, one.found) == ("warn", f"{said} has 2 parameters of no layer")


def zeroed(model: nn.Sequential, layer: int | None) -> nn.Sequential:
    if layer is not None:
        for parameter in model[layer].parameters():
            nn.init.zeros_(parameter)
    return model


@torch.no_grad()
def scaled(model: nn.Sequential, layer: int, factor: float) -> nn.Sequential:
    model[layer].weight.mul_(factor)
    model[layer].bias.mul_(factor)
    return model


def normed() -> nn.Sequential:
    """Batch norms with the statistics of normal images, and gains that training has changed."""
    model = convolutions(nn.BatchNorm2d)
    for norm in (model[1], model[4]):
        nn.init.uniform_(norm.weight, 0.5, 1.5)
    gonio.calibrate_(model, [seeded(64, 3, 8, 8, seed=2)])
    return model


class Branched(nn.Module):
    """Layers to whose outputs their inputs are added; the outputs have begun at 0, and are `factor` times the usual."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(2))
        self.branches[0].weight.mul_(factor)
        self.head = nn.Linear(64, 6)

    def forward(self, x: Tensor) -> Tensor:
        for branch in self.branches:
            x = x + branch(x)
        return self.head(x)


class Adapting(nn.Module):
    """A layer with a low-rank adapter whose second factor has begun at 0."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(64, 64), nn.Linear(64, 4), nn.Linear(4, 64, bias=False)
        self.head = nn.Linear(64, 6)
        self.up.weight.mul_(factor)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.base(x) + self.up(self.down(x)))


def before_norm(norm: nn.Module, factor: float) -> nn.Sequential:
    return scaled(nn.Sequential(nn.Linear(64, 64), norm, nn.ReLU(), nn.Linear(64, 6)), 0, factor)


def seen(model: nn.Sequential) -> nn.Sequential:
    """The model with running statistics of normal inputs, and then with its first layer of another size."""
    gonio.calibrate_(model, [seeded(256, 64, seed=2)])
    return scaled(model, 0, 1e-3)


@torch.no_grad()
@pytest.mark.parametrize(
    ("make", "level"),
    [
        (lambda: Branched(1e-3), "info"),
        (lambda: Branched(1e3), "warn"),
        (lambda: Adapting(1e-3), "info"),
        (lambda: before_norm(nn.LayerNorm(64, eps=1e-12), 1e-3), "info"),
        (lambda: before_norm(nn.LayerNorm(64), 1e3), "info"),
        (lambda: before_norm(nn.BatchNorm1d(64, eps=1e-12), 1e-3), "info"),  # of which no statistics are known yet
        (lambda: seen(before_norm(nn.BatchNorm1d(64), 1.0)), "warn"),
        (lambda: before_norm(nn.Identity(), 1e-3), "warn"),
        (lambda: before_norm(nn.Sigmoid(), 1e3), "warn"),
    ],
)
def test_a_size_that_the_next_layers_do_not_get_is_a_remark(make: Callable[[], nn.Module], level: str) -> None:
    torch.manual_seed(0)
    found = measure(make(), batch=seeded(256, 64)).findings
    assert [finding.level for finding in found if finding.code == "G409"] == [level]


def forgotten(model: nn.Sequential) -> nn.Sequential:
    for norm in (model[1], model[4]):
        norm.reset_running_stats()
        nn.init.normal_(norm.bias)  # as training leaves it; initialisations draw gains alone
    return model


def as_built(model: nn.Sequential) -> nn.Sequential:
    """The last norm alone is as at the start, unlike the one before it."""
    model[4].reset_parameters()
    return model


class Adapted(nn.Module):
    """A trained layer with a change of low rank that has not begun."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(16, 16), nn.Linear(16, 4, bias=False), nn.Linear(4, 16, bias=False)
        nn.init.normal_(self.base.weight), nn.init.normal_(self.base.bias), nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = self.base(x) + self.up(self.down(x))
        return changed


def adapters_at_their_start() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Adapted(), Adapted(), Adapted())


def half_loaded(*, trained: int, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Four layers, of which the first ones are not as torch builds them."""
    model = nn.Sequential(*(nn.Linear(16, 16, dtype=dtype) for _ in range(4)))
    for layer in model[:trained]:
        nn.init.normal_(layer.weight)
        nn.init.normal_(layer.bias)
    return model


class Cut(nn.Module):
    """A block that takes part in the output or not, as far as gradients know."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.block, self.head = how, nn.Linear(6, 6), nn.Linear(6, 2)
        self.block.requires_grad_(how != "frozen")

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "not called":
            return self.head(x)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.how != "no_grad"):
            y = self.block(x)
        return self.head(x if self.how == "unused" else y.detach() if self.how == "detach" else y)


def zero_gains(model: nn.Sequential) -> nn.Sequential:
    nn.init.zeros_(model[1].weight)
    return model


def drawn(kind: type[nn.Module]) -> nn.Sequential:
    """Gains as DCGAN and pix2pix draw them, before any training."""
    model = nn.Sequential(nn.Conv2d(3, 32, 3), kind(32))
    nn.init.normal_(model[1].weight, 1, 0.02)
    nn.init.zeros_(model[1].bias)
    return model


def drawn_in_all(count: int, *, trained: bool = False) -> nn.Sequential:
    """Gains and shifts as RepVGG draws them; training moves those of each depth in its own way."""
    torch.manual_seed(0)
    norms = [nn.BatchNorm2d(32) for _ in range(count)]
    for depth, norm in enumerate(norms):
        nn.init.normal_(norm.weight, 0.1 + 0.1 * depth * trained, 0.1)
        nn.init.normal_(norm.bias, 0, 0.1)
    return nn.Sequential(nn.Conv2d(3, 32, 3), *norms)


def chain(zero: int | None) -> nn.Sequential:
    return zeroed(nn.Sequential(nn.Flatten(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3)), zero)


def deep(std: float, *, norm: bool = False) -> nn.Sequential:
    """Ten layers with ReLU and weights of this standard deviation; each changes the size by about std · 5.7."""
    torch.manual_seed(0)
    widths = [6, *[64] * 10]
    kinds = [nn.Linear, nn.LayerNorm, nn.ReLU] if norm else [nn.Linear, nn.ReLU]
    layers = [
        kind(a, b) if kind is nn.Linear else kind(b) if kind is nn.LayerNorm else kind()
        for a, b in itertools.pairwise(widths)
        for kind in kinds
    ]
    for layer in layers:
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=std)
            nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers, nn.Linear(64, 3))


def biased(bias: float, *, units: int = 64) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, units), nn.ReLU(), nn.Dropout(0.5), nn.Linear(units, 3))
    nn.init.constant_(model[0].bias, bias)
    return model


@pytest.mark.parametrize("code", ADVICE)
def test_a_rule_finds_its_cases_and_not_those_beside_them(code: str) -> None:
    ill, well = cases()[code]
    for setup in ill:
        assert code in found(setup), setup
    for setup in well:
        assert code not in found(setup), setup


def test_what_is_said() -> None:
    model = nn.Sequential(*convolutions(nn.BatchNorm2d), nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8))
    said = found((model, {"loader": loader_of(41, 4), **decaying(model), "batch": IMAGES}))
    assert said["G401"] == "batch norms compute statistics over 4 samples: 1, 4, 7"
    assert said["G402"].endswith("training will raise an error there: 7 get one value per channel")
    unknown = found((model, {"loader": loader_of(41, 4)}))
    assert unknown["G402"].endswith("training will raise an error if the inputs of 7 are (N, C)")
    assert said["G405"] == "weight decay acts on 3 weights whose scale has no effect: 0.weight, 3.weight, 6.weight"
    assert found((Recurrent(nn.BatchNorm1d(8)), {}))["G404"].endswith("norm (3 times)")
    assert found((biased(-100.0), {"batch": seeded(64, 6)}))["G408"].endswith("on the whole batch: 1 (64 of 64)")
    measured = measure(model, loader=loader_of(41, 4))
    assert "warn  G401  the model: batch norms compute" in str(measured)
    assert "the batch size is read from the loader." in measured.to_html()


def test_the_output_of_what_is_called_constant_is_constant() -> None:
    for model in (chain(1), chain(3)):
        outputs = model(seeded(5, 6))
        assert torch.equal(outputs, outputs[:1].expand_as(outputs))
        assert found((model, {}))["G407"].startswith("the output is the same for every input: the weight of ")
    assert not torch.equal(chain(None)(seeded(2, 6))[0], chain(None)(seeded(2, 6))[1])


# --- what the rules say is so ---------------------------------------------------------------------
def epoch(model: nn.Module, data: Tensor) -> None:
    for x in data.split(4):
        model(x)


@pytest.mark.parametrize("samples", [8, 9, 10, 13])
def test_training_stops_at_a_last_batch_of_one_as_foretold(samples: int) -> None:
    """The three ways out: drop it, another batch size, another norm."""
    data = seeded(samples, 3, 8, 8)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(4)).train()
    loader = DataLoader(TensorDataset(data), batch_size=4)
    said = found((model, {"loader": loader, "batch": data}))
    assert ("G402" in said) is (samples % 4 == 1)
    if "G402" in said:
        assert "training will raise an error there: 2 get one value per channel" in said["G402"]
        with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
            epoch(model, data)
        gonio.swap_(model, gnn.SwitchableNorm2d.from_batch_norm)
        assert "G402" not in found((model, {"loader": loader, "batch": data}))
    epoch(model, data)


def test_a_norm_over_single_values_gives_its_shift() -> None:
    model = pooled(nn.GroupNorm(8, 8))
    nn.init.normal_(model[2].bias)
    x = IMAGES.clone().requires_grad_()
    output = model(x)
    torch.testing.assert_close(output, model[2].bias.view(1, 8, 1, 1).expand_as(output))
    output.square().sum().backward()
    torch.testing.assert_close(x.grad, torch.zeros_like(x), rtol=0, atol=1e-4)  # rounding times 1/√ε = 316


@pytest.mark.parametrize(
    "make",
    [
        lambda: convolutions(nn.BatchNorm2d),
        lambda: convolutions(nn.InstanceNorm2d),
        lambda: convolutions(norm_groups, bias=False),
        lambda: convolutions(gnn.SwitchableNorm2d, bias=False),
        lambda: nn.Sequential(nn.Linear(8, 6, bias=False), nn.LayerNorm(6), nn.Linear(6, 5, bias=False), nn.RMSNorm(5)),
        *(
            lambda kind=kind: gonio.parametrize_(model := nn.Sequential(nn.Linear(8, 6), nn.ReLU()), kind()) and model
            for kind in (P.Sphere, P.WeightNorm, P.SpectralNorm, P.Orthogonal, P.WeightStandardization)
        ),
    ],
)
def test_the_function_does_not_depend_on_the_scale_of_what_is_listed(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make().double().train()
    for module in model.modules():
        if isinstance(getattr(module, "eps", None), float):
            module.eps = 1e-14
    x = IMAGES.double()
    expected = model(x)
    said = found((model, decaying(model)))["G405"]
    listed = said.partition(": ")[2].split(", ")
    assert listed
    for path in listed:
        with torch.no_grad():
            dict(model.named_parameters())[path].mul_(3.7)
        torch.testing.assert_close(model(x), expected, rtol=1e-9, atol=1e-9)


class Forked(nn.Module):
    """A convolution whose output is read past its norm, and one whose weight another layer shares."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1)
        self.tied = nn.Conv2d(3, 3, 1)
        self.tied.weight = self.last.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.norm(self.last(self.norm(y) + y)) + self.tied(x)


@pytest.mark.parametrize(
    "model",
    [
        Forked(),
        nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), nn.LocalResponseNorm(2)),
        nn.Sequential(nn.Conv2d(3, 4, 1), nn.LayerNorm((4, 8, 8))),
        nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), nn.ReLU(), nn.Dropout(0.0)),
    ],
    ids=["forked and tied", "local response", "bias before a layer norm", "no norm"],
)
def test_what_depends_on_its_scale_is_not_listed(model: nn.Module) -> None:
    assert "G405" not in found((model, decaying(model)))
    model = model.double()
    for parameter in [m.weight for m in model.modules() if isinstance(m, nn.Conv2d)]:
        expected = model(IMAGES.double())
        with torch.no_grad():
            parameter.mul_(3.7)
        assert not torch.allclose(model(IMAGES.double()), expected, rtol=1e-3)


def test_checkpointing_moves_batch_statistics_twice() -> None:
    model = nn.Sequential(checkpoint_wrapper(nn.Sequential(nn.BatchNorm2d(3, momentum=1 - 0.9**0.5))))
    once = nn.BatchNorm2d(3)
    once(IMAGES)
    model(IMAGES.clone().requires_grad_()).sum().backward()
    norm = next(m for m in model.modules() if isinstance(m, nn.BatchNorm2d))
    assert (int(norm.num_batches_tracked), int(once.num_batches_tracked)) == (2, 1)
    torch.testing.assert_close(norm.running_var, once.running_var)  # with the momentum that the rule advises
    assert "G406" in found((model, {}))


# --- loaders and optimizers -----------------------------------------------------------------------
class Endless(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield torch.zeros(1)


def test_loaders_of_every_kind() -> None:
    model = convolutions(nn.BatchNorm2d)
    data = TensorDataset(torch.zeros(34, 1))
    sampled = DataLoader(data, batch_size=16, sampler=DistributedSampler(data, num_replicas=2, rank=0))
    assert set(found((model, {"loader": sampled}))) == {"G402"}  # 17 samples in each process
    batches = DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 3, drop_last=False))
    assert set(found((model, {"loader": batches}))) == {"G401", "G402"}
    assert set(found((model, {"loader": DataLoader(Endless(), batch_size=4)}))) == {"G401"}
    assert not found((model, {"loader": DataLoader(data, batch_size=None)}))


def test_nothing_is_drawn_from_the_loader_or_the_global_generator() -> None:
    class Refusing(TensorDataset):
        def __getitem__(self, index: int) -> tuple[Tensor, ...]:
            raise AssertionError("drawn")

    model, state = convolutions(nn.BatchNorm2d), torch.random.get_rng_state()
    loader = DataLoader(Refusing(torch.zeros(9, 1)), batch_size=4, shuffle=True)
    assert "G402" in found((model, {"loader": loader}))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_groups_with_and_without_decay() -> None:
    model = convolutions(nn.BatchNorm2d)
    groups = [{"params": [model[0].weight], "weight_decay": 0.0}, {"params": [model[3].weight], "weight_decay": 0.1}]
    said = found((model, {"optimizer": torch.optim.AdamW(groups)}))["G405"]
    assert said == "weight decay acts on 1 weight whose scale has no effect: 3.weight"


def test_a_compiled_model_and_wrapped_ones_are_advised_as_the_plain_one() -> None:
    model = convolutions(nn.BatchNorm2d)
    options = {"loader": loader_of(65, 4), **decaying(model)}
    expected = found((model, options))
    assert set(expected) == {"G401", "G402", "G405"}
    assert found((torch.compile(model, backend="eager"), options)) == expected
    assert found((nn.DataParallel(model), options)) == expected


def test_what_is_no_loader_and_no_optimizer() -> None:
    model = convolutions(nn.BatchNorm2d)
    for source, options, said in (
        (model, {"loader": [IMAGES]}, "reads the batch size of a DataLoader; found list"),
        (model, {"optimizer": 0.1}, "reads the weight decay of an optimizer; found float"),
        (model.state_dict(), {"loader": loader_of(9, 4)}, "reads the loader of a model's training; found OrderedDict"),
        (model.state_dict(), decaying(model), "reads the optimizer of a model's training; found OrderedDict"),
        (model.state_dict(), {"batch": IMAGES}, "runs a batch through a model; found OrderedDict"),
    ):
        with pytest.raises(InvalidArgumentError, match=said):
            measure(source, **options)
