"""`gonio.certify`: bounds hold on random pairs, equal exact constants, or are refused with the path."""

from __future__ import annotations

import json
from math import sqrt

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gonio
from foreign import timm
from gonio import parametrizations as P
from gonio.errors import InvalidArgumentError, NotApplicableError
from gonio.geometry import layout_of, nonnegative_norm, operator_norm_bound
from gonio.geometry.conv_operator import operator_matrix
from gonio.seeding import generator
from gonio.surgery.facts import _STATED, SLOPES, Facts, register


def _trained(norm):
    """A batch norm with statistics as after training."""
    random = generator(0)
    for tensor, low, high in ((norm.running_var, 0.3, 3.0), (norm.weight.data, -2.0, 2.0), (norm.bias.data, -1.0, 1.0)):
        tensor.uniform_(low, high, generator=random)
    return norm


class Residual(nn.Module):
    def __init__(self, channels=4, act=F.relu):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = _trained(nn.BatchNorm2d(channels))
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.act = act

    def forward(self, x):
        out = self.act(self.bn1(self.conv1(x)))
        out = self.conv2(out)
        out += x
        return out


class Dense(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(7, 5, 3, padding=1)

    def forward(self, x):
        x = torch.cat((x, self.a(x).relu()), 1)
        return torch.cat((x, F.silu(self.b(x))), 1).mean((2, 3))


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(-2, 1, 6).view(1, 6, 1))
        self.shift = nn.Parameter(torch.ones(6, 1))
        self.matrix = nn.Parameter(torch.randn(5, 12, generator=generator(3)))

    def forward(self, x):
        b, c, n = x.shape
        y = (x * self.scale + self.shift).view(b, c, n).transpose(1, 2)
        y = F.max_pool1d(F.pad(y, (1, 1), mode="replicate"), 3, stride=2)
        a, b2 = y.chunk(2, 1)
        z = torch.maximum(a, b2) - 2 * torch.minimum(a, b2) / 3
        z = z.sort(-1)[0].flatten(1)[:, :12]
        return F.linear(F.softplus(z), self.matrix) + F.leaky_relu(-z[:, :5], -1.5)


class Wavy(nn.Module):
    """An activation of the tests' own: sin(3x), with slope 3."""

    def forward(self, x):
        return torch.sin(3 * x)


class MaxMin(nn.Module):
    def forward(self, x):
        a, b = x.chunk(2, 1)
        return torch.cat((torch.maximum(a, b), torch.minimum(a, b)), 1)


def conv(*args, **options):
    return nn.Conv2d(*args, **options)


ARCHITECTURES = {
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 3)), (6,)),
    "mlp-gelu": (lambda: nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 4), nn.Mish(), nn.SELU()), (6,)),
    "mlp-norm": (
        lambda: nn.Sequential(nn.Linear(6, 9), _trained(nn.BatchNorm1d(9)), nn.ELU(1.7), nn.Linear(9, 3)),
        (6,),
    ),
    "softmax": (lambda: nn.Sequential(nn.Linear(6, 9), nn.Hardswish(), nn.Linear(9, 3), nn.Softmax(1)), (6,)),
    "log-softmax": (lambda: nn.Sequential(nn.Linear(6, 3), nn.LogSoftmax(1)), (6,)),
    "stride": (
        lambda: nn.Sequential(conv(3, 5, 3, stride=2), nn.ReLU(), conv(5, 4, 2, stride=2, padding=1)),
        (3, 9, 9),
    ),
    "groups": (
        lambda: nn.Sequential(conv(4, 8, 3, groups=4, padding=1), _trained(nn.BatchNorm2d(8)), conv(8, 4, 1)),
        (4, 6, 6),
    ),
    "dilation": (
        lambda: nn.Sequential(conv(3, 4, 3, dilation=2, padding=2), nn.SiLU(), conv(4, 4, 3, stride=2, dilation=3)),
        (3, 11, 11),
    ),
    "transposed": (
        lambda: nn.Sequential(
            nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2),
            _trained(nn.BatchNorm2d(6)),
            nn.ReLU(),
            nn.ConvTranspose2d(6, 2, 4, stride=2),
        ),
        (4, 5, 5),
    ),
    "padding": (
        lambda: nn.Sequential(
            conv(3, 4, 3, padding=1, padding_mode="circular"),
            nn.ReLU(),
            conv(4, 4, 5, padding=2, padding_mode="reflect"),
            conv(4, 3, 3, stride=2, padding=2, padding_mode="circular"),
            conv(3, 3, 3, padding=1, padding_mode="replicate"),
        ),
        (3, 7, 7),
    ),
    "pooling": (
        lambda: nn.Sequential(
            conv(3, 6, 3),
            nn.MaxPool2d(3, 2, 1),
            nn.AvgPool2d(3, 2, 1),
            nn.Upsample(scale_factor=2),
            nn.AdaptiveMaxPool2d(3),
        ),
        (3, 12, 12),
    ),
    "global": (
        lambda: nn.Sequential(conv(3, 6, 3), nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)),
        (3, 8, 8),
    ),
    "residual": (lambda: nn.Sequential(conv(3, 4, 3), Residual(), nn.ReLU(True), Residual(act=F.gelu)), (3, 7, 7)),
    "dense": (Dense, (3, 6, 6)),
    "functional": (Functional, (6, 8)),
    "maxmin": (lambda: nn.Sequential(nn.Linear(6, 8), MaxMin(), nn.Linear(8, 4), MaxMin()), (6,)),
    "one-dimensional": (lambda: nn.Sequential(nn.Conv1d(2, 4, 5, stride=3), nn.PReLU(4), nn.AvgPool1d(2)), (2, 20)),
    "volume": (lambda: nn.Sequential(nn.Conv3d(2, 3, 3, padding=1), nn.Softsign(), nn.MaxPool3d(2)), (2, 4, 4, 4)),
    "in-place": (lambda: nn.Sequential(nn.ReLU(True), nn.Linear(6, 5), nn.SiLU(True), nn.Hardtanh(inplace=True)), (6,)),
    "shuffled": (lambda: nn.Sequential(conv(3, 8, 3), nn.PixelShuffle(2), nn.Dropout(0.5), nn.Tanhshrink()), (3, 6, 6)),
}


def largest_quotient(network, shape, pairs=1000):
    """Over pairs of random inputs at distances from 1e-3 to 3."""
    random = generator(1)
    x = torch.randn(pairs, *shape, generator=random, dtype=torch.float64)
    size = 10 ** torch.linspace(-3, 0.5, pairs, dtype=torch.float64).view(-1, *[1] * len(shape))
    y = x + size * torch.randn(x.shape, generator=random, dtype=torch.float64)
    with torch.no_grad():
        moved = (network(x.clone()) - network(y.clone())).flatten(1).norm(dim=1)
    return float((moved / (x - y).flatten(1).norm(dim=1)).max())


def made(name):
    build, shape = ARCHITECTURES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return build(), torch.randn(4, *shape), shape


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_no_pair_exceeds_the_upper_bound(name):
    model, x, shape = made(name)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    found = gonio.certify(model, x)
    assert found.lower > 0
    assert found.lower <= found.upper
    assert largest_quotient(found.network, shape) <= found.upper
    assert found.upper < 100 * found.lower  # a vacuous bound would hold as well
    assert model.training
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_a_wrong_constant_is_noticed():
    kept = dict(_STATED)
    try:
        model = nn.Sequential(nn.Linear(3, 1, bias=False), Wavy())
        register(Wavy, Facts(lipschitz=3.0))
        found = gonio.certify(model, torch.zeros(1, 3))
        assert found.lower <= found.upper
        register(Wavy, Facts(lipschitz=0.9))
        with pytest.raises(NotApplicableError, match=r"two inputs show a constant of .* at least, its layers state"):
            gonio.certify(model, torch.zeros(1, 3))
    finally:
        _STATED.clear()
        _STATED.update(kept)


def test_slopes_are_the_largest_ones():
    x = torch.linspace(-20, 20, 400_001, dtype=torch.float64)
    for name, slope in SLOPES.items():
        functions = [getattr(F, name, None) or getattr(torch, name)]
        functions += [lambda x: F.gelu(x, approximate="tanh")] if name == "gelu" else []
        for function in functions:
            point = x.clone().requires_grad_()
            steepest = float(torch.autograd.grad(function(point).sum(), point)[0].abs().max())
            assert steepest <= slope + 1e-12
            assert slope <= 1.001 * steepest + 1e-6, name


# --- exact constants ----------------------------------------------------------------------------------


def test_linear_networks_are_exact():
    x = torch.randn(4, 5, generator=generator(0))
    diagonal = nn.Sequential(*(nn.Linear(5, 5) for _ in range(3)))
    for layer, top in zip(diagonal, (2.0, 3.0, 0.5), strict=True):
        layer.weight.data.copy_(torch.diag(torch.tensor([top, 0.1, 0.1, 0.1, 0.1])))
    for model, exact in (
        (diagonal, 3.0),
        (nn.Linear(5, 9), None),
        (nn.Sequential(nn.Linear(5, 2), nn.Identity()), None),
    ):
        weight = next(model.parameters()).detach()
        exact = exact or float(torch.linalg.matrix_norm(weight.double(), 2))
        found = gonio.certify(model, x, steps=200)
        assert found.upper == pytest.approx(exact, rel=1e-7)
        assert found.lower == pytest.approx(exact, rel=1e-4)
    assert "no layer widens the gap by 1 %" in gonio.certify(diagonal, x, steps=200).sentence()


def test_parametrized_layers_have_the_factor_1():
    torch.manual_seed(0)
    model = nn.Sequential(
        conv(3, 12, 2, stride=2), conv(12, 12, 3, padding=1, padding_mode="circular"), nn.Flatten(), nn.Linear(192, 20)
    )
    gonio.parametrize_(model, P.OrthogonalConv(), where=nn.Conv2d)
    gonio.parametrize_(model, P.Orthogonal(), where=nn.Linear)
    found = gonio.certify(model, torch.randn(2, 3, 8, 8))
    assert [row.factor for row in found.rows] == pytest.approx([1, 1, 1], abs=1e-7)
    assert found.lower == pytest.approx(1, abs=1e-3)
    layer = nn.Sequential(nn.Linear(7, 7))
    gonio.parametrize_(layer, P.SpectralNorm())
    assert gonio.certify(layer, torch.randn(2, 7)).upper == pytest.approx(1, abs=1e-6)


CONVOLUTIONS = [
    nn.Conv2d(2, 3, 3, padding=1),
    nn.Conv2d(4, 4, 3, padding=1, groups=2),
    nn.Conv2d(2, 3, 4, stride=3),
    nn.Conv2d(2, 3, 3, stride=2, dilation=2, padding=2),
    nn.ConvTranspose2d(4, 2, 3, stride=2, groups=2),
    nn.Conv2d(3, 2, 1),
]


@pytest.mark.parametrize("layer", CONVOLUTIONS, ids=repr)
def test_bounds_of_convolutions_are_tight_and_above_explicit_matrices(layer):
    torch.nn.init.normal_(layer.weight, generator=generator(0))
    weight, layout = layer.weight.detach().double(), layout_of(layer)
    bound = operator_norm_bound(weight, layout=layout)
    exact = float(torch.linalg.matrix_norm(operator_matrix(weight, (12, 12), layout), 2))
    assert exact <= bound <= 1.15 * exact


def test_norms_of_averages():
    x = torch.ones(1, 2, 8, 8)
    cases = [(nn.AvgPool2d(2), 0.5), (nn.AvgPool2d(3, 2, 1), 0.504), (nn.AvgPool2d(3, 1, 1), 0.921)]
    cases += [(nn.AdaptiveAvgPool2d(1), 1 / 8), (nn.Upsample(scale_factor=3), 3.0), (nn.Flatten(), 1.0)]
    for layer, norm in cases:
        jacobian = torch.autograd.functional.jacobian(layer, x[:, :1].double()).reshape(-1, 64)
        exact = float(torch.linalg.matrix_norm(jacobian, 2))
        assert exact <= nonnegative_norm(layer, x) <= 1.01 * exact
        assert exact == pytest.approx(norm, abs=1e-3)
    assert nonnegative_norm(nn.Upsample(scale_factor=2, mode="bicubic"), x) == float("inf")
    assert nonnegative_norm(lambda x: F.dropout(x, 0.5), x) == float("inf")


def test_a_map_that_is_constant_or_without_entries_has_the_norm_0():
    x, parameter = torch.ones(3), torch.ones(4, requires_grad=True)
    for constant in (lambda _: torch.ones(4), lambda _: parameter, lambda x: 0 * x):
        assert nonnegative_norm(constant, x) == 0
    assert nonnegative_norm(lambda x: 2 * x, x[:0]) == 0
    for shape in ((0, 3), (3, 0), (0, 3, 2, 2)):
        assert operator_norm_bound(torch.zeros(shape)) == 0


def test_max_pooling_counts_the_windows_with_one_entry():
    for pool, most in ((nn.MaxPool2d(3, 2), 4), (nn.MaxPool2d(2), 1), (nn.MaxPool2d(3, 1, dilation=2), 9)):
        assert gonio.certify(pool, torch.randn(1, 1, 9, 9)).upper == pytest.approx(sqrt(most))


def test_batch_norm_is_merged():
    model = nn.Sequential(conv(3, 4, 3), _trained(nn.BatchNorm2d(4)))
    folded = nn.Sequential(conv(3, 4, 3))
    scale = model[1].weight / (model[1].running_var + model[1].eps).sqrt()
    folded[0].weight.data = model[0].weight.data * scale.data[:, None, None, None]
    x = torch.randn(2, 3, 8, 8)
    merged, plain = gonio.certify(model, x), gonio.certify(folded, x)
    assert merged.upper == pytest.approx(plain.upper, rel=1e-5)
    assert [row.path for row in merged.rows] == ["0 + 1"]
    alone = gonio.certify(model[1], torch.randn(2, 4, 8, 8))
    assert alone.upper == pytest.approx(float(scale.detach().abs().max()), rel=1e-5)


# --- classifiers --------------------------------------------------------------------------------------


def test_the_radius_of_a_linear_classifier_is_exact():
    model, x = nn.Linear(4, 3), torch.randn(50, 4, generator=generator(1))
    found = gonio.certify(model, x)
    radius = found.radius(x)
    logits, weight = model(x).detach().double(), model.weight.detach().double()
    for row, r in zip(logits, radius, strict=True):
        y = int(row.argmax())
        exact = min(float((row[y] - row[j]) / (weight[y] - weight[j]).norm()) for j in range(3) if j != y)
        assert float(r) == pytest.approx(exact, rel=1e-4)
    y = logits.argmax(1)
    shares = [found.certified_accuracy(x, y, eps) for eps in (0.0, 0.3, 100.0)]
    assert shares[0] == 1 > shares[1] > shares[2] == 0
    assert shares[1] == float((radius > 0.3).double().mean())
    assert found.certified_accuracy(x, (y + 1) % 3, 0.0) == 0


@pytest.mark.parametrize("ends_in_a_linear_layer", [True, False])
def test_no_attack_within_the_radius_changes_the_class(ends_in_a_linear_layer):
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 4))
    model = model if ends_in_a_linear_layer else nn.Sequential(*model, nn.Tanh())
    x = torch.randn(60, 5)
    found = gonio.certify(model, x)
    assert (found.head is not None) is ends_in_a_linear_layer
    radius, x = found.radius(x)[:, None], x.double()
    logits = found.network(x).detach()
    best, others = logits.topk(2).indices.unbind(1)
    moved = x.clone().requires_grad_()
    for _ in range(20):
        out = found.network(moved)
        margin = out.gather(1, best[:, None]) - out.gather(1, others[:, None])
        (gradient,) = torch.autograd.grad(margin.sum(), moved)
        moved = (moved - radius * gradient / gradient.norm(dim=1, keepdim=True).clamp(min=1e-9)).detach()
        apart = moved - x
        moved = (x + apart * (radius / apart.norm(dim=1, keepdim=True).clamp(min=1e-9)).clamp(max=1)).requires_grad_()
    assert torch.equal(found.network(moved).argmax(1), best)
    assert not torch.equal(found.network(x + 30 * (moved - x)).argmax(1), best)  # the attack is one


# --- refusals and output ------------------------------------------------------------------------------


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return x * torch.sigmoid(self.fc(x))


class Attention(nn.Module):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)


class Branching(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


class Item(nn.Module):
    def forward(self, x):
        return x + x.argmax(1, keepdim=True)


class TwoInputs(nn.Module):
    def forward(self, x, y):
        return x + y


class Mean(nn.Module):
    def forward(self, x):
        return x.mean()


class ReadTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        y = self.fc(x)
        return F.silu(y, inplace=True) + y


UNBOUNDED = [
    (nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), r"cannot bound layer '1' \(LayerNorm\): its slope .* 316"),
    (nn.Sequential(Gated()), r"cannot bound layer '0.mul' \(mul\): a product of two activations"),
    (Attention(), r"cannot bound layer 'scaled_dot_product_attention' .*no global Lipschitz constant"),
    (Branching(), "cannot bound the model: it cannot be traced"),
    (nn.Sequential(nn.Linear(4, 4), nn.Sequential(Branching())), r"cannot bound layer '1.0': it cannot be traced"),
    (Item(), r"'argmax' \(argmax\): it computes values that are not in floating point"),
    (ReadTwice(), "changes its input in place, which is read elsewhere too"),
    (nn.Sequential(nn.Softplus(threshold=1)), r"layer '0' \(Softplus\)"),
    (nn.Sequential(nn.GLU(1)), r"layer '0' \(GLU\): no Lipschitz constant is known for GLU"),
    (nn.Sequential(nn.Linear(4, 4), Wavy(), nn.Hardshrink()), r"layer '2' \(Hardshrink\)"),
    (TwoInputs(), "cannot bound the model: it takes 2 inputs"),
]


@pytest.mark.parametrize(("model", "match"), UNBOUNDED, ids=[match[:40] for _, match in UNBOUNDED])
def test_what_cannot_be_bounded_is_refused_by_path(model, match):
    with pytest.raises(NotApplicableError, match=match):
        gonio.certify(model, torch.randn(2, 4, 4) if isinstance(model, Attention) else torch.randn(2, 4))


def test_hooks_and_other_graphs_are_refused():
    model = nn.Sequential(nn.Linear(4, 4))
    handle = model[0].register_forward_hook(lambda module, inputs, output: 3 * output)
    with pytest.raises(NotApplicableError, match=r"layer '0' .*forward hooks"):
        gonio.certify(model, torch.randn(2, 4))
    handle.remove()
    model.register_forward_hook(lambda module, inputs, output: 3 * output)
    with pytest.raises(NotApplicableError, match=r"its traced graph has another output"):
        gonio.certify(model, torch.randn(2, 4))


def test_wrong_arguments():
    model = nn.Linear(4, 1)
    with pytest.raises(
        InvalidArgumentError, match=r"certify\(\) needs a batch of inputs in floating point; found Tensor"
    ):
        gonio.certify(model, torch.zeros(2, 4, dtype=torch.long))
    with pytest.raises(InvalidArgumentError, match=r"needs outputs for each example; found outputs of shapes \[\(\)\]"):
        gonio.certify(Mean(), torch.zeros(2, 4))
    with pytest.raises(InvalidArgumentError, match="steps >= 1; found 0"):
        gonio.certify(model, torch.zeros(2, 4), steps=0)
    found = gonio.certify(model, torch.randn(2, 4))
    with pytest.raises(InvalidArgumentError, match=r"needs outputs \(n, classes\); found an output of shape \(2, 1\)"):
        found.radius(torch.randn(2, 4))
    with pytest.raises(InvalidArgumentError, match="eps >= 0; found -1"):
        found.certified_accuracy(torch.randn(2, 4), torch.zeros(2), -1)
    with pytest.raises(InvalidArgumentError, match=r"operator_norm_bound\(\) needs finite entries; found 4 of 4 NaN"):
        operator_norm_bound(torch.full((2, 2), float("nan")))


def test_table_and_data():
    model, x, _ = made("residual")
    found = gonio.certify(model, x)
    assert "1.conv1 + 1.bn1" in str(found)
    assert "The Lipschitz constant is between" in str(found)
    assert [row.path for row in found.rows][-1] == "3.add_1"
    data = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert data["upper"] == found.upper
    assert data["rows"][0]["path"] == "0"
    worst = max(found.rows, key=lambda row: row.widens)
    assert worst.path in found.sentence()
    assert found.slack == pytest.approx(found.rows[-1].slack, rel=0.01)
    again = gonio.certify(model, x)
    assert again.to_dict() == found.to_dict()


def test_a_network_that_ignores_its_input():
    model = nn.Linear(3, 2)
    nn.init.zeros_(model.weight)
    found = gonio.certify(model, torch.randn(2, 3))
    assert (found.upper, found.lower, found.slack) == (0, 0, 1)


# --- timm ---------------------------------------------------------------------------------------------

BOUNDED = ("densenet121", "mobilenetv1_100", "mobilenetv2_050", "nf_resnet26", "regnetx_002", "resnext26ts")
REFUSED = {
    "mobilenetv3_small_050": "'blocks.0.0.se.mul'",
    "regnety_002": "'s1.b1.se.mul'",
    "lcnet_035": "'blocks.5.0.se.mul'",
    "vgg11": "cannot be traced",
    "mixer_s32_224": "'blocks.0.norm1'",
    "vit_tiny_patch16_224": "'blocks.0.norm1'",
    "convnext_atto": "'stem.1'",
    "poolformer_s12": "'stages.0.blocks.0.norm1'",
    "ghostnet_050": "'blocks.3.0.se.mul'",
    "xcit_nano_12_p16_224": "'blocks.0.norm1'",
    "resmlp_12_224": "'blocks.0.norm1'",
    "levit_128s": "'stages.0.blocks.0.attn'",
    "edgenext_xx_small": "'stem.1'",
    "hardcorenas_a": "'blocks.1.1.se.mul'",
}


# Layers of timm with a forward of their own, and the shape of their input.
OF_TIMM = {
    "Linear": (lambda layers: layers.Linear(6, 5), (6,)),
    "Conv2dSame": (lambda layers: layers.Conv2dSame(2, 3, 3, stride=2), (2, 7, 8)),
    "StdConv2d": (lambda layers: layers.StdConv2d(2, 3, 3, padding=1, eps=1e-2), (2, 6, 6)),
    "StdConv2dSame": (lambda layers: layers.StdConv2dSame(2, 3, 3, stride=2), (2, 6, 6)),
    "ScaledStdConv2d": (lambda layers: layers.ScaledStdConv2d(2, 3, 3, padding=1, gamma=1.7), (2, 6, 6)),
    "ScaledStdConv2dSame": (lambda layers: layers.ScaledStdConv2dSame(2, 3, 3, stride=2), (2, 6, 6)),
    "LayerScale": (lambda layers: layers.LayerScale(4), (3, 4)),
    "LayerScale2d": (lambda layers: layers.LayerScale2d(3, inplace=True), (3, 4, 4)),
    "BlurPool2d": (lambda layers: layers.BlurPool2d(3), (3, 8, 8)),
}


@pytest.mark.parametrize("name", OF_TIMM)
def test_layers_of_timm_that_have_their_own_forward_are_bounded_tightly(name):
    layers = timm().layers
    build, shape = OF_TIMM[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = build(layers).double()
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter)
    x = torch.randn(1, *shape, dtype=torch.float64)
    matrix = torch.autograd.functional.jacobian(lambda x: layer(x.clone()), x).reshape(-1, x.numel())
    exact = float(torch.linalg.matrix_norm(matrix, 2))
    found = gonio.certify(nn.Sequential(layer), x)
    assert exact <= found.upper <= 1.25 * exact


class Scale(nn.Module):
    """Vectors as its only parameters: a leaf of the graph, whose own forward is looked into."""

    def __init__(self, offset=0.0, inplace=False):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([[0.5, -3.0, 2.0, 1.0]]))
        self.offset, self.change_in_place = offset, inplace

    def forward(self, x):
        return x.mul_(self.scale) if self.change_in_place else self.scale * x + self.offset


class Normalised(Scale):
    def forward(self, x):
        return self.scale * x / x.square().mean(-1, keepdim=True).add(1e-6).sqrt()


def test_layers_of_unknown_type_are_bounded_by_what_their_forward_calls():
    x = torch.randn(3, 4)
    assert gonio.certify(nn.Sequential(nn.Linear(4, 4), Scale(2.0)), x).rows[-1].factor == pytest.approx(3, rel=1e-6)
    for refused in (Normalised(), Scale(inplace=True)):
        with pytest.raises(NotApplicableError, match=rf"layer '1' \({type(refused).__name__}\): no Lipschitz constant"):
            gonio.certify(nn.Sequential(nn.Linear(4, 4), refused), x)
    doubled = type("Doubled", (nn.Linear,), {"forward": lambda self, x: 2 * F.linear(x, self.weight, self.bias)})(4, 3)
    exact = 2 * float(torch.linalg.matrix_norm(doubled.weight.detach(), 2))
    assert gonio.certify(nn.Sequential(doubled), x).upper == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("name", [name for name in OF_TIMM if "Conv" in name])
def test_a_subclass_with_another_forward_is_not_taken_for_its_parent(name):
    build, shape = OF_TIMM[name]
    layer = build(timm().layers).double()
    kind = type(layer)
    layer.__class__ = type("Doubled", (kind,), {"forward": lambda self, x: 2 * kind.forward(self, x)})
    with pytest.raises(NotApplicableError, match=r"layer '0' \(Doubled\): no Lipschitz constant is known for Doubled"):
        gonio.certify(nn.Sequential(layer), torch.randn(1, *shape))


_QUICK = ("mobilenetv2_050", "mobilenetv3_small_050", "mixer_s32_224", "convnext_atto")


@pytest.mark.parametrize(
    "name", [name if name in _QUICK else pytest.param(name, marks=pytest.mark.slow) for name in (*BOUNDED, *REFUSED)]
)
def test_timm_models_are_bounded_or_refused_by_name(name):
    library = timm()
    if not library.list_models(name):
        pytest.skip(f"timm has no {name}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = library.create_model(name, num_classes=10)
    x = torch.randn(1, *model.pretrained_cfg["input_size"], generator=generator(0))
    x = x if name.endswith("224") or name == "levit_128s" else x[..., :64, :64]
    if name in BOUNDED:
        found = gonio.certify(model, x, steps=4)
        assert 0 < found.lower <= found.upper < float("inf")
    else:
        with pytest.raises(NotApplicableError, match=rf"^certify: cannot bound .*{REFUSED[name]}"):
            gonio.certify(model, x, steps=4)


def test_a_batch_of_a_loader_is_taken_and_sparse_weights_are_refused() -> None:
    model, x = nn.Linear(4, 3), torch.randn(2, 4)
    for batch in ([x, torch.zeros(2)], (x, torch.zeros(2))):
        assert gonio.certify(model, batch).upper == gonio.certify(model, x).upper
    model.weight = nn.Parameter(torch.eye(3, 4).to_sparse(), requires_grad=False)
    with pytest.raises(NotApplicableError, match="its weight is stored as sparse_coo"):
        gonio.certify(nn.Sequential(model), x)


def test_a_model_that_changes_in_place_what_its_backward_needs_is_refused_in_words() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.relu(self.a(x))
            y *= 2
            return self.b(y)

    with pytest.raises(NotApplicableError, match=r"found by gradients, and it has none .*modified by an inplace"):
        gonio.certify(InPlace(), torch.randn(4, 6))


class Of(nn.Module):
    """A function of the input and a weight."""

    def __init__(self, function):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.tensor([[3.0, 0.0], [0.0, 4.0]]))

    def forward(self, x):
        return self.function(x, self.weight)


@pytest.mark.parametrize(
    ("function", "bound"),
    [
        (lambda x, w: F.linear(x, weight=w), 4.0),
        (lambda x, w: torch.matmul(x, other=w), 4.0),
        (lambda x, w: torch.softmax(x, 1, torch.float64), 0.5),
        (lambda x, w: F.log_softmax(x, 1, 3), sqrt(2)),
    ],
)
def test_arguments_of_functions_are_read_by_place_and_by_name(function, bound):
    certificate = gonio.certify(Of(function), generator_input())
    assert certificate.upper == pytest.approx(bound, rel=1e-6)


def generator_input():
    return torch.randn(3, 2, generator=generator(0))


@pytest.mark.parametrize("model", [nn.CELU(alpha=-1.0), Of(lambda x, w: F.celu(x, -1.0))])
def test_a_celu_whose_slope_has_no_limit_is_refused_for_inputs_that_do_not_show_it(model):
    with pytest.raises(NotApplicableError, match=r"no Lipschitz constant is known for CELU"):
        gonio.certify(model, generator_input().abs() + 1)
    assert gonio.certify(nn.CELU(alpha=0.5), generator_input()).upper == pytest.approx(1)


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_a_network_with_outputs_that_are_not_finite_has_no_bounds(factor):
    with pytest.raises(NotApplicableError, match=r"its outputs at the examples are not finite"):
        gonio.certify(Of(lambda x, w: x * factor), generator_input())
