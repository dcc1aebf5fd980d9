"""Facts of layers: stated for a type, declared, registered or measured; never read off a name."""

from __future__ import annotations

import contextlib
import copy
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import foreign
import gonio
from catalog import LAYERS, seeded
from gonio import nn as gnn
from gonio.errors import InvalidArgumentError, NotApplicableError
from gonio.geometry.views import why_not_dense
from gonio.regularizers import SelfOrthogonality
from gonio.surgery import facts, followed_by_norm
from gonio.surgery.facts import UNKNOWN, Facts, facts_of, measure
from gonio.surgery.graph import trace


class ActNorm(nn.Module):
    """Glow: a trained scale and shift per channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class GaussianNormalNoise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


class EvoNormB1(nn.Module):
    """The larger of the batch's deviation and |x| + 1: its input's scale matters."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        return x / torch.maximum(x.std((0, 2, 3), keepdim=True), (100 * self.v.view(1, -1, 1, 1) + 1).square())


class FrozenBatchNorm2d(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((1, channels, 1, 1), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + 1


class NormFreeConv(nn.Conv2d):
    pass


class Squash(nn.Module):
    """Of capsules (Sabour et al. 2017, equation 1): large vectors get the norm 1, and small ones keep theirs."""

    def forward(self, x: Tensor) -> Tensor:
        squares = x.square().sum(1, keepdim=True)
        return x * squares.sqrt() / (1 + squares)


class Ball(nn.Module):
    """Clips norms over the channels, as hyperbolic networks do."""

    def __init__(self, radius: float) -> None:
        super().__init__()
        self.radius = radius

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.radius / x.norm(dim=1, keepdim=True)).clamp(max=1)


class Whiten(nn.Module):
    """Divides by the deviation over channels, and has no parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.std(1, keepdim=True)


class Scaled(nn.Module):
    """As the RMS norms that each model of transformers has of its own."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        y = x.movedim(1, -1)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + self.gain)
        return y.movedim(-1, 1)


class Activated(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


def behind(layer: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), layer, nn.ReLU(), nn.Conv2d(4, 4, 3))


NO_NORMS = (
    ActNorm(4),
    GaussianNormalNoise(),
    EvoNormB1(4),
    FrozenBatchNorm2d(4),
    NormFreeConv(4, 4, 1),
    nn.LocalResponseNorm(2),
    Squash(),
    Ball(radius=1.0),
    Ball(radius=5.0),
    nn.GELU(),
)
NORMS = (Whiten(), Scaled(4), Activated(4), nn.GroupNorm(2, 4), gnn.SwitchableNorm2d(4))


@pytest.mark.parametrize("layer", NO_NORMS, ids=lambda layer: type(layer).__name__)
def test_a_layer_that_passes_scale_on_hides_nothing_from_a_penalty(layer: nn.Module) -> None:
    net = behind(layer)
    assert followed_by_norm(net) == {}
    assert "skipped" not in str(gonio.Penalty(net, [(None, gonio.regularizers.ScaleShift(1e-4))]))


@pytest.mark.parametrize("layer", NORMS, ids=lambda layer: type(layer).__name__)
def test_a_layer_that_removes_scale_is_a_norm_whatever_its_name(layer: nn.Module) -> None:
    net = behind(layer).double()
    assert followed_by_norm(net) == {"0": "1"}
    assert "0.weight" in str(gonio.Penalty(net, [(None, gonio.regularizers.ScaleShift(1e-4))])).split("skipped: ")[0]
    x = 100 * seeded(2, 3, 8, 8, dtype=torch.float64)
    before = net(x)
    with torch.no_grad():
        net[0].weight.mul_(2)
        net[0].bias.mul_(2)
    torch.testing.assert_close(net(x), before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("names", [("Evo", "timm.layers:EvoNorm2dB0", True), ("S0", "timm.layers:EvoNorm2dS0", False)])
def test_norms_of_timm_are_measured(names: tuple[str, str, bool]) -> None:
    _, name, removes = names
    kind = getattr(foreign.timm().layers, name.split(":")[1])
    assert bool(followed_by_norm(behind(kind(4)))) == removes


def test_a_zero_gain_does_not_make_a_norm() -> None:
    """With the stored value 0 the output would be the same for every input."""
    layer = ActNorm(4)
    nn.init.zeros_(layer.scale)
    assert measure(layer, [(2, 4, 3, 3)]).removes_scale is False


@pytest.mark.parametrize("shape", [(4, 3), (2, 5, 4)])
def test_what_cannot_be_run_is_unknown(shape: tuple[int, ...]) -> None:
    class Four(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert x.dim() == 4
            return x

    assert measure(Four(), [shape]) is UNKNOWN


def test_measuring_leaves_layer_and_random_numbers_alone() -> None:
    layer, random = nn.BatchNorm2d(4), torch.random.get_rng_state()
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    assert measure(layer, [(2, 4, 3, 3)]) == Facts(True, True, False)
    assert all(torch.equal(before[name], value) for name, value in layer.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), random)


def test_stated_facts_are_what_running_shows() -> None:
    for kind, stated in list(facts._STATED.items()):
        if stated.removes_scale is None or kind in (nn.SyncBatchNorm, nn.LayerNorm, nn.RMSNorm):
            continue
        if not kind.__module__.startswith("torch."):  # another test's, or an example's, of this process
            continue
        dims = next((d for d in (1, 2, 3) if f"{d}d" in kind.__name__), 2)
        layer = kind(2, 4) if kind is nn.GroupNorm else kind(4)
        found = measure(layer, [(6, 4, *[5] * dims)])
        assert (found.removes_scale, found.removes_shift) == (stated.removes_scale, stated.removes_shift), kind


def test_own_layers_declare_their_facts() -> None:
    for case in LAYERS:
        layer = case.make()
        if isinstance(layer, gnn.SwitchableNorm1d | gnn.SwitchableNorm2d | gnn.SwitchableNorm3d):
            assert facts_of(layer).removes_scale, case.name
            assert facts_of(layer).mixture is not None


def test_a_type_of_the_user_is_registered() -> None:
    class Halved(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / 2

    class Other(Halved):
        def forward(self, x: Tensor) -> Tensor:
            return x.tanh()

    facts.register(Halved, Facts(homogeneous=True, acts_on="entries"))
    assert facts_of(Halved()).homogeneous
    assert facts_of(Other()) is UNKNOWN  # it has a forward of its own
    model = nn.Sequential(nn.Linear(3, 4), Halved(), nn.Linear(4, 2)).double()
    assert len(gonio.balance_(model)) == 2


@pytest.mark.parametrize(
    ("kind", "stated", "match"),
    [
        (nn.ReLU(), Facts(), r"takes a module class; found ReLU"),
        (nn.Module, Facts(), r"takes a module class"),
        (ActNorm, {"removes_scale": True}, r"takes gonio.surgery.facts.Facts; found \{'removes_scale': True\}"),
    ],
)
def test_registering_something_else_is_an_error(kind: object, stated: object, match: str) -> None:
    with pytest.raises(InvalidArgumentError, match=match):
        facts.register(kind, stated)


@pytest.mark.parametrize(
    ("stated", "match"),
    [
        ({"removes_scale": "yes"}, r"removes_scale of a layer is True, False or None; found 'yes'"),
        ({"homogeneous": 1}, r"homogeneous of a layer is True, False or None; found 1"),
        ({"acts_on": "rows"}, r'acts_on is "entries" or "channels"; found \'rows\''),
    ],
)
def test_facts_of_another_kind_are_refused(stated: dict[str, object], match: str) -> None:
    with pytest.raises(InvalidArgumentError, match=match):
        Facts(**stated)


@pytest.mark.parametrize(
    ("layer", "shape", "match"),
    [
        (nn.ReLU, (3, 4), r"measure\(\) needs a model; found the class ReLU"),
        (nn.ReLU(), (3,), r"takes shapes of a batch and its channels; found \(3,\)"),
    ],
)
def test_measuring_something_else_is_an_error(layer: object, shape: tuple[int, ...], match: str) -> None:
    with pytest.raises(InvalidArgumentError, match=match):
        measure(layer, [shape])


def test_switchable_norms_are_named_in_nn_alone() -> None:
    root = Path(gonio.__file__).parent
    allowed = {root / "models" / "built_in.py"}
    found = [
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if path.parent.name != "nn" and path not in allowed
        if re.search(r"import .*SwitchableNorm", path.read_text("utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        (lambda: nn.Linear(2, 2, dtype=torch.complex64).weight, "its weight is complex"),
        (lambda: nn.LazyLinear(2).weight, "it is lazy; run one batch first"),
        (lambda: torch.eye(2).to_sparse(), "its weight is stored as sparse_coo"),
        (lambda: torch.zeros(2, 2, dtype=torch.int8), "its weight is quantised to int8"),
        (lambda: nn.Linear(2, 2).weight, None),
    ],
)
def test_weights_that_cannot_be_computed_with(weight: Callable[[], Tensor], reason: str | None) -> None:
    assert why_not_dense(weight()) == reason


class Packed(Tensor):
    """A tensor subclass that dequantises, as those of torchao."""

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(f"{function} of Packed")


def packed_linear(rows: int, columns: int) -> nn.Linear:
    layer = nn.Linear(columns, rows)
    packed = Tensor._make_wrapper_subclass(Packed, (rows, columns), dtype=torch.float32)
    layer._parameters["weight"] = packed
    return layer


def sparse_linear(rows: int, columns: int) -> nn.Linear:
    layer = nn.Linear(columns, rows)
    layer.weight = nn.Parameter(torch.eye(rows, columns).to_sparse())
    return layer


def complex_linear(rows: int, columns: int) -> nn.Linear:
    return nn.Linear(columns, rows, dtype=torch.complex64)


MAKERS = {
    "packed": (packed_linear, "stored as Packed"),
    "sparse": (sparse_linear, "stored as sparse_coo"),
    "complex": (complex_linear, "is complex"),
    "lazy": (lambda rows, columns: nn.LazyLinear(rows), "it is lazy"),
}
VERBS = {
    "init_": lambda model: gonio.init_(model, gonio.init.he_),
    "parametrize_": lambda model: gonio.parametrize_(model, gonio.parametrizations.WeightNorm()),
    "balance_": gonio.balance_,
    "Penalty": lambda model: gonio.Penalty(model, [(None, gonio.regularizers.L2(1e-4))]),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("kind", MAKERS)
def test_every_verb_refuses_them_in_words(kind: str, verb: str) -> None:
    make, reason = MAKERS[kind]
    model = nn.Sequential(make(4, 4), nn.ReLU(), make(4, 4))
    with pytest.raises(gonio.GonioError, match=reason):
        VERBS[verb](model)


def test_measured_layers_do_not_hide_what_is_inside() -> None:
    """A layer of unknown type without parameters is traced through unless it removes scale."""

    class Rectified(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x)

    graph = trace(nn.Sequential(nn.Linear(4, 4), Rectified(), nn.Linear(4, 4)))
    assert graph.activation_after == {"0": "relu", "2": "linear"}


class Speaking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        warnings.warn("an input of another shape", UserWarning, stacklevel=2)
        return x / x.norm(dim=-1, keepdim=True)


def test_what_a_layer_says_about_inputs_of_the_measurement_is_not_shown() -> None:
    """torch's own spectral norm warns where a vector of it is resized, and the measured copy is thrown away."""
    with warnings.catch_warnings(action="error"):
        assert measure(Speaking(), [(4, 8)]).removes_scale
        x = torch.randn(4, 3)
        model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 8)), nn.ReLU(), nn.Linear(8, 2))
        with contextlib.suppress(gonio.errors.NotApplicableError):
            gonio.rotate_(model.eval(), example=x)


# --- hooks --------------------------------------------------------------------------------------------


def doubling(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
    return 2 * output


def test_a_hook_that_only_reads_is_known_by_identity() -> None:
    """A hook of another module with the name of ours changes what it likes; copies of ours still only read."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    penalty = gonio.Penalty(model, [(None, SelfOrthogonality(0.1))])
    assert any(module._forward_hooks for module in model.modules())
    for copied in (model, copy.deepcopy(model)):
        assert not any(map(facts.has_changing_hooks, copied.modules()))
        assert trace(copied).why_pinned("0", copied[0]) == ""
    assert gonio.certify(model, seeded(2, 4)).upper > 0
    penalty.undo_()
    doubling.__module__ = "gonio.fake"
    model[0].register_forward_hook(doubling)
    assert facts.has_changing_hooks(model[0])
    assert "has forward hooks" in trace(model).why_pinned("0", model[0])
    with pytest.raises(NotApplicableError, match=r"layer '0' .*forward hooks"):
        gonio.certify(model, seeded(2, 4))
