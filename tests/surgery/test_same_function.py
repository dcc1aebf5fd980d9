"""Verbs that promise the same function: axes of channels, weights that are read twice, wrappers, own examples."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.data import DataLoader, TensorDataset

import gonio
from catalog import seeded
from gonio import nn as gnn
from gonio.errors import InvalidArgumentError, NotApplicableError
from surgery.net import Net, trained


def off(model: nn.Module, x: Any, before: Tensor) -> float:
    return float((model(x) - before).detach().norm() / before.norm())


def mixer(tokens: int, features: int) -> Net:
    return Net(lambda m, x: m.bn(m.fc(x)), fc=nn.Linear(features, features), bn=nn.BatchNorm1d(tokens))


def permuted() -> Net:
    return Net(lambda m, x: m.bn(m.fc(x).transpose(1, 2)), fc=nn.Linear(6, 6), bn=nn.BatchNorm1d(6))


def then(norm: nn.Module, layer: nn.Module) -> Net:
    return Net(lambda m, x: m.bn(m.fc(x)), fc=layer, bn=norm)


AXES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "BatchNorm1d over (N, C, L), C = L": (lambda: mixer(6, 6), (4, 6, 6)),
    "BatchNorm1d over (N, C, L), C ≠ L": (lambda: mixer(5, 6), (4, 5, 6)),
    "transposed in between": (permuted, (4, 3, 6)),
    "BatchNorm2d after Linear on NCHW": (lambda: then(nn.BatchNorm2d(6), nn.Linear(6, 6)), (2, 6, 6, 6)),
    "BatchNorm3d after Linear": (lambda: then(nn.BatchNorm3d(6), nn.Linear(6, 6)), (2, 6, 6, 6, 6)),
    "SyncBatchNorm after Linear on (N, C, L)": (lambda: then(nn.SyncBatchNorm(6), nn.Linear(6, 6)), (2, 6, 6)),
}


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("kind", AXES)
def test_a_norm_of_another_axis_stays(kind: str, given: bool) -> None:
    make, shape = AXES[kind]
    model, x = trained(make()).double(), seeded(*shape, dtype=torch.float64)
    before, options = model(x).detach(), {"example": x} if given else {}
    text = str(gonio.fold_(model, **options))
    assert type(model.bn) is not nn.Identity
    assert "bn stays: " in text
    assert off(model, x, before) == 0


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("kind", ["BatchNorm1d over (N, C, L), C = L", "SyncBatchNorm after Linear on (N, C, L)"])
def test_scale_does_not_move_from_a_norm_to_columns_of_another_axis(kind: str, given: bool) -> None:
    make, shape = AXES[kind]
    inner = make()
    model = Net(lambda m, x: m.b(F.relu(m.inner(x))), inner=inner, b=nn.Linear(6, 3))
    model, x = trained(model).double(), seeded(*shape, dtype=torch.float64)
    before = model(x).detach()
    with pytest.raises(NotApplicableError, match="no scale is free to move"):
        gonio.balance_(model, **({"example": x} if given else {}))
    assert off(model, x, before) == 0


def test_where_only_two_dimensions_are_possible_the_norm_folds_without_an_example() -> None:
    """Three dimensions would need as many tokens as two norms of different widths have channels."""
    layers = [nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4), nn.BatchNorm1d(4)]
    model, x = trained(nn.Sequential(*layers)).double(), seeded(3, 6, dtype=torch.float64)
    before = model(x).detach()
    assert len(gonio.fold_(model)) == 2
    assert off(model, x, before) < 1e-12


def functional(m: Any, x: Tensor) -> Tensor:
    return F.conv_transpose2d(torch.relu(m.bn(m.conv(x))), m.conv.weight, padding=1)


def transposed(m: Any, x: Tensor) -> Tensor:
    y = torch.relu(m.bn(m.conv(x)))
    return F.conv2d(y, m.conv.weight.transpose(0, 1), padding=1)


def normed(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    return m.bn(m.conv(x)), m.conv.weight.norm()


def by_name(m: Any, x: Tensor) -> Tensor:
    weight = dict(m.named_parameters())["conv.weight"]
    return F.conv_transpose2d(torch.relu(m.bn(m.conv(x))), weight, padding=1)


def registered(m: Any, x: Tensor) -> Tensor:
    return F.conv_transpose2d(torch.relu(m.bn(m.conv(x))), m.conv._parameters["weight"], padding=1)


@pytest.mark.parametrize("forward", [functional, transposed, normed, by_name, registered], ids=lambda f: f.__name__)
def test_a_weight_that_is_read_a_second_time_is_not_folded_into(forward: Callable[..., Any]) -> None:
    model = trained(Net(forward, conv=nn.Conv2d(3, 8, 3, padding=1), bn=nn.BatchNorm2d(8))).double()
    x = seeded(2, 3, 8, 8, dtype=torch.float64)
    before = model(x)
    assert "conv has a weight that the forward of the model" in str(gonio.fold_(model))
    torch.testing.assert_close(model(x), before, rtol=0, atol=0)


@pytest.mark.parametrize("read", ["functional", "norm", "output"])
def test_a_weight_that_is_read_a_second_time_keeps_its_scale(read: str) -> None:
    def forward(m: Any, x: Tensor) -> Any:
        y = m.b(torch.relu(m.a(x)))
        return {
            "functional": F.linear(y, m.a.weight.t()[:, :3]),
            "norm": y * m.a.weight.norm(),
            "output": (y, m.a.weight),
        }[read]

    model = Net(forward, a=nn.Linear(3, 5), b=nn.Linear(5, 3)).double()
    with pytest.raises(NotApplicableError, match="a has a weight that the forward of the model"):
        gonio.balance_(model)


class Sneaky(nn.Linear):
    """Reads the weight of a layer that is registered elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.other[0].weight.sum()


def sneaky() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), Sneaky(4, 2)).double()
    model[4].other = [model[0]]
    with torch.no_grad():
        model[0].weight.mul_(100)
    return model


def test_a_verb_checks_its_promise_on_an_example_of_its_own_and_takes_it_back() -> None:
    model, x = sneaky(), seeded(3, 4, dtype=torch.float64)
    before, weight = model(x).detach(), model[0].weight.detach().clone()
    with pytest.raises(NotApplicableError, match="balance_: cannot balance the model: the outputs changed"):
        gonio.balance_(model)
    assert torch.equal(model[0].weight, weight)
    assert off(model, x, before) == 0


def test_without_an_input_it_is_said_that_nothing_was_compared() -> None:
    model = trained(Net(lambda m, x, y: m.bn(m.conv(x)) + y, conv=nn.Conv2d(3, 4, 1), bn=nn.BatchNorm2d(4)))
    model.forward = lambda x, y: model.bn(model.conv(x)) + y
    text = str(gonio.fold_(model))
    assert "the outputs before and after were not compared" in text
    assert "pass example=" in text


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


def test_random_outputs_are_compared_with_the_same_random_numbers() -> None:
    model = trained(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), Noisy()))
    assert len(gonio.fold_(model)) == 1


class Forwarding(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.module(x)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)


LINEAR = {"magnitude": gnn.magnitude.Linear(), "angular": gnn.angular.Cosine()}
WRAPPED: dict[str, Callable[[], nn.Module]] = {
    "decoupled": lambda: gnn.DecoupledConv2d(3, 4, 3, **LINEAR),
    "plain": lambda: nn.Conv2d(3, 4, 3),
    "nested": lambda: Forwarding(gnn.DecoupledConv2d(3, 4, 3, **LINEAR)),
    "norm": lambda: trained(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))),
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_a_wrapper_that_forwards_attributes_is_not_taken_for_its_content(kind: str) -> None:
    model = nn.Sequential(Forwarding(WRAPPED[kind]()), nn.ReLU(), nn.Conv2d(4, 4, 1), trained(nn.BatchNorm2d(4))).eval()
    x = seeded(2, 3, 6, 6)
    before = model(x).detach()
    gonio.fold_(model)
    assert type(model[0]) is Forwarding
    assert off(model, x, before) < 1e-5
    gonio.init_(model, gonio.init.he_)
    assert type(model[0]) is Forwarding


class Mean(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.mean(0, keepdim=True)


class Matrix(nn.Module):
    def forward(self, v: Tensor) -> Tensor:
        return v.view(6, 8)


class Wide(nn.Module):
    def forward(self, v: Tensor) -> Tensor:
        return v.double()


class Flipped(nn.Module):
    def forward(self, v: Tensor) -> Tensor:
        return v.t()


@pytest.mark.parametrize(
    ("start", "part"), [((6, 8), Mean()), ((48,), Matrix()), ((6, 8), Wide()), ((8, 6), Flipped())], ids=str
)
def test_a_parametrization_of_another_shape_or_dtype_folds(start: tuple[int, ...], part: nn.Module) -> None:
    layer = nn.Linear(8, 6, bias=False)
    layer.weight = nn.Parameter(seeded(*start))
    register_parametrization(layer, "weight", part, unsafe=True)
    x = seeded(3, 8, dtype=layer.weight.dtype)
    model = nn.Sequential(layer)
    before, twin = model(x).detach(), copy.deepcopy(model)
    edited = gonio.fold_(model, example=x)
    assert model[0].weight.shape == twin[0].weight.shape
    torch.testing.assert_close(model(x), before, rtol=0, atol=0)
    edited.undo_()
    torch.testing.assert_close(model(x), before, rtol=0, atol=0)


class NormInside(nn.Conv2d):
    """As the convolutions of detectron2."""

    def __init__(self, *args: Any, norm: nn.Module, **options: Any) -> None:
        super().__init__(*args, **options)
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))


def test_a_norm_inside_of_a_layer_is_said_to_be_there() -> None:
    model = nn.Sequential(NormInside(3, 8, 3, norm=nn.BatchNorm2d(8)), nn.ReLU()).eval()
    assert "0.norm stays: 0 calls it inside of its own forward" in str(gonio.fold_(model))


# --- batches of a DataLoader --------------------------------------------------------------------------


class Loss(nn.Module):
    """Takes the labels too."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.net(x).mean() - y.mean()


@pytest.mark.parametrize("make", [lambda: Loss().net, Loss], ids=["inputs alone", "labels too"])
@pytest.mark.parametrize("verb", ["calibrate_", "lsuv_", "equivalent", "measure"])
def test_batches_of_a_loader_are_taken(verb: str, make: Callable[[], nn.Module]) -> None:
    model = make()
    loader = DataLoader(TensorDataset(seeded(16, 3, 8, 8), torch.zeros(16)), batch_size=8)
    batch = next(iter(loader))
    assert isinstance(batch, list)
    calls: dict[str, Callable[[], object]] = {
        "calibrate_": lambda: gonio.calibrate_(model, loader),
        "lsuv_": lambda: gonio.lsuv_(model, batch),
        "equivalent": lambda: gonio.equivalent(model, model, example=batch),
        "measure": lambda: gonio.measure(model, batch=batch),
    }
    assert calls[verb]() is not None


TAKERS: dict[str, Callable[[nn.Module, Any], object]] = {
    "lsuv_": gonio.lsuv_, "measure": lambda m, b: gonio.measure(m, batch=b),
    "calibrate_": lambda m, b: gonio.calibrate_(m, [b]), "fold_": lambda m, b: gonio.fold_(m.eval(), example=b),
    "balance_": lambda m, b: gonio.balance_(m.eval(), example=b),
    "equivalent": lambda m, b: gonio.equivalent(m, m, example=b),
}  # fmt: skip


@pytest.mark.parametrize("verb", TAKERS)
def test_labels_of_a_tuple_are_left_out_and_a_loader_is_no_batch(verb: str) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))

    data = TensorDataset(seeded(16, 3, 8, 8), torch.zeros(16))
    assert TAKERS[verb](model(), data[:8]) is not None  # a tuple (inputs, labels)
    with pytest.raises(InvalidArgumentError, match=r"found a DataLoader\. Pass one batch: next\(iter\(loader\)\)"):
        TAKERS[verb](model(), DataLoader(data, batch_size=8))


def test_a_lazy_layer_is_measured_on_a_batch_and_stays_lazy() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.LazyLinear(5))
    assert [signal.path for signal in gonio.measure(model, batch=seeded(4, 6)).signals] == ["0", "1"]
    assert torch.nn.parameter.is_lazy(model[1].weight)
    assert model(seeded(4, 6)).shape == (4, 5)


# --- what a verb leaves out ---------------------------------------------------------------------------

LEFT = {
    "weight norm of gonio": lambda m: gonio.parametrize_(m, gonio.parametrizations.WeightNorm(), where="0"),
    "spectral norm of torch": lambda m: nn.utils.parametrizations.spectral_norm(m[0]),
    "weight norm by hooks": lambda m: nn.utils.weight_norm(m[0]),
    "bilinear": lambda m: m.add_module("3", nn.Bilinear(4, 4, 4)),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
@pytest.mark.parametrize("kind", LEFT)
def test_lsuv_names_the_layers_that_it_leaves_out(kind: str) -> None:
    model = Net(
        lambda m, x: m.net[2](m.net[1](m.net[0](x))), net=nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    )
    LEFT[kind](model.net)
    edited = gonio.lsuv_(model, seeded(64, 16))
    path = "net.3" if kind == "bilinear" else "net.0"
    assert any(note.startswith(f"{path} stays: ") for note in edited.notes)


# --- inputs of another size --------------------------------------------------------------------------

RUNNERS: dict[str, Callable[[nn.Module, Any], object]] = {
    **TAKERS,
    "match_statistics_": lambda m, b: gonio.match_statistics_(m.eval(), [b]),
    "match_statistics_ (later)": lambda m, b: gonio.match_statistics_(m.eval(), [seeded(4, 1, 8, 8), b]),
    "calibrate_ (later)": lambda m, b: gonio.calibrate_(m.eval(), [seeded(4, 1, 8, 8), b]),
    "recycle_": lambda m, b: gonio.recycle_(m.eval(), example=b),
    "anatomy": lambda m, b: gonio.surgery.anatomy(m.eval(), example=b),
    "doctor": lambda m, b: gonio.doctor(m.eval(), batch=b),
}


@pytest.mark.parametrize("verb", RUNNERS)
def test_an_input_of_another_size_is_named_with_its_layer(verb: str) -> None:
    """As the command line does it; torch's own error names no layer."""
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 3))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(InvalidArgumentError, match=r"found 3 channels at the layer '0', which takes 1\. Give an input"):
        RUNNERS[verb](model, torch.ones(4, 3, 8, 8))
    assert all(torch.equal(old, new) for old, new in zip(before.values(), model.state_dict().values(), strict=True))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("verb", ["measure", "doctor", "anatomy", "calibrate_"])
@pytest.mark.parametrize(("model", "batch"), [("bfloat16", "float32"), ("float32", "float64"), ("float32", "int64")])
def test_an_input_of_another_dtype_is_named_with_its_layer(verb: str, model: str, batch: str) -> None:
    """A trainer converts its inputs to the dtype of the weights; who measures at a checkpoint has not."""
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 2, 3)).to(getattr(torch, model))
    said = rf"found {batch} at the layer '0', whose weight has the dtype {model}\. Convert the input: batch"
    with pytest.raises(InvalidArgumentError, match=said):
        RUNNERS[verb](net, torch.ones(4, 1, 8, 8, dtype=getattr(torch, batch)))


def test_a_layer_that_converts_its_input_is_not_blamed() -> None:
    class Converting(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.to(self.weight.dtype))

    with pytest.raises(RuntimeError, match="shape '\\[7\\]' is invalid"):
        gonio.measure(
            nn.Sequential(Converting(8, 8), nn.Unflatten(1, (8, 1)), Reshaping()), batch=seeded(4, 8).double()
        )


class Reshaping(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(7)


@pytest.mark.parametrize("verb", ["calibrate_", "match_statistics_"])
def test_one_batch_is_not_taken_for_several(verb: str) -> None:
    """The rows of a tensor counted as batches, and torch's error was of an input that nobody had given."""
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8)).eval()
    found = (
        r"takes several batches, as a list or a DataLoader; found one tensor of the sizes 4x1x8x8\. Put it into a list"
    )
    with pytest.raises(InvalidArgumentError, match=found):
        getattr(gonio, verb)(model, torch.ones(4, 1, 8, 8))
    with pytest.raises(InvalidArgumentError, match="found a dict"):
        getattr(gonio, verb)(model, {"input": torch.ones(4, 1, 8, 8)})


def test_another_error_of_the_model_stays_what_it_is() -> None:
    with pytest.raises(RuntimeError, match="shape"):
        gonio.calibrate_(Net(lambda m, x: m.bn(x.view(7, -1)), bn=nn.BatchNorm1d(3)), [torch.ones(2, 3)])


class TakesDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.norm(self.fc(batch["x"]))


WITH_BATCH: dict[str, Callable[[nn.Module, Any], Any]] = {
    "measure": lambda model, batch: gonio.measure(model, batch=batch),
    "calibrate_": lambda model, batch: gonio.calibrate_(model, [batch]),
    "lsuv_": gonio.lsuv_,
    "fold_": lambda model, batch: gonio.fold_(model, example=batch),
}


@pytest.mark.parametrize("verb", WITH_BATCH)
def test_a_model_that_takes_the_dict_itself_gets_it(verb: str) -> None:
    """What each verb learns from the run: the layers' outputs, statistics, a weight, and that the function stays."""
    model, batch = TakesDict(), {"x": torch.randn(8, 6), "label": torch.zeros(8)}
    before = copy.deepcopy(model).eval()
    found = WITH_BATCH[verb](model, batch)
    if verb == "measure":
        assert [signal.path for signal in found.signals] == ["fc", "norm"]
    elif verb == "calibrate_":
        torch.testing.assert_close(model.norm.running_mean, model.fc(batch["x"]).detach().mean(0))
    elif verb == "lsuv_":
        assert not torch.equal(model.fc.weight, before.fc.weight)
    else:
        torch.testing.assert_close(model.eval()(batch), before(batch))


@pytest.mark.parametrize("verb", WITH_BATCH)
@pytest.mark.parametrize(
    ("names", "found"),
    [
        (("image", "label"), r"found image, label; on the dict itself it raises TypeError"),
        (("input", "label"), r"forward \(input\); found label\. Give the inputs alone"),
    ],
)
def test_a_dict_of_names_that_the_model_does_not_take_is_one_error(
    verb: str, names: tuple[str, str], found: str
) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))
    with pytest.raises(InvalidArgumentError, match=found):
        WITH_BATCH[verb](model, dict(zip(names, (torch.randn(8, 6), torch.zeros(8)), strict=True)))


class Both(nn.Module):
    """A model of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(6, 8), nn.Linear(5, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.norm(self.first(x) + self.second(y))


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize(
    "act",
    [
        lambda m, e: gonio.calibrate_(m, [e]),
        lambda m, e: gonio.measure(m, batch=e),
        lambda m, e: gonio.lsuv_(m, e),
        lambda m, e: gonio.fold_(m, example=e),
        lambda m, e: gonio.equivalent(m, m, example=e),
    ],
)
def test_inputs_within_a_batch_are_an_error_in_words(act: Callable[[nn.Module, Any], object], kind: type) -> None:
    batch = kind([kind([seeded(4, 6), seeded(4, 5)]), torch.zeros(4)])
    expected = rf"found a {kind.__name__} of 2 inside of the example, with which the model raises TypeError: linear\(\)"
    with pytest.raises(InvalidArgumentError, match=expected + r".* forward \(x, y\) themselves"):
        act(Both(), batch)
    act(Both(), batch[0])


def test_a_state_within_a_batch_keeps_the_error_of_the_model() -> None:
    model, state = nn.LSTM(6, 8), (torch.zeros(1, 5, 8), torch.zeros(1, 5, 8))
    with pytest.raises(RuntimeError, match="hidden"):
        gonio.equivalent(model, model, example=(seeded(3, 4, 6), state))
