"""`balance_` on whole networks: closed forms derived by hand, optimizers, quantisation."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from catalog import seeded
from foreign import torchvision_resnet18
from gonio.errors import InvalidArgumentError, NotApplicableError
from gonio.surgery import balance_, fold_
from networks import ResNet18, images


def resnet(model: nn.Module | None = None) -> nn.Module:
    """A ResNet-18 in float64 whose norms have trained: no statistic or parameter at its default."""
    model = (ResNet18() if model is None else model).double().eval()
    with torch.no_grad():
        for seed, norm in enumerate(m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
            values = seeded(4, norm.num_features, seed=seed, dtype=torch.float64)
            norm.weight.copy_(values[0].exp())
            norm.bias.copy_(values[1])
            norm.running_mean.copy_(values[2])
            norm.running_var.copy_((0.5 * values[3]).exp())
    return model


def groups(model: nn.Module) -> list[tuple[list[nn.BatchNorm2d], list[nn.Module]]]:
    """Read off the architecture by hand: the norms that make each tensor, and the layers that read it."""
    found = []
    makers, readers = [model.bn1], []
    for stage in (model.layer1, model.layer2, model.layer3, model.layer4):
        for block in stage:
            readers.append(block.conv1)
            found.append(([block.bn1], [block.conv2]))
            if block.downsample is not None:
                readers.append(block.downsample[0])
                found.append((makers, readers))
                makers, readers = [block.downsample[1]], []
            makers.append(block.bn2)
    return [*found, (makers, [*readers, model.fc])]


def rows(norm: nn.BatchNorm2d) -> Tensor:
    return norm.weight.detach().square()


def columns(layer: nn.Module) -> Tensor:
    return layer.weight.detach().square().transpose(0, 1).flatten(1).sum(1)


def parts(model: nn.Module, *, per_channel: bool) -> list[tuple[Tensor, Tensor]]:
    """Squares of the rows that make and of the columns that read each tensor."""
    found = [(sum(map(rows, made)), sum(map(columns, read))) for made, read in groups(model)]
    return found if per_channel else [(made.sum(), read.sum()) for made, read in found]


@pytest.mark.parametrize("make", [ResNet18, pytest.param(lambda: torchvision_resnet18(10), marks=pytest.mark.slow)])
@pytest.mark.parametrize("level", ["neuron", "layer"])
def test_a_resnet_18_reaches_the_closed_form(level: str, make: Callable[[], nn.Module]) -> None:
    r"""Each tensor's terms are :math:`s^2 P + Q/s^2`, whose least value is :math:`2\sqrt{PQ}`."""
    model, x = resnet(make()), images(2).double()
    before = model(x).detach()
    least = sum(float(2 * (made * read).sqrt().sum()) for made, read in parts(model, per_channel=level == "neuron"))
    start = sum(float(made.sum() + read.sum()) for made, read in parts(model, per_channel=True))
    balance_(model, example=x, level=level)
    reached = sum(float(made.sum() + read.sum()) for made, read in parts(model, per_channel=True))
    assert float((model(x).detach() - before).abs().max() / before.abs().max()) <= 1e-12
    assert reached == pytest.approx(least, rel=1e-12)
    assert reached < 0.9 * start


def test_a_folded_resnet_18_rests_where_every_channel_is_balanced() -> None:
    """Without norms the scales hang together and there is no closed form; at the least sum rows equal columns."""
    model, x = resnet(), images(2).double()
    fold_(model, example=x)
    before = model(x).detach()
    start = sum(float(p.detach().square().sum()) for n, p in model.named_parameters() if n.endswith("weight"))
    text = str(balance_(model, example=x))
    assert float((model(x).detach() - before).abs().max() / before.abs().max()) <= 1e-12
    block = model.layer1[0]
    torch.testing.assert_close(
        block.conv1.weight.square().sum((1, 2, 3)), block.conv2.weight.square().sum((0, 2, 3)), rtol=1e-9, atol=0
    )
    made = [model.conv1, *(b.conv2 for b in model.layer1)]
    read = [*(b.conv1 for b in model.layer1), model.layer2[0].conv1, model.layer2[0].downsample[0]]
    torch.testing.assert_close(
        sum(layer.weight.square().sum((1, 2, 3)) for layer in made),
        sum(layer.weight.square().sum((0, 2, 3)) for layer in read),
        rtol=1e-9,
        atol=0,
    )
    assert sum(float(p.detach().square().sum()) for n, p in model.named_parameters() if n.endswith("weight")) < start
    assert "has not converged" not in text


def test_a_shared_norm_moves_nothing() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Conv2d(2, 2, 1) for _ in range(3))
            self.norm = nn.BatchNorm2d(2)

        def forward(self, x):
            return self.c(F.relu(self.norm(self.b(F.relu(self.norm(self.a(x)))))))

    model = Shared()
    with pytest.raises(NotApplicableError, match="a BatchNorm2d normalises it"):
        balance_(model)
    model.c = nn.Sequential(model.c, nn.ReLU(), nn.Conv2d(2, 2, 1))
    edited = balance_(model, example=seeded(2, 2, 3, 3))
    assert {change.path for change in edited.changes} == {"c.0", "c.2"}


def test_a_layer_that_reads_what_it_adds_to() -> None:
    """x + f(x): rows and columns of one weight carry the same scales, and a full step would swing for ever."""

    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.loop, self.leave = (nn.Linear(2, 2, bias=False).double() for _ in range(3))
            with torch.no_grad():
                self.loop.weight.copy_(torch.tensor([[0.0, 100.0], [1.0, 0.0]]))
                self.enter.weight.mul_(0.01)
                self.leave.weight.mul_(0.01)

        def forward(self, x):
            x = self.enter(x)
            return self.leave(x + self.loop(F.relu(x)))

    model = Loop()
    balance_(model, example=seeded(4, 2, dtype=torch.float64))
    squares = model.loop.weight.square()
    made = model.enter.weight.square().sum(1) + squares.sum(1)
    read = model.leave.weight.square().sum(0) + squares.sum(0)
    torch.testing.assert_close(made, read, rtol=1e-6, atol=0)
    assert squares.max() < 200


def test_a_layer_whose_output_a_hook_changes_keeps_its_scale() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    model[0].register_forward_hook(lambda module, inputs, output: output + 1)
    with pytest.raises(NotApplicableError, match="0 has forward hooks, which may change its output"):
        balance_(model)


# --- optimizers -------------------------------------------------------------------------------------

OPTIMIZERS = {
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-3, eps=1e-30, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-30, weight_decay=0),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-3, eps=1e-30),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-3, eps=1e-30),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-3, eps=1e-30),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-3, eps=1e-30),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, eps=1e-30, momentum=0.9, centered=True),
}


def chain() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)).double()
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            parameter.copy_(seeded(*parameter.shape, seed=seed, dtype=torch.float64) * 10 ** (seed % 3 - 1))
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The changes of the parameters that one training step makes."""
    x, y = seeded(16, 6, seed=8, dtype=torch.float64), seeded(16, 6, seed=9, dtype=torch.float64)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    return [p.detach() - b for p, b in zip(model.parameters(), before, strict=True)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_next_step_of_an_adaptive_optimizer_is_the_same(name: str) -> None:
    model = chain()
    optimizer = OPTIMIZERS[name](model.parameters())
    for _ in range(7):
        step(model, optimizer)
    twin = copy.deepcopy((model, optimizer))
    expected = step(*twin)
    balance_(model, optimizer=optimizer)
    for found, wanted in zip(step(model, optimizer), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-12)


def test_the_next_step_of_adam_is_another_one_if_its_moments_stay() -> None:
    model = chain()
    optimizer = OPTIMIZERS["Adam"](model.parameters())
    for _ in range(7):
        step(model, optimizer)
    expected = step(*copy.deepcopy((model, optimizer)))
    balance_(model)
    found = step(model, optimizer)
    assert max(float((f - w).abs().max() / w.abs().max()) for f, w in zip(found, expected, strict=True)) > 0.1


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_next_step_of_sgd_is_scaled_by_the_square_of_the_factor(momentum: float) -> None:
    model = chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=momentum)
    for _ in range(3):
        step(model, optimizer)
    expected = step(*copy.deepcopy((model, optimizer)))
    before = [p.detach().clone() for p in model.parameters()]
    balance_(model, optimizer=optimizer)
    factors = [p.detach() / b for p, b in zip(model.parameters(), before, strict=True)]
    for found, wanted, s in zip(step(model, optimizer), expected, factors, strict=True):
        torch.testing.assert_close(s * found, wanted, rtol=1e-7, atol=1e-15)


def test_what_an_unknown_optimizer_remembers_is_refused_and_nothing_changes() -> None:
    class Odd(torch.optim.Optimizer):
        def __init__(self, parameters) -> None:
            super().__init__(parameters, {})

        def step(self, closure=None) -> None:
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["memory"] = torch.zeros_like(parameter)

    model = chain()
    optimizer = Odd(model.parameters())
    before = {k: v.clone() for k, v in model.state_dict().items()}
    balance_(model, optimizer=optimizer).undo_()
    optimizer.step()
    with pytest.raises(NotApplicableError, match="the unit of 'memory' in the state of Odd is unknown"):
        balance_(model, optimizer=optimizer)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_an_optimizer_of_another_model_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="an optimizer that holds none of them"):
        balance_(chain(), optimizer=torch.optim.Adam(chain().parameters()))


# --- quantisation -----------------------------------------------------------------------------------


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    data = load_digits()
    x, y = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(data.target)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    return x[:1200], y[:1200], x[1200:], y[1200:]


def trained(x: Tensor, y: Tensor) -> nn.Sequential:
    layers = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()]
    model = nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    random = torch.Generator().manual_seed(1)
    for _ in range(20):
        for rows_of in torch.randperm(len(y), generator=random).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows_of]), y[rows_of]).backward()
            optimizer.step()
    return model


@torch.no_grad()
def unbalance_(model: nn.Sequential) -> None:
    """Scales of 10^-3 … 10^3 per channel between each layer and the next; the function stays."""
    random = torch.Generator().manual_seed(2)
    for first, second, per in ((0, 3, 1), (3, 7, 4), (7, 9, 1)):
        scale = 10 ** (6 * torch.rand(model[first].weight.shape[0], generator=random) - 3)
        model[first].weight.mul_(scale.view(-1, *[1] * (model[first].weight.dim() - 1)))
        model[first].bias.mul_(scale)
        wide = scale.repeat_interleave(per)
        model[second].weight.div_(wide.view(1, -1, *[1] * (model[second].weight.dim() - 2)))


@torch.no_grad()
def quantised(model: nn.Sequential) -> nn.Sequential:
    """Weights on 255 evenly spaced levels per tensor."""
    found = copy.deepcopy(model)
    for module in found:
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            level = module.weight.abs().max() / 127
            module.weight.copy_((module.weight / level).round() * level)
    return found


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return float((model(x).argmax(1) == y).float().mean())


def test_int8_accuracy_is_lost_by_scales_and_regained_by_balance() -> None:
    x, y, x_test, y_test = digits()
    model = trained(x, y)
    full = accuracy(model, x_test, y_test)
    assert full > 0.95
    assert accuracy(quantised(model), x_test, y_test) > full - 0.01
    unbalance_(model)
    assert accuracy(model, x_test, y_test) == pytest.approx(full, abs=0.003)
    lost = accuracy(quantised(model), x_test, y_test)
    balance_(model, example=x_test)
    regained = accuracy(quantised(model), x_test, y_test)
    assert lost < 0.6
    assert regained > full - 0.01
    assert math.isclose(accuracy(model, x_test, y_test), full, abs_tol=0.003)
