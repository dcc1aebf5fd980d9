"""The catalogue: every member of the library with one valid construction.

The law tests in `tests/laws/` loop over these lists, so a new method enters by adding one entry and
inherits every law that applies to its kind (DESIGN, "Laws").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from gonio import init, optim
from gonio import nn as gnn
from gonio import parametrizations as P
from gonio import regularizers as R
from gonio import surgery as S
from gonio.recipes import Recipe
from references import decoupled as ref_decoupled
from references import parametrizations as ref_P
from references import regularizers as ref_R
from references import switchable_norm as ref_switchable

# A changed copy of a layer and of its input; must not change the ones that it is given.
LayerChange = Callable[[nn.Module, Tensor], tuple[nn.Module, Tensor]]
TensorChange = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class LayerCase:
    """A layer of `gonio.nn`."""

    name: str
    make: Callable[[], nn.Module]  # float32, CPU, training mode
    shape: tuple[int, ...]  # of one valid input, batch first
    reference: Callable[[nn.Module, Tensor], Tensor]  # float64 oracle; reads the float64 layer's parameters
    invariances: Mapping[str, LayerChange] = field(default_factory=dict)  # by name; the output must be equal
    sensitivities: Mapping[str, LayerChange] = field(default_factory=dict)  # by name; the output must differ
    channels_last: bool = False  # 4-D input whose memory format must survive
    couples_batch: bool = False  # training output of one sample depends on the others
    halves: bool = True  # documented for bfloat16 and float16 parameters and inputs


@dataclass(frozen=True, kw_only=True)
class RegularizerCase:
    """A member of `gonio.regularizers`."""

    name: str
    make: Callable[[], Any]  # the regularizer, strength 1
    shape: tuple[int, ...]  # of a weight, or of layer outputs
    reference: Callable[[Tensor], Tensor]  # float64 value at strength 1
    reads: str = "weight"  # or "outputs"
    invariances: Mapping[str, TensorChange] = field(default_factory=dict)
    sensitivities: Mapping[str, TensorChange] = field(default_factory=dict)
    zero_at: Callable[[], Tensor] | None = None  # a float64 input at which the value is 0
    smooth: bool = True  # gradcheck applies at a random point
    halves: bool = True  # documented for bfloat16 and float16 inputs
    long_to_compile: bool = False  # unrolls many steps: its compilation is a slow test


@dataclass(frozen=True, kw_only=True)
class ParametrizationCase:
    """A member of `gonio.parametrizations`."""

    name: str
    make: Callable[[], Any]
    layer: Callable[[], nn.Module]  # the layer whose `weight` it is put on
    reference: Callable[[nn.Module, Tensor], Tensor]  # (layer, raw float64 weight) -> effective weight
    keeps_weight: bool = False  # binding to any weight leaves the effective weight as it was


@dataclass(frozen=True, kw_only=True)
class InitCase:
    """A member of `gonio.init`: `function(weight, layout=…, generator=…)`."""

    name: str
    function: Callable[..., Tensor]
    shape: tuple[int, ...]
    # asserts the property on a float64 copy; the dtype is the one that was initialised, for `tolerances`
    check: Callable[[Tensor, torch.dtype], None]
    options: Mapping[str, Any] = field(default_factory=dict)  # further keywords of `function`
    random: bool = True  # another generator gives another tensor


@dataclass(frozen=True, kw_only=True)
class VerbCase:
    """A verb of `gonio` applied to a model."""

    name: str
    model: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]
    apply: Callable[[nn.Module], Any]  # returns an Edited
    keeps_function: bool = False
    idempotent: bool = False  # a second application is allowed and changes nothing new


LAYERS: list[LayerCase] = []
REGULARIZERS: list[RegularizerCase] = []
PARAMETRIZATIONS: list[ParametrizationCase] = []
INITS: list[InitCase] = []
VERBS: list[VerbCase] = []


def seeded(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers that depend on `shape` and `seed` alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# --- layers ---------------------------------------------------------------------------------------


def _filters_scaled(layer: nn.Module, x: Tensor) -> tuple[nn.Module, Tensor]:
    """Every filter times 3; all filters alike, so that it also holds for transposed convolutions."""
    with torch.no_grad():
        layer.weight.mul_(3)
    return layer, x


def _filters_flipped(layer: nn.Module, x: Tensor) -> tuple[nn.Module, Tensor]:
    with torch.no_grad():
        layer.weight.neg_()
    return layer, x


def _input_doubled(layer: nn.Module, x: Tensor) -> tuple[nn.Module, Tensor]:
    return layer, 2 * x


def _samples_swapped(layer: nn.Module, x: Tensor) -> tuple[nn.Module, Tensor]:
    """The last sample replaced by the first: with batch statistics the others notice."""
    return layer, torch.cat([x[:-1], x[:1]])


_SCALINGS: Mapping[str, LayerChange] = {"filters scaled": _filters_scaled, "input doubled": _input_doubled}
_SIGNS: Mapping[str, LayerChange] = {"filters flipped": _filters_flipped}
_BOTH_FLIPPED: Mapping[str, LayerChange] = {"filters and input flipped": lambda f, x: _filters_flipped(f, -x)}


def _decoupled(
    name: str,
    make: Callable[[], nn.Module],
    *shape: int,
    keeps: Sequence[str] = ("filters scaled",),
) -> LayerCase:
    """A decoupled layer; `keeps` names the scalings that leave its output as it is. All others change it."""
    return LayerCase(
        name=name,
        make=make,
        shape=shape,
        reference=ref_decoupled.decoupled,
        invariances={name: change for name, change in _SCALINGS.items() if name in keeps} | _BOTH_FLIPPED,
        sensitivities={name: change for name, change in _SCALINGS.items() if name not in keeps} | _SIGNS,
        channels_last=len(shape) == 4,
        couples_batch=getattr(make().operator.magnitude, "radius_in", "absolute") == "mean_norm",
    )


def _switchable(name: str, make: Callable[[], nn.Module], *shape: int, couples: bool = True) -> LayerCase:
    return LayerCase(
        name=name,
        make=make,
        shape=shape,
        reference=ref_switchable.switchable_norm,
        invariances={"input shifted": lambda f, x: (f, x + 5), **({} if couples else _ALONE)},
        sensitivities={"last sample replaced": _samples_swapped},
        channels_last=len(shape) == 4,
        couples_batch=couples,
    )


class _Each(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.layer(row) for row in x.split(1)])


_ALONE: Mapping[str, LayerChange] = {"each sample alone": lambda f, x: (_Each(f), x)}

LAYERS += [
    _decoupled(
        "DecoupledLinear",
        lambda: gnn.DecoupledLinear(5, 4),
        *(3, 5),
        keeps=tuple(_SCALINGS),  # the radius is measured in mean norms, so it doubles too
    ),
    _decoupled(
        "DecoupledLinear, linear in the angle, tanh of both norms",
        lambda: gnn.DecoupledLinear(
            5,
            4,
            magnitude=gnn.magnitude.Tanh(radius=2.0, radius_in="absolute"),
            angular=gnn.angular.Linear(),
            weighted="tanh_each",
        ),
        *(3, 5),
        keeps=(),
    ),
    _decoupled(
        "DecoupledConv1d, logarithm, sigmoid",
        lambda: gnn.DecoupledConv1d(
            4,
            6,
            3,
            padding=1,
            padding_mode="circular",
            magnitude=gnn.magnitude.Logarithm(alpha=1.5),
            angular=gnn.angular.Sigmoid(),
        ),
        *(2, 4, 7),
    ),
    _decoupled(
        "DecoupledConv2d, groups, stride, dilation",
        lambda: gnn.DecoupledConv2d(4, 6, 3, stride=2, padding=2, dilation=2, groups=2),
        *(2, 4, 7, 6),
        keeps=tuple(_SCALINGS),
    ),
    _decoupled(
        "DecoupledConv2d, learned ball, uneven padding",
        lambda: gnn.DecoupledConv2d(
            3,
            4,
            2,
            padding="same",
            bias=False,
            magnitude=gnn.magnitude.Ball(radius=2.0, learn_radius=True, radius_in="absolute"),
        ),
        *(2, 3, 5, 5),
    ),
    _decoupled(
        "DecoupledConv2d, sphere, linear in the angle",
        lambda: gnn.DecoupledConv2d(3, 4, 3, magnitude=gnn.magnitude.Sphere(alpha=2.0), angular=gnn.angular.Linear()),
        *(2, 3, 5, 5),
        keeps=tuple(_SCALINGS),
    ),
    _decoupled(
        "DecoupledConv2d, all learned, squared cosine, weighted",
        lambda: gnn.DecoupledConv2d(
            3,
            4,
            3,
            padding=1,
            padding_mode="reflect",
            magnitude=gnn.magnitude.Segmented(learn_radius=True, learn_alpha=True, learn_beta=True),
            angular=gnn.angular.SquaredCosine(),
            weighted="linear",
        ),
        *(2, 3, 5, 4),
        keeps=(),
    ),
    _decoupled(
        "DecoupledConv2d, convolution with ReLU",
        lambda: gnn.DecoupledConv2d(
            *(3, 4, 3),
            padding=1,
            bias=False,
            magnitude=gnn.magnitude.Linear(),
            angular=gnn.angular.RectifiedCosine(),
            weighted="linear",
        ),
        *(2, 3, 5, 4),
        keeps=(),
    ),
    _decoupled(
        "DecoupledConv2d, depthwise, tanh of the product",
        lambda: gnn.DecoupledConv2d(4, 4, 3, padding=1, groups=4, weighted="tanh_product"),
        *(2, 4, 5, 5),
        keeps=("input doubled",),
    ),
    _decoupled(
        "DecoupledConv2d, unit filters",
        lambda: gnn.DecoupledConv2d(3, 4, 3, magnitude=gnn.magnitude.Linear(alpha=0.5, learn_alpha=True)),
        *(2, 3, 5, 5),
    ),
    _decoupled(
        "DecoupledConv3d, mixed",
        lambda: gnn.DecoupledConv3d(2, 3, 2, magnitude=gnn.magnitude.Mixed()),
        *(2, 2, 3, 4, 3),
    ),
    _decoupled(
        "DecoupledConvTranspose1d, ball",
        lambda: gnn.DecoupledConvTranspose1d(
            4, 6, 4, stride=3, groups=2, magnitude=gnn.magnitude.Ball(), angular=gnn.angular.SquaredCosine()
        ),
        *(2, 4, 5),
        keeps=tuple(_SCALINGS),
    ),
    _decoupled(
        "DecoupledConvTranspose2d, weighted",
        lambda: gnn.DecoupledConvTranspose2d(3, 4, 3, stride=2, padding=1, output_padding=1, weighted="linear"),
        *(2, 3, 3, 4),
        keeps=("input doubled",),
    ),
    _decoupled(
        "DecoupledConvTranspose3d, sphere",
        lambda: gnn.DecoupledConvTranspose3d(2, 3, 2, magnitude=gnn.magnitude.Sphere()),
        *(2, 2, 2, 3, 2),
        keeps=tuple(_SCALINGS),
    ),
    _switchable("SwitchableNorm1d", lambda: gnn.SwitchableNorm1d(4), 5, 4),
    _switchable("SwitchableNorm2d", lambda: gnn.SwitchableNorm2d(3), 4, 3, 4, 3),
    _switchable(
        "SwitchableNorm2d without batch statistics",
        lambda: gnn.SwitchableNorm2d(3, use_batch=False),
        *(2, 3, 4, 4),
        couples=False,
    ),
    _switchable("SwitchableNorm3d", lambda: gnn.SwitchableNorm3d(3, affine=False, momentum=None), 2, 3, 2, 2, 3),
]

# --- regularizers ---------------------------------------------------------------------------------


def _rotated(x: Tensor) -> Tensor:
    """The input space rotated: every filter multiplied by one orthogonal matrix."""
    flat = x.flatten(1)
    return (flat @ torch.linalg.qr(seeded(flat.shape[1], flat.shape[1], seed=3, dtype=x.dtype))[0]).view_as(x)


def _rescaled(x: Tensor) -> Tensor:
    """Each filter times a positive number of its own."""
    return x * (0.5 + torch.arange(len(x), dtype=x.dtype)).view(-1, *[1] * (x.ndim - 1))


_PERMUTED: Mapping[str, TensorChange] = {
    "filters in another order": lambda x: x.roll(1, 0),
    "a filter flipped": lambda x: torch.cat([-x[:1], x[1:]]),
}
_TURNED: Mapping[str, TensorChange] = {**_PERMUTED, "input space rotated": _rotated}
_SCALES: Mapping[str, TensorChange] = {"filters rescaled": _rescaled, "all of it doubled": lambda x: 2 * x}
_SHEARED: Mapping[str, TensorChange] = {"a filter leant on the next": lambda x: torch.cat([x[:1] + x[1:2], x[1:]])}
_ORTHONORMAL = torch.eye(4, 6, dtype=torch.float64)
_SHIFTS = torch.zeros(2, 2, 3, 3, dtype=torch.float64).index_put_(
    (torch.arange(2), torch.arange(2), torch.tensor([0, 2]), torch.tensor([1, 1])), torch.ones(2, dtype=torch.float64)
)


def _penalty(
    name: str,
    make: Callable[[], Any],
    shape: tuple[int, ...],
    reference: Callable[[Tensor], Tensor],
    zero_at: Tensor | None = None,
    *,
    invariances: Mapping[str, TensorChange] = _TURNED,
    sensitivities: Mapping[str, TensorChange] = _SCALES,
    long_to_compile: bool = False,
) -> RegularizerCase:
    """A penalty of a weight; the defaults are the changes of one that reads lengths and angles."""
    return RegularizerCase(
        name=name,
        make=make,
        shape=shape,
        reference=reference,
        zero_at=None if zero_at is None else lambda: zero_at,
        invariances=invariances,
        sensitivities=sensitivities,
        long_to_compile=long_to_compile,
    )


_ANY_LENGTH = {**_TURNED, "filters rescaled": _rescaled}
_ALIKE: Mapping[str, TensorChange] = {"two filters alike": lambda x: torch.cat([x[1:2], x[1:]])}

REGULARIZERS += [
    _penalty("L2", lambda: R.L2(1.0), (4, 6), ref_R.half_squared_norm, torch.zeros(4, 6, dtype=torch.float64)),
    *(
        _penalty(
            f"NormPower {power}",
            lambda power=power: R.NormPower(1.0, power=power),
            (4, 6),
            partial(ref_R.norm_power, power=power),
            torch.zeros(4, 6, dtype=torch.float64),
        )
        for power in (1.0, 1.5)
    ),
    _penalty("Orthogonality 4x6", lambda: R.Orthogonality(1.0), (4, 6), ref_R.orthogonality, _ORTHONORMAL),
    _penalty(
        *("Orthogonality 6x4", lambda: R.Orthogonality(1.0), (6, 4), ref_R.orthogonality, _ORTHONORMAL),
        invariances={"input space rotated": _rotated},
    ),
    *(
        _penalty(
            f"Orthogonality off the diagonal {rows}x{cols}",
            lambda: R.Orthogonality(1.0, diagonal=False),
            *((rows, cols), ref_R.off_diagonal, 3 * _ORTHONORMAL),
        )
        for rows, cols in ((4, 6), (6, 4))
    ),
    _penalty(
        "Orthogonality of unit filters",
        lambda: R.Orthogonality(1.0, filters="unit"),
        *((4, 6), ref_R.squared_cosines, 3 * _ORTHONORMAL),
        invariances=_ANY_LENGTH,
        sensitivities=_SHEARED,
    ),
    _penalty("Orthogonality of a convolution", lambda: R.Orthogonality(1.0), (4, 3, 3, 3), ref_R.orthogonality),
    _penalty(
        "DoubleOrthogonality",
        lambda: R.DoubleOrthogonality(1.0),
        *((4, 6), ref_R.double_orthogonality, torch.eye(4, dtype=torch.float64)),
    ),
    _penalty("MutualCoherence", lambda: R.MutualCoherence(1.0), (4, 6), ref_R.worst_entry, _ORTHONORMAL),
    _penalty(
        "MutualCoherence of unit filters",
        lambda: R.MutualCoherence(1.0, filters="unit"),
        *((6, 4), ref_R.worst_cosine, 3 * _ORTHONORMAL),
        invariances=_ANY_LENGTH,
        sensitivities=_ALIKE,
    ),
    _penalty(
        "SRIP",
        lambda: R.SRIP(1.0, iterations=100),
        *((3, 5), ref_R.spectral_defect, _ORTHONORMAL),
        long_to_compile=True,
    ),
    *(
        RegularizerCase(
            name=f"HypersphericalEnergy s={power} {distance}{' half-space' * half}",
            make=lambda p=power, d=distance, h=half: R.HypersphericalEnergy(1.0, power=p, distance=d, half_space=h),
            shape=(4, 6),
            reference=lambda w, p=power, d=distance, h=half: ref_R.energy(w, p, angle=d == "angle", half_space=h),
            invariances={
                "filters in another order": lambda x: x.roll(1, 0),
                "input space rotated": _rotated,
                "filters rescaled": _rescaled,
                **({"a filter flipped": _PERMUTED["a filter flipped"]} if half else {}),
            },
            sensitivities={**_SHEARED, **({} if half else {"a filter flipped": _PERMUTED["a filter flipped"]})},
        )
        for power, distance, half in (
            (0, "chord", False),
            (1, "chord", True),
            (2, "chord", False),
            (0, "angle", True),
            (1, "angle", False),
            (2, "angle", False),
        )
    ),
    _penalty(
        "ConvOrthogonality",
        lambda: R.ConvOrthogonality(1.0),
        *((2, 2, 3, 3), ref_R.conv_orthogonality, _SHIFTS),
        invariances=_PERMUTED,
        sensitivities={**_SCALES, "input space rotated": _rotated},
    ),
    _penalty(
        "ScaleShift",
        lambda: R.ScaleShift(1.0, floor=0.1),
        *((4, 6), lambda w: ref_R.log_norm(w, 0.1), _ORTHONORMAL / 2),
    ),
    *(
        RegularizerCase(
            name=f"SelfOrthogonality {name}",
            reads="outputs",
            make=make,
            shape=shape,
            reference=reference,
            invariances={
                "samples in another order": lambda y: y.flip(0),
                "filters in another order": lambda y: y.roll(1, 1),
                **({} if "paper" in name else {"a constant added to a filter's outputs": lambda y: y + 3}),
            },
            sensitivities={
                "an output leant on the next": lambda y: torch.cat([y[:, :1] + y[:, 1:2], y[:, 1:]], 1),
                **({"a constant added to outputs": lambda y: y + 3} if "paper" in name else {}),
            },
        )
        for name, make, shape, reference in (
            ("", lambda: R.SelfOrthogonality(1.0), (12, 5), ref_R.self_orthogonality),
            ("of a convolution", lambda: R.SelfOrthogonality(1.0), (3, 4, 3, 2), ref_R.self_orthogonality),
            ("wide", lambda: R.SelfOrthogonality(1.0), (5, 8), ref_R.self_orthogonality),
            (
                "paper",
                R.SelfOrthogonality.paper,
                (12, 5),
                lambda y: ref_R.self_orthogonality(y, center=False, total=True),
            ),
        )
    ),
]

# --- parametrizations -----------------------------------------------------------------------------

_CORNERS: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: nn.Linear(6, 4),
    "Conv2d": lambda: nn.Conv2d(3, 5, 3, stride=2, padding=1),
    "grouped Conv2d": lambda: nn.Conv2d(4, 6, 3, groups=2),
    "ConvTranspose2d": lambda: nn.ConvTranspose2d(4, 6, 3, groups=2),
}


def _on_corners(
    name: str,
    make: Callable[[], Any],
    reference: Callable[[nn.Module, Tensor], Tensor],
    *,
    keeps_weight: bool = False,
    corners: tuple[str, ...] = tuple(_CORNERS),
) -> list[ParametrizationCase]:
    same = {"make": make, "reference": reference, "keeps_weight": keeps_weight}
    return [ParametrizationCase(name=f"{name} on {corner}", layer=_CORNERS[corner], **same) for corner in corners]


PARAMETRIZATIONS += _on_corners("Sphere", lambda: P.Sphere(radius=1.5), lambda m, v: ref_P.sphere(m, v, 1.5))
PARAMETRIZATIONS += _on_corners("WeightNorm", P.WeightNorm, ref_P.weight_norm, keeps_weight=True)
PARAMETRIZATIONS += _on_corners(
    "SpectralNorm", lambda: P.SpectralNorm(norm=1.5), lambda m, v: 1.5 * ref_P.spectral(m, v)
)
PARAMETRIZATIONS += _on_corners(
    "SpectralNorm at most 0.3",
    lambda: P.SpectralNorm(at_most=0.3),
    lambda m, v: ref_P.spectrally_bounded(m, v, 0.3),
    corners=("Linear", "grouped Conv2d"),
)
PARAMETRIZATIONS += _on_corners(
    "SpectralNorm at most 50",
    lambda: P.SpectralNorm(at_most=50.0),
    lambda m, v: ref_P.spectrally_bounded(m, v, 50.0),
    keeps_weight=True,
    corners=("Conv2d",),
)
PARAMETRIZATIONS += _on_corners("Orthogonal", P.Orthogonal, ref_P.orthogonal)
PARAMETRIZATIONS += _on_corners("OrthogonalConv", P.OrthogonalConv, ref_P.orthogonal_conv)
PARAMETRIZATIONS += _on_corners("WeightStandardization", P.WeightStandardization, ref_P.standardized)
PARAMETRIZATIONS += _on_corners(
    "scaled WeightStandardization",
    lambda: P.WeightStandardization(scale="fan_in", gain=1.7, learn_gain=True),
    ref_P.centred,
    corners=("Linear", "ConvTranspose2d"),
)
PARAMETRIZATIONS += _on_corners(
    "SpectralNorm of conv",
    lambda: P.SpectralNorm(view="conv"),
    ref_P.conv_spectral,
    corners=("Conv2d", "grouped Conv2d", "ConvTranspose2d"),
)
PARAMETRIZATIONS += _on_corners(
    "SpectralNorm of conv at most 0.3",
    lambda: P.SpectralNorm(view="conv", at_most=0.3),
    lambda m, v: ref_P.conv_spectrally_bounded(m, v, 0.3),
    corners=("Conv2d",),
)

# --- initialisation -------------------------------------------------------------------------------


def _has_variance(expected: float) -> Callable[[Tensor, torch.dtype], None]:
    """Mean 0 and the asked variance, within what 64 · 32 draws show."""

    def check(weight: Tensor, dtype: torch.dtype) -> None:
        assert abs(float(weight.mean())) < 5 * (expected / weight.numel()) ** 0.5
        assert abs(float(weight.var()) / expected - 1) < 0.2, f"variance {float(weight.var()):.3g}"

    return check


def _has_singular_values(expected: float) -> Callable[[Tensor, torch.dtype], None]:
    def check(weight: Tensor, dtype: torch.dtype) -> None:
        values = torch.linalg.svdvals(weight.flatten(1))
        error = float((values / expected - 1).abs().max())
        assert error < 10 * min(weight.shape[0], weight[0].numel()) * torch.finfo(dtype).eps, f"off by {error:.2g}"

    return check


def _has_isometric_centre(weight: Tensor, dtype: torch.dtype) -> None:
    _has_singular_values(1.0)(weight[..., 1, 1], dtype)
    assert float(weight.square().sum()) == float(weight[..., 1, 1].square().sum()), "a tap beside the centre"


INITS += [
    InitCase(name=name, function=function, shape=(64, 32), check=_has_variance(variance), options=options)
    for name, function, variance, options in [
        ("variance_scaling_ norm", init.variance_scaling_, 1 / 64, {"preserve": "norm"}),
        ("variance_scaling_ rms", init.variance_scaling_, 1 / 32, {"preserve": "rms"}),
        ("variance_scaling_ uniform", init.variance_scaling_, 1 / 32, {"distribution": "uniform"}),
        ("variance_scaling_ truncated", init.variance_scaling_, 1 / 32, {"distribution": "truncated_normal"}),
        ("variance_scaling_ signs", init.variance_scaling_, 1 / 32, {"distribution": "rademacher"}),
        ("xavier_", init.xavier_, 2 / 96, {}),
        ("he_", init.he_, 2 / 32, {}),
        ("lecun_", init.lecun_, 1 / 32, {}),
        ("mup_ hidden", init.mup_, 1 / 32, {"base": (16, 8)}),
        ("mup_ output", init.mup_, 8 / 32**2, {"base": (64, 8)}),
    ]
]
INITS += [
    InitCase(name="orthogonal_", function=init.orthogonal_, shape=(12, 20), check=_has_singular_values(1.0)),
    InitCase(
        name="orthogonal_ gain",
        function=init.orthogonal_,
        shape=(9, 3, 2, 2),
        check=_has_singular_values(2.0),
        options={"gain": 2.0},
    ),
    InitCase(
        name="delta_orthogonal_", function=init.delta_orthogonal_, shape=(6, 4, 3, 3), check=_has_isometric_centre
    ),
]

# --- verbs ----------------------------------------------------------------------------------------


def _small_network() -> nn.Module:
    """What every verb can act on: a convolution, a batch norm, activations and two linear layers."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * 5 * 5, 6),
        nn.LeakyReLU(),
        nn.Linear(6, 3),
    )


def _network_with_faults() -> nn.Module:
    """Once `perturbed` has added its noise, one filter of each hidden layer is 0, and another one is a copy."""
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 6), nn.Tanh(), nn.Linear(6, 3))
    with torch.no_grad():
        for layer in (model[0], model[3]):
            for parameter in (layer.weight, layer.bias):
                noise = 0.1 * seeded(*parameter.shape, seed=1)
                parameter[1] = -noise[1]
                parameter[3] = parameter[2] + (noise[2] - noise[3])
    return model


def _network_out_of_scale() -> nn.Module:
    """One filter is 100 times as large as the batch norm behind it stores."""
    model = _small_network()
    S.calibrate_(model, [_images()])
    with torch.no_grad():
        model[0].weight[1] *= 100
    return model


def _decoupled_network() -> nn.Module:
    return nn.Sequential(
        gnn.DecoupledConv2d(2, 4, 3, padding=1, magnitude=gnn.magnitude.Ball(learn_radius=True)),
        nn.ReLU(),
        nn.Flatten(),
        gnn.DecoupledLinear(4 * 5 * 5, 3),
    )


def _images() -> Tensor:
    return seeded(4, 2, 5, 5)


def _verb(name: str, apply: Callable[[nn.Module], Any], **options: Any) -> VerbCase:
    return VerbCase(**{"name": name, "model": _small_network, "inputs": _images, "apply": apply, **options})


def _attention_network() -> nn.Module:
    return nn.Sequential(nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True), nn.Linear(8, 3))


def _network_with_gains() -> nn.Module:
    block = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.Sequential(block, nn.LayerNorm(8), nn.Linear(8, 3))
    for seed, norm in enumerate((block.norm1, block.norm2, model[1])):
        norm.weight.data += 0.1 * seeded(8, seed=seed)
    return model


class _Residual(nn.Module):
    """A stream of 8 channels, which norms without gains read."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(8, elementwise_affine=False), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


def _network_with_a_stream() -> nn.Module:
    norm = nn.LayerNorm(8, elementwise_affine=False)
    return nn.Sequential(nn.Linear(8, 8), _Residual(), _Residual(), norm, nn.Linear(8, 3))


def _tokens() -> Tensor:
    return seeded(3, 5, 8)


def _held_network() -> nn.Module:
    model = _small_network()
    optim.hold_(model, _optimizer(model))
    return model


_OPTIMIZERS: WeakKeyDictionary[nn.Module, torch.optim.Optimizer] = WeakKeyDictionary()


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """One that lives as long as the model: a hold ends with its optimizer."""
    return _OPTIMIZERS.setdefault(model, torch.optim.SGD(model.parameters(), lr=1e-3))


_RECIPE = {"name": "laws", "swap": [{"where": "type:BatchNorm2d", "use": "SwitchableNorm2d"}]}

VERBS += [
    _verb("init_", lambda m: S.init_(m, init.orthogonal_, gain=1.0), idempotent=True),
    _verb("lsuv_", lambda m: S.lsuv_(m, _images()), idempotent=True),
    _verb("calibrate_", lambda m: S.calibrate_(m, [_images()]), idempotent=True),
    _verb("shrink_intruders_ all", lambda m: S.shrink_intruders_(m, m, k=99, threshold=2, factor=0), idempotent=True),
    _verb("even_out_", lambda m: S.even_out_(m), model=_network_out_of_scale, idempotent=True),
    _verb(
        "match_statistics_",
        lambda m: S.match_statistics_(m, [_images()]),
        model=_network_out_of_scale,
        idempotent=True,
    ),
    _verb("balance_ neuron", lambda m: S.balance_(m), keeps_function=True, idempotent=True),
    _verb("balance_ layer", lambda m: S.balance_(m, level="layer"), keeps_function=True, idempotent=True),
    *[
        _verb(
            f"balance_ {level} of blocks",
            lambda m, level=level: S.balance_(m, level=level),
            model=_attention_network,
            inputs=_tokens,
            keeps_function=True,
            idempotent=True,
        )
        for level in ("neuron", "layer")
    ],
    _verb("recycle_", lambda m: S.recycle_(m), model=_network_with_faults, keeps_function=True, idempotent=True),
    _verb("fold_", lambda m: S.fold_(m), keeps_function=True),
    _verb(
        "fold_ gains",
        lambda m: S.fold_(m, gains=True),
        model=_network_with_gains,
        inputs=_tokens,
        keeps_function=True,
    ),
    _verb(
        "rotate_ values",
        lambda m: S.rotate_(m, ("values",)),
        model=_attention_network,
        inputs=_tokens,
        keeps_function=True,
        idempotent=True,
    ),
    _verb(
        "rotate_ stream",
        lambda m: S.rotate_(m, ("stream",)),
        model=_network_with_a_stream,
        inputs=_tokens,
        keeps_function=True,
        idempotent=True,
    ),
    _verb("hold_ initial", lambda m: optim.hold_(m, _optimizer(m)), keeps_function=True),
    _verb(
        "hold_ spectral norms",
        lambda m: optim.hold_(m, _optimizer(m), norm="spectral"),
        keeps_function=True,
    ),
    _verb(
        "clip_qk_",
        lambda m: optim.clip_qk_(m, _optimizer(m)),
        model=_attention_network,
        inputs=_tokens,
        keeps_function=True,
    ),
    _verb("release_", lambda m: optim.release_(m), model=_held_network, keeps_function=True),
    _verb("apply_ a recipe", lambda m: Recipe.from_dict(_RECIPE).apply_(m)),
    _verb(
        "hold_ learned magnitudes",
        lambda m: optim.hold_(m, _optimizer(m), where="[46]", norm="filters", radius=2.0, magnitude="learned"),
        keeps_function=True,
    ),
    _verb("project_weights_", gnn.project_weights_, model=_decoupled_network, keeps_function=True, idempotent=True),
    _verb(
        "convert_gradually_",
        lambda m: S.convert_gradually_(m, torch.optim.SGD(m.parameters()), steps=5),
        model=_decoupled_network,
    ),
    _verb("swap_ decoupled", lambda m: S.swap_(m, gnn.DecoupledConv2d.from_conv)),
    _verb("swap_ switchable", lambda m: S.swap_(m, gnn.SwitchableNorm2d.from_batch_norm)),
    _verb("swap_ group norm", lambda m: S.swap_(m, gnn.to_group_norm)),
    _verb("swap_ layer norm", lambda m: S.swap_(m, gnn.to_layer_norm, positions=(5, 5))),
    *[
        _verb(f"parametrize_ {kind.__name__}", lambda m, kind=kind: S.parametrize_(m, kind()))
        for kind in (P.WeightNorm, P.Sphere, P.SpectralNorm, P.Orthogonal, P.OrthogonalConv, P.WeightStandardization)
    ],
]
