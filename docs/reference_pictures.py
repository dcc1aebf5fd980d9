"""The pictures of the reference: for each method one figure, computed from the method itself when the site is built."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import gonio
from gonio import init, optim, parametrizations, regularizers
from gonio.nn import angular, magnitude
from gonio.pages import pictures
from gonio.pages.picture import Axis, Line, Picture

DEGREES = [float(degree) for degree in range(2, 180, 2)]
NORMS = [0.05 * i for i in range(1, 61)]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def angle_axis(label: str) -> Axis:
    return Axis(0.0, 180.0, label, ticks=tuple((float(at), str(at)) for at in range(0, 181, 30)))


# --- decoupled layers ------------------------------------------------------------------------------------


def angular_function(kind: Callable[[], Any]) -> Picture:
    return pictures.angular({"": kind()})


def magnitude_function(kind: Callable[..., Any], field: str) -> Picture:
    """A magnitude for three values of its main coefficient."""
    return pictures.magnitude({f"{field} {value:g}": kind(**{field: value}) for value in (0.5, 1.0, 2.0)})


def decoupled(kind: Callable[..., nn.Module], dims: int) -> Picture:
    """The output of one filter over the angle of its input, beside the plain product."""
    options = {"bias": False, "magnitude": magnitude.Tanh(radius_in="absolute"), "angular": angular.Cosine()}
    layer = kind(2, 1, **({"kernel_size": 1} if dims else {}), **options)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1.0, 0.0]).reshape(layer.weight.shape))
    theta = torch.deg2rad(torch.tensor(DEGREES))
    lines = {}
    for norm in (0.5, 1.0, 3.0):
        x = norm * torch.stack([theta.cos(), theta.sin()], 1)
        lines[f"‖x‖ = {norm:g}"] = layer(x.reshape(-1, 2, *[1] * dims)).flatten().tolist()
    lines["plain, ‖x‖ = 3"] = (3.0 * theta.cos()).tolist()
    title = "output of a filter of norm 1 over the angle to its input (tanh magnitude, radius 1)"
    return pictures.curves(DEGREES, lines, x=angle_axis("angle θ [°]"), y="output", title=title)


# --- normalisation ---------------------------------------------------------------------------------------


def switchable(kind: Callable[..., nn.Module], positions: tuple[int, ...]) -> Picture:
    """The norm of the output over a factor on one sample of the batch, for the statistics that the layer mixes."""
    factors = [2.0 ** (i / 4) for i in range(-12, 13)]
    x = torch.randn(4, 6, *positions, generator=seeded())
    lines = {}
    for at, name in ((1, "layer, or instance"), (2, "batch")):  # those of an instance give the same
        layer = kind(6).train()
        with torch.no_grad():
            for weight in (layer.mean_logits, layer.var_logits):
                weight.zero_()[at] = 40.0
        ys = []
        for factor in factors:
            scaled = x.clone()
            scaled[0] *= factor
            ys.append(layer(scaled)[0].square().mean().sqrt().item())
        lines[f"{name} statistics"] = ys
    axis = Axis(factors[0], factors[-1], "factor on one sample of the batch", log=True)
    return pictures.curves(
        factors, lines, x=axis, y="RMS of its output", title="how a sample's scale passes, by statistics"
    )


def qk_norm() -> Picture:
    """The largest logit of a head over a factor on the weights, with and without the norm."""
    factors, x = [2.0 ** (i / 4) for i in range(-4, 13)], torch.randn(16, 32, generator=seeded())
    lines: dict[str, list[float]] = {"nn.Linear": [], "QKNormLinear": []}
    for name, ys in lines.items():
        for factor in factors:
            layer = (
                nn.Linear(32, 64)
                if name == "nn.Linear"
                else gonio.nn.QKNormLinear(32, 64, query=[(0, 32)], key=[(32, 64)])
            )
            with torch.no_grad():
                layer.weight.copy_(factor * torch.randn(64, 32, generator=seeded(1)) / math.sqrt(32))
                layer.bias.zero_()
            q, k = layer(x).chunk(2, dim=1)
            ys.append((q @ k.T / math.sqrt(32)).abs().max().item())
    axis = Axis(factors[0], factors[-1], "factor on the weights of queries and keys", log=True)
    return pictures.curves(
        factors, lines, x=axis, y="largest logit", title="largest logit of a head over the scale of its weights"
    )


# --- parametrizations ------------------------------------------------------------------------------------


def stretched(*shape: int) -> Tensor:
    """A random weight whose filters have norms and a mean of their own."""
    weight = torch.randn(*shape, generator=seeded()) / math.sqrt(math.prod(shape[1:]))
    return weight * torch.linspace(0.5, 2.0, shape[0]).reshape(-1, *[1] * (len(shape) - 1)) + 0.1


def filter_norms(template: Any) -> Picture:
    """The norms of the filters, of the trained tensor and of the weight that the layer uses."""
    layer = nn.Linear(64, 24, bias=False)
    with torch.no_grad():
        layer.weight.copy_(stretched(24, 64))
    before = layer.weight.norm(dim=1).tolist()
    gonio.parametrizations.attach(layer, "weight", template)
    lines = {"trained tensor": before, "weight of the layer": layer.weight.norm(dim=1).tolist()}
    at = [float(i) for i in range(1, 25)]
    return _from_zero(
        pictures.curves(at, lines, x=Axis(1.0, 24.0, "filter", whole=True), y="norm", title="norms of the filters")
    )


def weight_norm() -> Picture:
    """The two factors of a weight over steps of SGD: the norm of v grows, as its gradient is orthogonal to it."""
    layer = nn.Linear(16, 4, bias=False)
    with torch.no_grad():
        layer.weight.copy_(stretched(4, 16))
    held = gonio.parametrizations.attach(layer, "weight", parametrizations.WeightNorm())
    raw = next(p for name, p in layer.named_parameters() if p.shape == (4, 16))
    optimizer, x = torch.optim.SGD(layer.parameters(), lr=1.0), torch.randn(64, 16, generator=seeded(1))
    target = torch.randn(64, 4, generator=seeded(2))
    lines: dict[str, list[float]] = {"‖v‖, the trained tensor": [], "‖w‖ = g, the weight": []}
    for _ in range(41):
        for ys, tensor in zip(lines.values(), (raw, layer.weight), strict=True):
            ys.append(tensor[0].norm().item())
        optimizer.zero_grad()
        (layer(x) - target).square().mean().backward()
        optimizer.step()
    assert held is not None
    steps = [float(i) for i in range(41)]
    title = "norms of one filter over steps of SGD"
    return _from_zero(pictures.curves(steps, lines, x=Axis(0.0, 40.0, "step"), y="norm", title=title))


def singular_values(template: Any, shape: tuple[int, ...] = (24, 64)) -> Picture:
    """The singular values of the trained tensor and of the weight that the layer uses, in increasing order."""
    layer: nn.Module = nn.Linear(shape[1], shape[0], bias=False)
    if len(shape) > 2:
        layer = nn.Conv2d(shape[1], shape[0], shape[2], padding=shape[2] // 2, padding_mode="circular", bias=False)
    with torch.no_grad():
        layer.weight.copy_(stretched(*shape))
    before = _singular(layer.weight)
    gonio.parametrizations.attach(layer, "weight", template)
    layer(torch.randn(2, shape[1], *[8] * (len(shape) - 2), generator=seeded()))
    lines = {"trained tensor": before, "weight of the layer": _singular(layer.weight)}
    shares = [i / (len(before) - 1) for i in range(len(before))]
    of = "the map on feature maps of 8 × 8" if len(shape) > 2 else "the matrix of filters"
    return _from_zero(pictures.curves(shares, lines, x=Axis(0.0, 1.0, "share of the singular values"),
                                      y="singular value", title=f"singular values of {of}"))  # fmt: skip


def _singular(weight: Tensor) -> list[float]:
    """Of a matrix; of a kernel as a circular convolution of 8 × 8 maps, by its Fourier transform."""
    weight = weight.detach().double()
    if weight.ndim > 2:
        weight = torch.fft.fft2(weight, (8, 8)).permute(2, 3, 0, 1)
    return sorted(torch.linalg.svdvals(weight).flatten().tolist())


# --- regularizers ----------------------------------------------------------------------------------------


def over_angle(regularizer: Any, size: int = 0, degrees: Sequence[float] = DEGREES) -> Picture:
    """The value for two filters of norm 1 over the angle between them."""
    theta = torch.deg2rad(torch.tensor(degrees, dtype=torch.float64))
    ys = []
    for angle in theta:
        pair = torch.tensor([[1.0, 0.0], [float(angle.cos()), float(angle.sin())]], dtype=torch.float64)
        ys.append(float(regularizer(pair.reshape(2, 2, *[1] * size))))
    title = "value at strength 1 for two filters of norm 1, over the angle between them"
    return pictures.curves(degrees, {"": ys}, x=angle_axis("angle between the two filters [°]"), y="value", title=title)


def of_outputs(regularizer: Any) -> Picture:
    """The value for the outputs of two filters over the angle between them, for 4,096 normal inputs."""
    x, ys = torch.randn(4096, 2, generator=seeded(), dtype=torch.float64), []
    for degree in DEGREES:
        angle = math.radians(degree)
        pair = torch.tensor([[1.0, 0.0], [math.cos(angle), math.sin(angle)]], dtype=torch.float64)
        ys.append(float(regularizer(x @ pair.T)))
    title = "value at strength 1 for two filters and 4,096 normal inputs, over the angle between the filters"
    return pictures.curves(DEGREES, {"": ys}, x=angle_axis("angle between the two filters [°]"), y="value", title=title)


def over_norm(named: Mapping[str, Any]) -> Picture:
    """The value over the norm of a weight of one direction."""
    direction = nn.functional.normalize(torch.randn(8, 8, generator=seeded(), dtype=torch.float64).flatten(), dim=0)
    lines = {name: [float(each(norm * direction.reshape(8, 8))) for norm in NORMS] for name, each in named.items()}
    title = "value at strength 1 over the norm of the weight"
    return pictures.curves(NORMS, lines, x=Axis(0.0, 3.0, "norm ‖W‖"), y="value", title=title)


def over_steps(schedule: Any, steps: int) -> Picture:
    at = [float(step) for step in range(steps)]
    lines = {"": [schedule.factor(step) for step in range(steps)]}
    title = f"factor of {schedule!r}"
    return _from_zero(pictures.curves(at, lines, x=Axis(0.0, steps - 1.0, "step"), y="factor", title=title))


# --- initialisation and steps ----------------------------------------------------------------------------


def initialised(function: Callable[..., Any], shape: Sequence[int] = (96, 128), **options: Any) -> Picture:
    """The singular values of a layer that the function fills, and those of random weights of the same norm."""
    layer = nn.Linear(shape[1], shape[0]) if len(shape) == 2 else nn.Conv2d(shape[1], shape[0], shape[2])
    function(layer.weight, generator=seeded(), **options)
    row = gonio.measure(nn.Sequential(layer))["0"]
    drawn = pictures.layer_spectrum(row)
    assert drawn is not None
    size = "×".join(map(str, shape))
    return replace(drawn, title=f"singular values of a weight of {size}: {drawn.title}")


def muon() -> Picture:
    """The singular values of a step of Muon beside those of the gradient, each over its largest."""
    weight = nn.Parameter(torch.zeros(32, 64))
    optimizer = optim.Muon([weight], lr=1.0, weight_decay=0.0)
    gradient = torch.randn(32, 8, generator=seeded()) @ torch.randn(8, 64, generator=seeded(1))
    gradient += 0.5 * torch.randn(32, 64, generator=seeded(2))
    weight.grad = gradient.clone()
    optimizer.step()
    found = {"gradient": _singular(gradient), "step of Muon": _singular(weight)}
    lines = {name: [value / values[-1] for value in values] for name, values in found.items()}
    shares = [i / 31 for i in range(32)]
    title = "singular values of the first step, over the largest"
    return _from_zero(pictures.curves(shares, lines, x=Axis(0.0, 1.0, "share of the singular values"),
                                      y="over the largest", title=title))  # fmt: skip


def _from_zero(picture: Picture) -> Picture:
    """The same with a vertical axis from 0 and a margin at the top."""
    top = max(y for mark in picture.marks if isinstance(mark, Line) for y in mark.ys if y is not None)
    return replace(picture, y=replace(picture.y, low=0.0, high=1.08 * top))


Draw = Callable[[], Picture]
# By the public name. What is not here has no picture: results, records, selectors and functions of tensors.
PICTURES: dict[str, Draw] = {
    **{f"gonio.nn.angular.{kind.__name__}": lambda kind=kind: angular_function(kind)
       for kind in (angular.Cosine, angular.Linear, angular.RectifiedCosine, angular.Sigmoid, angular.SquaredCosine)},
    **{f"gonio.nn.magnitude.{kind.__name__}": lambda kind=kind, field=field: magnitude_function(kind, field)
       for kind, field in ((magnitude.Ball, "radius"), (magnitude.Linear, "alpha"), (magnitude.Logarithm, "alpha"),
                           (magnitude.Mixed, "beta"), (magnitude.Segmented, "radius"), (magnitude.Sphere, "alpha"),
                           (magnitude.Tanh, "radius"))},
    **{f"gonio.nn.{kind.__name__}": lambda kind=kind, dims=dims: decoupled(kind, dims)
       for kind, dims in ((gonio.nn.DecoupledLinear, 0), (gonio.nn.DecoupledConv1d, 1), (gonio.nn.DecoupledConv2d, 2),
                          (gonio.nn.DecoupledConv3d, 3), (gonio.nn.DecoupledConvTranspose1d, 1),
                          (gonio.nn.DecoupledConvTranspose2d, 2), (gonio.nn.DecoupledConvTranspose3d, 3))},
    **{f"gonio.nn.{kind.__name__}": lambda kind=kind, size=size: switchable(kind, size)
       for kind, size in ((gonio.nn.SwitchableNorm1d, (16,)), (gonio.nn.SwitchableNorm2d, (4, 4)),
                          (gonio.nn.SwitchableNorm3d, (2, 2, 4)))},
    "gonio.nn.QKNormLinear": qk_norm,
    "gonio.parametrizations.Sphere": lambda: filter_norms(parametrizations.Sphere()),
    "gonio.parametrizations.WeightStandardization": lambda: filter_norms(parametrizations.WeightStandardization()),
    "gonio.parametrizations.WeightNorm": weight_norm,
    "gonio.parametrizations.SpectralNorm": lambda: singular_values(parametrizations.SpectralNorm()),
    "gonio.parametrizations.Orthogonal": lambda: singular_values(parametrizations.Orthogonal()),
    "gonio.parametrizations.OrthogonalConv": lambda: singular_values(parametrizations.OrthogonalConv(), (8, 8, 3, 3)),
    **{f"gonio.regularizers.{kind.__name__}": lambda kind=kind: over_angle(kind(1.0))
       for kind in (regularizers.Orthogonality, regularizers.DoubleOrthogonality, regularizers.MutualCoherence,
                    regularizers.SRIP)},
    "gonio.regularizers.HypersphericalEnergy": lambda: over_angle(
        regularizers.HypersphericalEnergy(1.0), degrees=DEGREES[9:]),  # infinite at 0
    "gonio.regularizers.ConvOrthogonality": lambda: over_angle(regularizers.ConvOrthogonality(1.0), 2),
    "gonio.regularizers.SelfOrthogonality": lambda: of_outputs(regularizers.SelfOrthogonality(1.0)),
    "gonio.regularizers.L2": lambda: over_norm({"": regularizers.L2(1.0)}),
    "gonio.regularizers.NormPower": lambda: over_norm(
        {f"p = {power:g}": regularizers.NormPower(1.0, power=power) for power in (1.0, 1.5, 2.0)}),
    "gonio.regularizers.ScaleShift": lambda: over_norm({"": regularizers.ScaleShift(1.0)}),
    "gonio.regularizers.Warmup": lambda: over_steps(regularizers.Warmup(50), 101),
    "gonio.regularizers.Milestones": lambda: over_steps(regularizers.Milestones((30, 60), (0.3, 0.1)), 101),
    **{f"gonio.init.{function.__name__}": lambda function=function: initialised(function)
       for function in (init.orthogonal_, init.he_, init.lecun_, init.xavier_, init.variance_scaling_)},
    "gonio.init.delta_orthogonal_": lambda: initialised(init.delta_orthogonal_, (64, 64, 3)),
    "gonio.init.mup_": lambda: initialised(init.mup_, base=(32, 32)),
    "gonio.optim.Muon": muon,
}  # fmt: skip
