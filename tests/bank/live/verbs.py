"""Every verb of gonio on one model of the bank: the same function, or it works, or one sentence of refusal."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_flatten

import gonio
from bank.live.case import Case
from gonio import init, optim
from gonio import nn as gnn
from gonio import parametrizations as P
from gonio import regularizers as R
from gonio.errors import GonioError, NoMatchError, RecipeError
from gonio.surgery.equivalent import call
from laws.snapshot import Snapshot, assert_restored, copied

LONGEST = 160  # characters of a refusal that the outcome keeps


class Fault(AssertionError):
    """A verb does something else than it promises."""


@dataclass(frozen=True)
class Verb:
    """One use of a verb.

    Attributes:
        apply: gives an object with `undo_`, or anything else.
        same: whether it promises the same function.
    """

    name: str
    apply: Callable[[nn.Module, Any], Any]
    same: bool = False


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    parameters = list(model.parameters()) or [nn.Parameter(torch.zeros(1))]  # torch refuses an empty list
    return torch.optim.SGD(parameters, lr=1e-3)


class _Kept:
    """An edit with the optimizer on which it depends."""

    def __init__(self, edited: Any, optimizer: torch.optim.Optimizer) -> None:
        self.edited, self.optimizer = edited, optimizer

    def undo_(self) -> None:
        self.edited.undo_()


def _held(model: nn.Module, **options: Any) -> _Kept:
    optimizer = _optimizer(model)
    return _Kept(optim.hold_(model, optimizer, **options), optimizer)


def _released(model: nn.Module, x: Any) -> None:
    kept = _held(model)
    optim.release_(model)
    del kept


def _measured(model: nn.Module, x: Any = None) -> Any:
    found = gonio.measure(model) if x is None else gonio.measure(model, batch=x)
    assert str(found)
    assert found.to_dict()
    rows = list(found.values())
    _expect(all(t.status == "measured" or t.reason for t in rows), "a row has neither figures nor a reason")
    named, state = {t.name for t in rows}, model.state_dict(keep_vars=True)
    seen = {id(tensor) for name, tensor in state.items() if name in named}
    missing = [name for name, t in state.items() if isinstance(t, Tensor) and name not in named and id(t) not in seen]
    _expect(not missing, f"no row for {missing[:3]}")


def _compared(model: nn.Module, x: Any) -> None:
    other = copied(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter *= 1.5
    found = gonio.measure(model, other)
    assert str(found)
    _expect(gonio.equivalent(model, model, example=x).absolute == 0, "a model is not equivalent to itself")


class _Penalised:
    """A penalty on weights with its gradient, computed once."""

    def __init__(self, model: nn.Module, x: Any) -> None:
        self.penalty = gonio.Penalty(model, [(None, R.Orthogonality(1e-4)), (None, R.ScaleShift(1e-4))])
        value = self.penalty()
        _expect(bool(torch.isfinite(value.detach())), "the penalty is not finite")
        if value.requires_grad:
            value.backward()
            model.zero_grad()

    def undo_(self) -> None:
        self.penalty.undo_()


def _tracked(model: nn.Module, x: Any) -> None:
    """A step of a copy with a tracker and without: bit-equal."""
    ended = []
    for with_tracker in (False, True):
        twin = copied(model)
        optimizer = _optimizer(twin)
        tracker = gonio.Tracker(twin, optimizer=optimizer, every=1, figures="training") if with_tracker else None
        _step(twin, x, optimizer)
        if tracker is not None:
            tracker.undo_()
        ended.append([p.detach().to_dense() for p in twin.parameters()])
    same = all(torch.equal(a, b) for a, b in zip(*ended, strict=True))
    _expect(same, "the tracker changes the step")


def _with_muon(model: nn.Module, x: Any) -> None:
    twin = copied(model)
    groups = gonio.param_groups(twin, 0.1, matrices=True)
    assert str(groups)
    grouped = [id(p) for group in groups for p in group["params"]]
    wanted = [id(p) for p in twin.parameters() if p.requires_grad]
    _expect(sorted(grouped) == sorted(wanted), "a parameter is in no group, or in two")
    _step(twin, x, optim.Muon(groups, lr=1e-3))
    _expect(all(bool(torch.isfinite(p).all()) for p in twin.parameters()), "a step of Muon is not finite")


def _decayed(model: nn.Module, x: Any) -> None:
    groups = gonio.param_groups(model, 0.1)
    assert str(groups)
    grouped = [id(p) for group in groups for p in group["params"]]
    wanted = [id(p) for p in model.parameters() if p.requires_grad]
    _expect(sorted(grouped) == sorted(wanted), "a parameter is in no group, or in two")


def _step(model: nn.Module, x: Any, optimizer: torch.optim.Optimizer) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        loss = sum(y.square().mean() for y in _floats(call(model, x)) if y.requires_grad)
    if isinstance(loss, Tensor):
        loss.abs().backward()
    optimizer.step()
    optimizer.zero_grad()


def _certified(model: nn.Module, x: Any) -> None:
    found = gonio.certify(model, x, steps=3)
    assert str(found)
    _expect(found.lower <= found.upper * (1 + 1e-6), f"lower bound {found.lower} above upper bound {found.upper}")


def _parametrized(template: Callable[[], Any]) -> Callable[[nn.Module, Any], Any]:
    def apply(model: nn.Module, x: Any) -> Any:
        edited = gonio.parametrize_(model, template())
        _floats(call(model, x))
        return edited

    return apply


def _folded_after(model: nn.Module, x: Any) -> Any:
    """Parametrized with the weights unchanged, folded again: the same function."""
    first = gonio.parametrize_(model, P.WeightNorm())
    try:
        second = gonio.fold_(model, example=x)
    except BaseException:
        first.undo_()
        raise
    return _Both(first, second)


def _swapped_and_folded(model: nn.Module, x: Any) -> Any:
    """Decoupled layers whose product is the plain one, and back."""
    plain = {"magnitude": gnn.magnitude.Linear(), "angular": gnn.angular.Cosine(), "weighted": "linear"}
    kept = {id(m) for m in model.modules() if m._forward_hooks}  # hooks stay with the layers that are replaced
    where = (lambda path, m: isinstance(m, nn.Linear) and id(m) not in kept) if kept else None
    first = gonio.swap_(model, gnn.DecoupledLinear.from_linear, where=where, **plain)
    try:
        second = gonio.fold_(model, example=x)
    except BaseException:
        first.undo_()
        raise
    return _Both(first, second)


def _held_and_folded(model: nn.Module, x: Any) -> Any:
    """The radii follow the folded weights: a step without a gradient changes nothing."""
    first = _held(model)
    try:
        second = gonio.fold_(model, example=x)
    except BaseException:
        first.undo_()
        raise
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    before = [parameter.detach().clone() for parameter in model.parameters()]
    first.optimizer.step()
    first.optimizer.zero_grad()
    for parameter, value in zip(model.parameters(), before, strict=True):
        moved = float((parameter.detach() - value).abs().max()) if value.numel() else 0.0
        _expect(moved < 1e-6, f"a step without a gradient moves a folded weight by {moved:.2g}")
        parameter.data.copy_(value)
    return _Both(first, second)


@torch.no_grad()
def _recycled(model: nn.Module, x: Any) -> None:
    """A dead filter and a duplicate are planted in each layer, and drawn anew: the same function as with them."""
    planted: dict[int, tuple[Tensor, Tensor]] = {}
    for module in model.modules():
        weight = module._parameters.get("weight") if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d)) else None
        if weight is None or is_lazy(weight) or weight.is_sparse or not weight.is_floating_point() or len(weight) < 4:
            continue
        for tensor in (weight, module._parameters.get("bias")):
            if tensor is not None and id(tensor) not in planted:
                planted[id(tensor)] = (tensor, tensor.detach().clone())
                tensor[1], tensor[3] = 0, tensor[2]
    try:
        before = _outputs(model, x)
        edited = gonio.recycle_(model, example=x)
        moved = _relative(_outputs(model, x), before)
        edited.undo_()
        after = _outputs(model, x)
    finally:
        for tensor, value in planted.values():
            tensor.copy_(value)
    _expect(moved <= 1e-5, f"the function changed by {moved:.2g}")
    _expect(all(map(torch.equal, after, before)), "the function after undo differs")


@dataclass(frozen=True)
class _Both:
    first: Any
    second: Any

    def undo_(self) -> None:
        self.second.undo_()
        self.first.undo_()


_RECIPES: dict[str, dict[str, Any]] = {
    "parametrize and penalty": {
        "parametrize": [{"where": "*", "use": "WeightNorm"}],
        "penalty": [{"where": "*", "use": "Orthogonality", "strength": 1e-4}],
    },
    "swap": {"swap": [{"where": "type:BatchNorm2d", "use": "SwitchableNorm2d"}]},
}


def _recipe(name: str) -> Callable[[nn.Module, Any], Any]:
    return lambda m, x: gonio.Recipe.from_dict({"name": "bank", **_RECIPES[name]}).apply_(m)


VERBS = (
    Verb("measure", lambda m, x: _measured(m)),
    Verb("measure(batch=)", _measured),
    Verb("measure(before, after)", _compared),
    Verb("certify", _certified),
    Verb("fold_", lambda m, x: gonio.fold_(m), same=True),
    Verb("fold_(example=)", lambda m, x: gonio.fold_(m, example=x), same=True),
    Verb("parametrize_, then fold_", _folded_after, same=True),
    Verb("balance_", lambda m, x: gonio.balance_(m), same=True),
    Verb("balance_(example=)", lambda m, x: gonio.balance_(m, example=x), same=True),
    Verb("balance_(level='layer')", lambda m, x: gonio.balance_(m, example=x, level="layer"), same=True),
    Verb("rotate_", lambda m, x: gonio.rotate_(m), same=True),
    Verb("rotate_(example=)", lambda m, x: gonio.rotate_(m, example=x), same=True),
    Verb("recycle_ of planted filters", _recycled),
    Verb("swap_ of the same product, then fold_", _swapped_and_folded, same=True),
    Verb("hold_, then fold_", _held_and_folded, same=True),
    Verb("init_ lecun_", lambda m, x: gonio.init_(m, init.lecun_)),
    Verb("init_ orthogonal_", lambda m, x: gonio.init_(m, init.orthogonal_, gain=1.0)),
    Verb("lsuv_", lambda m, x: gonio.lsuv_(m, x, function=init.lecun_, max_steps=2)),
    Verb("calibrate_", lambda m, x: gonio.calibrate_(m, [x])),
    Verb("match_statistics_", lambda m, x: gonio.match_statistics_(m, [x])),
    Verb("even_out_", lambda m, x: gonio.even_out_(m)),
    Verb("swap_ DecoupledConv2d", lambda m, x: gonio.swap_(m, gnn.DecoupledConv2d.from_conv)),
    Verb("swap_ DecoupledLinear", lambda m, x: gonio.swap_(m, gnn.DecoupledLinear.from_linear)),
    Verb("swap_ SwitchableNorm2d", lambda m, x: gonio.swap_(m, gnn.SwitchableNorm2d.from_batch_norm)),
    Verb("swap_ to_group_norm", lambda m, x: gonio.swap_(m, gnn.to_group_norm)),
    Verb("parametrize_ WeightNorm", _parametrized(P.WeightNorm), same=True),
    Verb("parametrize_ SpectralNorm", _parametrized(P.SpectralNorm)),
    Verb("parametrize_ Sphere", _parametrized(P.Sphere)),
    Verb("parametrize_ SpectralNorm(at_most=)", _parametrized(lambda: P.SpectralNorm(at_most=1.0))),
    Verb("parametrize_ Orthogonal", _parametrized(P.Orthogonal)),
    Verb("parametrize_ OrthogonalConv", _parametrized(P.OrthogonalConv)),
    Verb("hold_", lambda m, x: _held(m), same=True),
    Verb("hold_(norm='filters')", lambda m, x: _held(m, norm="filters", step="fixed"), same=True),
    Verb("hold_(norm='spectral')", lambda m, x: _held(m, norm="spectral")),
    Verb("release_", _released, same=True),
    Verb("shrink_intruders_", lambda m, x: gonio.shrink_intruders_(m, copied(m))),
    Verb("param_groups", _decayed),
    Verb("param_groups(matrices=True)", _with_muon),
    Verb("Penalty", lambda m, x: _Penalised(m, x)),
    Verb("Tracker", _tracked),
    Verb("Recipe parametrize and penalty", _recipe("parametrize and penalty")),
    Verb("Recipe swap", _recipe("swap")),
)


def _expect(true: bool, otherwise: str) -> None:
    if not true:
        raise Fault(otherwise)


def _floats(found: Any) -> list[Tensor]:
    leaves, _ = tree_flatten(found)
    kinds = [x for x in leaves if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())]
    return [x for x in kinds if x.numel()]


@torch.no_grad()
def _outputs(model: nn.Module, x: Any) -> list[Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return [y.detach().clone() for y in _floats(call(copied(model), x))]


def outcomes(case: Case, verbs: tuple[Verb, ...] = VERBS) -> dict[str, str]:
    """What each verb did: "same function", "works", "refused: …", or "fault: …"."""
    model, x = case.trained()
    before, expected = Snapshot.of(model, x), _outputs(model, x)
    found = {"fresh": _fault_of(lambda: fresh_findings(case)) or "works"}
    for verb in verbs:
        try:
            found[verb.name] = _outcome(verb, model, x, before, expected, case.tolerance)
        except Exception as error:  # whatever a verb lets through is the outcome
            found[verb.name] = f"fault: {type(error).__name__}: {error}"[:400]
            model, x = case.trained()
            before, expected = Snapshot.of(model, x), _outputs(model, x)
    return found


def _fault_of(run: Callable[[], Any]) -> str:
    try:
        run()
    except Exception as error:
        return f"fault: {type(error).__name__}: {error}"[:400]
    return ""


def fresh_findings(case: Case) -> None:
    """A model as its constructor leaves it has no finding above info but those that are true of it."""
    model, _ = case.fresh()
    found = [f for f in gonio.measure(model).findings if f.level != "info" and f.code not in case.findings]
    _expect(not found, "; ".join(f"{f.code} {f.path}: {f.found}" for f in found[:3]))


def _outcome(verb: Verb, model: nn.Module, x: Any, before: Snapshot, expected: list[Tensor], tolerance: float) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            edited = verb.apply(model, x)
    except GonioError as error:
        assert_restored(before, Snapshot.of(model, x))
        return _refusal(error)
    found = _outputs(model, x)
    if verb.same:
        moved = _relative(found, expected)
        _expect(moved <= tolerance, f"the function changed by {moved:.2g}")
    if hasattr(edited, "undo_"):
        assert str(edited)
        edited.undo_()
    assert_restored(before, Snapshot.of(model, x))
    return "same function" if verb.same else "works"


def _refusal(error: GonioError) -> str:
    message = str(error).strip()
    lines = message.splitlines()
    _expect(bool(lines) and (len(lines) == 1 or isinstance(error, RecipeError)), f"no single sentence: {message}")
    _expect("Traceback" not in message, f"a traceback as a refusal: {message}")
    _expect("please report" not in message, f"an edit was tried that cannot be right: {message}")
    return "refused: nothing to act on" if isinstance(error, NoMatchError) else f"refused: {lines[-1]}"[:LONGEST]


def _relative(found: list[Tensor], expected: list[Tensor]) -> float:
    _expect([y.shape for y in found] == [y.shape for y in expected], "outputs of other shapes")
    scale = max((float(y.abs().max()) for y in expected), default=0.0)
    largest = max((float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)), default=0.0)
    return largest / (scale or 1.0)
