"""`balance_`: closed forms derived by hand, what pins a scale, optimizers, quantisation."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from catalog import seeded
from foreign import torchvision_resnet18
from gonio.errors import InvalidArgumentError, NotApplicableError
from gonio.surgery import balance_, fold_
from networks import ResNet18, images


def relu_chain(depth=20, width=12):
    """A linear-ReLU chain in float64 with biases and scales spread over six orders of magnitude."""
    layers: list[nn.Module] = []
    for index in range(depth):
        linear = nn.Linear(width, width).double()
        with torch.no_grad():
            linear.weight.copy_(seeded(width, width, seed=index, dtype=torch.float64) * 10 ** ((index % 7) - 3) / 3)
            linear.bias.copy_(seeded(width, seed=100 + index, dtype=torch.float64))
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Residual(nn.Module):
    """Every connection that balance_ claims to understand, in one network."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.conv1 = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.prelu = nn.PReLU(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2, groups=2)
        self.norm = nn.BatchNorm2d(4)
        self.pool = nn.MaxPool2d(2)
        self.drop = nn.Dropout(0.5)
        self.fc1 = nn.Linear(4 * 16, 10)
        self.fc2 = nn.Linear(10, 3)

    def forward(self, x):
        x = F.leaky_relu(self.stem(x))
        x = torch.relu(x + self.conv2(self.prelu(self.conv1(x))))
        x = self.pool(F.relu(self.norm(self.up(x))))
        x = self.drop(torch.flatten(x, 1))
        return self.fc2(F.relu(self.fc1(x)))


def residual():
    torch.manual_seed(0)
    model = Residual().double().eval()
    with torch.no_grad():
        model.stem.weight.mul_(1000)
        model.fc1.weight.mul_(0.01)
        model.norm.running_mean.normal_()
        model.norm.weight.uniform_(0.5, 2)
    return model


X = seeded(5, 3, 4, 4, dtype=torch.float64)


def weights(model):
    return [m.weight for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d, nn.ConvTranspose2d))]


def squares(model):
    return [float(w.detach().square().sum()) for w in weights(model)]


@pytest.mark.parametrize("level", ["layer", "neuron"])
def test_a_chain_keeps_its_function_in_fp64(level):
    model, x = relu_chain(), seeded(7, 12, dtype=torch.float64)
    before = model(x).detach()
    balance_(model, example=x, level=level)
    assert float((model(x).detach() - before).abs().max() / before.abs().max()) <= 1e-12


def test_layer_level_reaches_the_closed_form():
    model = relu_chain()
    before = squares(model)
    geometric = math.exp(sum(map(math.log, before)) / len(before))
    balance_(model, level="layer")
    assert squares(model) == pytest.approx([geometric] * len(before), rel=1e-9)


def test_neuron_level_lowers_the_sum_further_and_balances_rows_against_columns():
    layer, neuron = relu_chain(), relu_chain()
    balance_(layer, level="layer")
    balance_(neuron, level="neuron")
    assert sum(squares(neuron)) < sum(squares(layer))
    for left, right in zip(weights(neuron), weights(neuron)[1:], strict=False):
        torch.testing.assert_close(left.square().sum(1), right.square().sum(0), rtol=1e-9, atol=0)


@pytest.mark.parametrize("level", ["layer", "neuron"])
def test_every_connection_keeps_the_function(level):
    model = residual()
    before, waste = model(X).detach(), sum(squares(model))
    edited = balance_(model, example=X, level=level)
    assert float((model(X).detach() - before).abs().max() / before.abs().max()) <= 1e-12
    assert sum(squares(model)) < waste
    moved = {change.path for change in edited.changes}
    assert moved == {"stem", "conv1", "conv2", "up", "norm", "fc1", "fc2"}


def test_the_residual_stream_is_one_group():
    """stem and conv2 are added, so their rows carry the same factors."""
    model = residual()
    stem, conv2 = model.stem.weight.detach().clone(), model.conv2.weight.detach().clone()
    balance_(model)
    rows_stem = (model.stem.weight / stem)[:, 0, 0, 0]
    columns = (model.conv2.weight / conv2)[:, :, 0, 0]
    torch.testing.assert_close(columns[:, 0] / columns[0, 0], rows_stem / rows_stem[0], rtol=1e-9, atol=0)


@pytest.mark.parametrize("activation", [nn.GELU, nn.SiLU, nn.Softplus, nn.ELU, nn.Tanh])
def test_what_is_not_homogeneous_is_refused_with_the_reason(activation):
    model = nn.Sequential(nn.Linear(3, 3), activation(), nn.Linear(3, 3))
    with pytest.raises(NotApplicableError, match=rf"no scale is free to move: .*{activation.__name__} \(_1\) is not"):
        balance_(model)


class Doubled(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        y = F.relu(self.a(x))
        return self.b(y), torch.tanh(y)


def test_a_tensor_read_by_more_than_the_pair_is_refused():
    with pytest.raises(NotApplicableError, match=r"tanh .* is not positively homogeneous"):
        balance_(Doubled())


def test_linear_layers_on_sequences_flattened_are_left_alone():
    """(N, T, C) flattened puts the channels fastest: scales per channel would hit the wrong features."""

    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Linear(3, 4), nn.Linear(8, 2)

        def forward(self, x):
            return self.head(torch.flatten(F.relu(self.embed(x)), 1))

    with pytest.raises(NotApplicableError, match="head does not read its channels one by one"):
        balance_(Tokens())


def test_tied_and_repeated_layers_are_left_alone():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    with pytest.raises(NotApplicableError, match="shares its weight"):
        balance_(model)
    shared = nn.Linear(3, 3)
    with pytest.raises(NotApplicableError, match="runs more than once"):
        balance_(nn.Sequential(shared, nn.ReLU(), shared))


def test_dead_channels_stay_finite():
    model = relu_chain(3)
    with torch.no_grad():
        model[0].weight[0] = 0
        model[2].weight[:, 1] = 0
    balance_(model)
    assert all(torch.isfinite(w).all() for w in weights(model))


def test_an_unbalanced_network_is_reported_as_waste():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).double()
    with torch.no_grad():
        model[0].weight.mul_(100)
    text = str(balance_(model, example=seeded(2, 4, dtype=torch.float64)))
    assert "was wasted" in text
    assert "largest deviation" in text


def test_a_model_without_a_graph_is_refused():
    class Loop(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    with pytest.raises(NotApplicableError, match="balance_: cannot balance the model: the model cannot be traced"):
        balance_(Loop())
    with pytest.raises(InvalidArgumentError, match='balance_ takes level="neuron" or "layer"; found \'row\''):
        balance_(relu_chain(2), level="row")


# --- whole networks ------------------------------------------------------------------------------------


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


def test_quantisation_is_regained():
    """Scales 10^±3 per channel ruin int8 per-tensor weights; balancing brings them back (DFQ's argument)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)).double()
    x = seeded(256, 8, dtype=torch.float64)
    reference = model(x).detach()
    with torch.no_grad():
        for index in (0, 2):
            scale = 10 ** (6 * torch.rand(64, dtype=torch.float64) - 3)
            model[index].weight.mul_(scale.unsqueeze(1))
            model[index].bias.mul_(scale)
            model[index + 2].weight.div_(scale)

    def error_of_int8(model):
        copy = nn.Sequential(
            *[type(m)(m.in_features, m.out_features) if isinstance(m, nn.Linear) else m for m in model]
        )
        copy.double().load_state_dict(model.state_dict())
        with torch.no_grad():
            for weight in weights(copy):
                step = weight.abs().max() / 127
                weight.copy_((weight / step).round() * step)
        return float((copy(x).detach() - reference).norm() / reference.norm())

    assert float((model(x).detach() - reference).abs().max()) < 1e-9  # the function is the same all along
    unbalanced = error_of_int8(model)
    balance_(model)
    assert error_of_int8(model) < 0.05 < 0.5 < unbalanced
