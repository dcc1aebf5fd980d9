"""The options of a decoupled layer as one value, and what signatures and converters show of it."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import sys
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from catalog import seeded
from gonio import nn as gnn
from gonio.errors import InvalidArgumentError
from gonio.nn import angular, magnitude
from gonio.surgery.swap import accepted_layers
from nn.operators import shapes
from tolerances import close, exact

LAYERS = [getattr(gnn, name) for name in gnn.__all__ if name.startswith("Decoupled")]
every_layer = pytest.mark.parametrize("kind", LAYERS, ids=lambda kind: kind.__name__)


@every_layer
def test_the_signature_is_torchs_and_the_operators(kind: type[nn.Module]) -> None:
    (plain,) = kind.takes
    found = list(inspect.signature(kind).parameters)
    assert found == [*inspect.signature(plain).parameters, *(each.name for each in dataclasses.fields(gnn.Operator))]
    assert issubclass(kind, plain)
    converter = kind.from_linear if plain is nn.Linear else kind.from_conv
    assert accepted_layers(converter) == (plain,)


def test_layers_are_built_from_one_value() -> None:
    operator = gnn.Operator(magnitude=magnitude.Ball(), angular=angular.Linear(), weighted="linear", momentum=None)
    options = {each.name: getattr(operator, each.name) for each in dataclasses.fields(operator)}
    for name, kind, arguments, shape in shapes():
        layer = kind(*arguments, **options)
        assert layer.operator == operator, name
        assert copy.deepcopy(layer).operator == pickle.loads(pickle.dumps(layer)).operator == operator
        twin = kind(*arguments, magnitude=magnitude.Ball(), angular=angular.Linear(), weighted="linear", momentum=None)
        twin.load_state_dict(layer.state_dict())
        x = seeded(*shape)
        torch.testing.assert_close(twin(x), layer(x), **exact(torch.float32))
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'weighted'"):
        operator.weighted = None  # type: ignore[misc]


def test_a_wrong_option_is_refused_before_anything_is_drawn() -> None:
    state = torch.random.get_rng_state()
    with pytest.raises(InvalidArgumentError, match="decoupled layer: invalid angular; found 'cos'"):
        gnn.DecoupledConv2d(3, 4, 3, angular="cos")
    with pytest.raises(TypeError, match="unexpected keyword argument 'magnitud'"):
        gnn.DecoupledConv2d(3, 4, 3, magnitud=magnitude.Ball())
    with pytest.raises(TypeError, match="unexpected keyword argument 'magnitud'"):
        gnn.DecoupledConv2d.from_conv(nn.Conv2d(3, 4, 3, device="meta"), magnitud=magnitude.Ball())
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_state_of_the_first_version_loads() -> None:
    """Names and order of parameters and buffers: optimizer states are by position."""
    h = magnitude.Segmented(learn_alpha=True, learn_beta=True, learn_radius=True)
    layer = gnn.DecoupledConv2d(3, 4, 3, magnitude=h)
    assert list(dict(layer.named_parameters())) == ["weight", "bias", "log_radius", "alpha", "beta"]
    assert list(layer.state_dict())[5:] == ["mean_norm", "num_batches_tracked"]


@dataclass(frozen=True)
class _Power(magnitude.Magnitude):
    """h = α ‖x‖^δ, a magnitude with a coefficient that no other has, in units of the mean norm."""

    delta: float = 1.5
    scale: float = 2.0
    learn_delta: bool = field(default=False, kw_only=True)
    learn_scale: bool = field(default=False, kw_only=True)

    bounded = False
    positive = ("scale",)
    in_mean_norms = ("scale",)

    def slope(self, norm: Tensor, *, alpha: magnitude.Number, delta: Tensor, scale: Tensor) -> Tensor:
        return alpha * (norm / scale) ** delta / norm


def test_a_magnitude_brings_its_own_coefficients() -> None:
    """Learned, as a logarithm or not, in units of the mean norm or not; the layer knows none of them."""
    layer = gnn.DecoupledLinear(5, 3, bias=False, magnitude=_Power(learn_delta=True, learn_scale=True)).double()
    assert list(dict(layer.named_parameters())) == ["weight", "log_scale", "delta"]
    assert layer.log_scale.tolist() == pytest.approx([torch.tensor(2.0).log().item()] * 3)
    with torch.no_grad():
        layer.delta.copy_(torch.tensor([0.5, 1.0, 2.0]))
        layer.log_scale.copy_(torch.tensor([0.1, 0.2, -0.3]))
    x = seeded(4, 5, dtype=torch.float64)
    norm = x.norm(dim=1, keepdim=True)
    unit = layer.weight / layer.weight.norm(dim=1, keepdim=True)
    expected = (norm / (layer.log_scale.exp() * norm.mean())) ** layer.delta * (x @ unit.T) / norm
    torch.testing.assert_close(layer(x), expected, **close(torch.float64))
    assert layer.radius is None
    with pytest.raises(InvalidArgumentError, match=r"_Power: invalid value of scale; found -1\.0\. Pass a positive"):
        _Power(scale=-1.0)
    with pytest.raises(InvalidArgumentError, match="weighted='tanh_each' is not defined for the magnitude _Power"):
        gnn.DecoupledLinear(5, 3, magnitude=_Power(), weighted="tanh_each")


def test_a_forward_crosses_five_files_and_thirty_functions() -> None:
    """Of the library: what a reader must open to follow one product."""
    layer, x = gnn.DecoupledConv2d(16, 16, 3, padding=1), seeded(8, 16, 32, 32)
    layer(x)
    seen = set()

    def note(frame, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and "gonio" in code.co_filename.split("/")[:-1]:
            seen.add((code.co_filename, code.co_qualname))

    sys.setprofile(note)
    try:
        layer(x)
    finally:
        sys.setprofile(None)
    assert len({file for file, _ in seen}) <= 5, sorted(seen)
    assert 10 < len(seen) <= 30, sorted(seen)
