from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gonio
from catalog import seeded
from gonio.errors import InvalidArgumentError, NotApplicableError
from gonio.surgery import balance_, equivalent


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


def test_undo_is_bit_exact():
    model = residual()
    before, state = model(X), {k: v.clone() for k, v in model.state_dict().items()}
    balance_(model).undo_()
    assert torch.equal(model(X), before)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


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


def test_sgd_takes_the_step_that_equals_balancing_afterwards():
    """With per-tensor learning rates × s² a step on the balanced net is the balanced step (layer level)."""
    x, y = seeded(16, 12, dtype=torch.float64), seeded(16, 12, seed=1, dtype=torch.float64)
    plain, balanced = relu_chain(3), relu_chain(3)
    before = [w.detach().clone() for w in weights(balanced)]
    balance_(balanced, level="layer")
    factors = [float((w.detach() / b)[0, 0]) for w, b in zip(weights(balanced), before, strict=True)]
    for model in (plain, balanced):
        F.mse_loss(model(x), y).backward()
    with torch.no_grad():
        for a, b, s in zip(weights(plain), weights(balanced), factors, strict=True):
            torch.testing.assert_close(b - 0.1 * s**2 * b.grad, s * (a - 0.1 * a.grad), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_optimizer_state_moves_along(kind):
    x, y = seeded(16, 12, dtype=torch.float64), seeded(16, 12, seed=1, dtype=torch.float64)
    model = relu_chain(3)
    make = {
        "sgd": lambda p: torch.optim.SGD(p, lr=1e-9, momentum=0.9),
        "adam": lambda p: torch.optim.Adam(p, lr=1e-9),
    }
    optimizer = make[kind](model.parameters())
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    weight = model[0].weight
    state = {k: v.clone() for k, v in optimizer.state[weight].items() if torch.is_tensor(v) and v.dim() == 2}
    before = weight.detach().clone()
    edited = balance_(model, optimizer=optimizer)
    factor = weight.detach() / before
    for name, value in state.items():
        power = 2 if name == "exp_avg_sq" else 1
        torch.testing.assert_close(optimizer.state[weight][name], value / factor**power, rtol=1e-9, atol=0)
    edited.undo_()
    assert all(torch.equal(optimizer.state[weight][k], v) for k, v in state.items())


def test_an_unbalanced_network_is_reported_as_waste():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).double()
    with torch.no_grad():
        model[0].weight.mul_(100)
    text = str(balance_(model, example=seeded(2, 4, dtype=torch.float64)))
    assert "was wasted" in text
    assert "largest deviation" in text


def test_another_level_is_refused():
    with pytest.raises(InvalidArgumentError, match='balance_ takes level="neuron" or "layer"; found \'row\''):
        balance_(relu_chain(2), level="row")


def test_a_model_without_a_graph_is_refused():
    class Loop(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    with pytest.raises(NotApplicableError, match="the model cannot be traced"):
        balance_(Loop())


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


def test_equivalent_reports_both_deviations():
    a, b = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        a.weight.fill_(1.0)
        b.weight.fill_(1.5)
    found = gonio.surgery.equivalent(a, b, example=torch.ones(3, 2))
    assert (found.absolute, found.relative) == (1.0, 0.5)
    with pytest.raises(InvalidArgumentError, match="compares two models with outputs of the same shapes"):
        equivalent(a, nn.Linear(2, 2), example=torch.ones(3, 2))
    with pytest.raises(InvalidArgumentError, match="compares finite outputs"):
        equivalent(a, b, example=torch.full((3, 2), float("nan")))
