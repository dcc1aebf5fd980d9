"""Verbs in inference mode, and on models with empty, scripted, lazy and 8-bit parts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gonio
from catalog import seeded
from gonio import init, optim
from gonio import nn as gnn
from gonio import parametrizations as P
from gonio import regularizers as R
from gonio.errors import InvalidArgumentError, NoMatchError, NotApplicableError
from gonio.surgery import Edited, convert_gradually_

X = seeded(16, 6)
NO_ENTRIES = pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).eval()


def decoupled() -> nn.Sequential:
    model = network()
    gonio.swap_(model, gnn.DecoupledLinear.from_linear)
    return model


OPTIMIZERS: list[torch.optim.Optimizer] = []


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    OPTIMIZERS.append(torch.optim.SGD(model.parameters(), lr=0.1))
    return OPTIMIZERS[-1]


ADDING: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Edited]]] = {
    "parametrize_ WeightNorm": (network, lambda m: gonio.parametrize_(m, P.WeightNorm())),
    "parametrize_ SpectralNorm": (network, lambda m: gonio.parametrize_(m, P.SpectralNorm())),
    "swap_": (network, lambda m: gonio.swap_(m, gnn.DecoupledLinear.from_linear)),
    "hold_": (network, lambda m: optim.hold_(m, optimizer_of(m), where="4", norm="filters", magnitude="learned")),
    "convert_gradually_": (decoupled, lambda m: convert_gradually_(m, optimizer_of(m), steps=5)),
    "fold_": (lambda: nn.Sequential(nn.Conv1d(6, 4, 1, bias=False), nn.BatchNorm1d(4)).eval(), gonio.fold_),
}


@pytest.mark.parametrize("verb", ADDING)
def test_what_an_edit_in_inference_mode_adds_can_be_trained(verb: str) -> None:
    make, act = ADDING[verb]
    model = make()
    with torch.inference_mode():
        edited = act(model)
        assert torch.is_inference_mode_enabled()
    assert not any(tensor.is_inference() for tensor in (*model.parameters(), *model.buffers()))
    model.train()
    model(X if verb != "fold_" else X[..., None]).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    edited.undo_()


def test_an_edit_of_a_model_of_inference_mode_acts_in_that_mode() -> None:
    with torch.inference_mode():
        model = network()
        before = model[0].weight.clone()
        edited = gonio.init_(model, init.orthogonal_)
        assert not torch.equal(model[0].weight, before)
        edited.undo_()
        assert torch.equal(model[0].weight, before)


@NO_ENTRIES
def test_a_layer_without_filters_computes() -> None:
    """Torch's kernel of weight norm ends the process there."""
    assert gnn.DecoupledLinear(6, 0)(X).shape == (16, 0)


EVERY: dict[str, Callable[[nn.Module], Edited]] = {
    "init_": lambda m: gonio.init_(m, init.orthogonal_),
    "shrink_change_": lambda m: gonio.shrink_change_(m, m),
    "shrink_intruders_": lambda m: gonio.shrink_intruders_(m, m),
    "hold_": lambda m: optim.hold_(m, optimizer_of(m)),
    "parametrize_": lambda m: gonio.parametrize_(m, P.Sphere()),
}


@NO_ENTRIES
@pytest.mark.parametrize("verb", [*EVERY, "lsuv_"])
def test_a_layer_without_entries_is_left_out(verb: str) -> None:
    model = nn.Sequential(nn.Linear(6, 0), nn.Linear(0, 6), nn.Linear(6, 4))
    edited = {**EVERY, "lsuv_": lambda m: gonio.lsuv_(m, X)}[verb](model)
    assert {change.path for change in edited.changes} in ({"2"}, set())
    assert "0, 1 stay: its weight has no entries" in str(edited)


@NO_ENTRIES
def test_no_scale_is_moved_through_a_layer_without_entries() -> None:
    with pytest.raises(NotApplicableError, match="1: its weight has no entries"):
        gonio.balance_(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 0)))


@pytest.mark.parametrize("verb", EVERY)
def test_a_weight_of_8_bits_is_left_out(verb: str) -> None:
    model = network()
    model[2].weight = nn.Parameter(model[2].weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    edited = EVERY[verb](model)
    assert "2" not in {change.path for change in edited.changes}
    assert "2 stays: its weight is quantised to float8_e4m3fn" in str(edited)


def test_edits_of_a_model_with_a_scripted_part_are_undone() -> None:
    model = nn.Sequential(torch.jit.script(nn.Linear(6, 6)), nn.Linear(6, 4)).eval()
    before, parameters = model(X), list(model.parameters())
    edits = [gonio.swap_(model, gnn.DecoupledLinear.from_linear), gnn.project_weights_(model)]
    for edited in reversed(edits):
        edited.undo_()
    assert torch.equal(model(X), before)
    assert len(parameters) == 4


def test_a_lazy_norm_has_no_statistics_to_match() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.LazyBatchNorm1d()).eval()
    with pytest.raises(NotApplicableError, match="no batch norm with running statistics gets its output"):
        gonio.match_statistics_(model, [X])


def refusing(weight: torch.Tensor, *, layout: Any, generator: torch.Generator) -> torch.Tensor:
    if weight.shape == (8, 8):
        raise InvalidArgumentError("this function takes no square matrix", "one", "Pass another.")
    return weight.fill_(1.0)


@pytest.mark.parametrize("verb", ["init_", "lsuv_"])
def test_an_error_of_a_function_of_weights_has_the_place(verb: str) -> None:
    act = {"init_": lambda m: gonio.init_(m, refusing), "lsuv_": lambda m: gonio.lsuv_(m, X, function=refusing)}
    model = network()
    before = model[0].weight.clone()
    with pytest.raises(InvalidArgumentError, match="takes no square matrix") as caught:
        act[verb](model)
    assert caught.value.__notes__ == ["at 2.weight"]
    assert torch.equal(model[0].weight, before)


def test_an_error_of_a_parametrization_has_the_place() -> None:
    model = nn.Sequential(nn.Embedding(7, 6), nn.Embedding(7, 6, sparse=True))
    with pytest.raises(NotApplicableError, match="its gradients are sparse") as caught:
        gonio.parametrize_(model, P.Sphere())
    assert caught.value.__notes__ == ["at 1.weight"]
    linear = nn.Sequential(nn.Linear(6, 4), nn.Embedding(7, 6, max_norm=1.0))
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
    with pytest.raises(NotApplicableError, match="max_norm renormalises it") as caught:
        optim.hold_(linear, optimizer, where="*", norm="filters", magnitude="learned")
    assert caught.value.__notes__ == ["at 1.weight"]


class Quantised(Tensor):
    """A weight without a storage, of which torch can do one thing: the product of a layer, as of torchao's."""

    @staticmethod
    def __new__(cls, weight: Tensor) -> Any:
        made = Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype)
        made.scale = weight.detach().abs().amax(1, keepdim=True) / 127
        made.codes = (weight.detach() / made.scale).round().to(torch.int8)
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is F.linear:
                return F.linear(args[0], args[1].codes * args[1].scale, *args[2:])
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{func} of Quantised")


class QuantisedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))
        for layer in (self.q, self.k, self.v, self.out):
            layer.weight = nn.Parameter(Quantised(layer.weight), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(self.norm(x)).unflatten(-1, (2, 8)).transpose(1, 2) for each in (self.q, self.k, self.v))
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


QUANTISED_VERBS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "rotate_": lambda model, x: gonio.rotate_(model, example=x),
    "fold_": lambda model, x: gonio.fold_(model, gains=True, example=x),
    "balance_": lambda model, x: gonio.balance_(model, example=x),
    "clip_qk_": lambda model, x: gonio.clip_qk_(model, torch.optim.SGD(model.parameters(), lr=0.1), example=x),
}


@pytest.mark.parametrize("verb", QUANTISED_VERBS)
def test_weights_of_which_only_the_product_is_known_are_refused_in_words(verb: str) -> None:
    model, x = QuantisedBlock(), torch.randn(2, 5, 16)
    before = model(x)
    with pytest.raises(gonio.GonioError, match=r"Quantised|nothing to fold|no module is suitable"):
        QUANTISED_VERBS[verb](model, x)
    assert torch.equal(model(x), before)


@pytest.mark.parametrize("shape", [(4, 16), (2, 5, 16)])
def test_outputs_of_weights_of_which_only_the_product_is_known_are_measured(shape: tuple[int, ...]) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    model[0].weight = nn.Parameter(Quantised(model[0].weight), requires_grad=False)
    x = torch.randn(shape)
    found = gonio.measure(model, batch=x)
    assert found.signals[0].path == "0"
    assert found.signals[0].rms == pytest.approx(float(model[0](x).detach().square().mean().sqrt()), rel=1e-5)
    assert gonio.equivalent(model, model, example=x).absolute == 0


def test_nothing_takes_a_step_of_a_spectral_norm_of_torch() -> None:
    torch.manual_seed(0)
    layers = [torch.nn.utils.parametrizations.spectral_norm(nn.Conv2d(n, 8, 3, padding=1)) for n in (3, 8)]
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), nn.Flatten(), nn.Linear(512, 2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for verb in (gonio.balance_, gonio.recycle_):
        with suppress(NotApplicableError):
            verb(model, example=seeded(2, 3, 8, 8)).undo_()
    gonio.surgery.anatomy(model, example=seeded(2, 3, 8, 8))
    gonio.param_groups(model, matrices=True)
    gonio.param_groups(model, mup=True, base=model, lr=0.1)
    penalty = gonio.Penalty(model, [(nn.Conv2d, R.SRIP(1e-3)), (None, R.L2(1e-3))])
    assert float(penalty().detach()) > 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("verb", [gonio.rotate_, gonio.fold_])
def test_tensors_in_the_place_of_a_models_own_are_not_taken_for_them(verb: Callable[..., Edited]) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3))

        def forward(self, x: Tensor) -> Tensor:
            own = {name: 1.5 * value for name, value in self.inner.named_parameters()}
            return torch.func.functional_call(self.inner, own, (x,))

    model, options = Scaled(), {"gains": True} if verb is gonio.fold_ else {}
    before = model(X)
    with pytest.raises((NotApplicableError, NoMatchError), match=r"nothing to fold|rotate_: cannot"):
        verb(model, example=X, **options)
    assert torch.equal(model(X), before)


@NO_ENTRIES
def test_outputs_without_entries_are_recorded() -> None:
    model = nn.Sequential(
        nn.Linear(6, 0), nn.LayerNorm(0), nn.ReLU(), nn.Linear(0, 8), nn.LayerNorm(8), nn.Linear(8, 3)
    )
    with pytest.raises(NotApplicableError, match="rotate_"):
        gonio.rotate_(model, example=X)
    groups = gonio.param_groups(model, mup=True, base=model, lr=0.1)
    assert {group["lr"] for group in groups} == {0.1}


@pytest.mark.parametrize("act", [lambda m: gonio.match_statistics_(m, [X]), lambda m: gonio.doctor(m, batch=X)])
def test_a_weight_that_cannot_be_copied_is_an_error_in_words(act: Callable[[nn.Module], object]) -> None:
    class Plain(Tensor):
        pass

    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    model[0].weight = nn.Parameter(model[0].weight.detach().as_subclass(Plain))
    with pytest.raises(InvalidArgumentError, match=r"a copy of the model is needed; found it cannot be copied \(Run"):
        act(model)
