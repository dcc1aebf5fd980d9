"""One foreign model through all of gonio: measure, convert, train, undo, fold, save, load."""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

import gonio
from catalog import seeded
from gonio import init
from gonio import nn as gnn
from gonio import parametrizations as P
from gonio import regularizers as R
from gonio.errors import NoMatchError, NotApplicableError
from gonio.surgery import activation_after, balance_, calibrate_, fold_, lsuv_
from gonio.surgery.equivalent import call, outputs
from gonio.surgery.facts import facts_of
from gonio.surgery.graph import trace

FOLD_LIMIT = {"float32": 1e-5, "float64": 1e-12}
ROUNDINGS = 10  # how many times the rounding of the model itself folding may move, where that is above the limit


@dataclass
class Passage:
    """What came of one model.

    Attributes:
        traced: why `torch.fx` cannot trace the model; empty if it can.
        steps: of each step "passed", "refused: …" or "failed: …".
    """

    model: str
    parameters: int = 0
    input: list[int] = field(default_factory=list)
    traced: str = ""
    steps: dict[str, str] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def failed(self) -> list[str]:
        return [f"{name}: {outcome}" for name, outcome in self.steps.items() if outcome.startswith("failed")]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def prepared(model: nn.Module, x: Any) -> nn.Module:
    """Running statistics of data, and scales and shifts off the values that constructors choose.

    Where these shifts make the model's own outputs overflow, its statistics are taken once more.
    """
    _calibrated(model, x)
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            if parameter.dim() == 1:
                parameter += 0.1 * seeded(*parameter.shape, seed=seed)
    model.eval()
    if not all(bool(output.isfinite().all()) for output in outputs(model, x)):
        _calibrated(model, x)
    return model


def _calibrated(model: nn.Module, x: Any) -> None:
    with suppress(NoMatchError):  # nothing keeps statistics
        calibrate_(model, [x])


# Every verb, on whatever it can act on.
VERBS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "init_": lambda m, x: gonio.init_(m, init.lecun_),
    "lsuv_": lambda m, x: lsuv_(m, x, where=_first_two(m), function=init.lecun_, max_steps=2),
    "calibrate_": lambda m, x: calibrate_(m, [tree_map(_shifted, x)]),
    "balance_": lambda m, x: balance_(m, example=x),
    "fold_": lambda m, x: fold_(m, example=x),
    "swap_ convolutions": lambda m, x: gonio.swap_(m, gnn.DecoupledConv2d.from_conv, where=_plain(nn.Conv2d)),
    "swap_ linear layers": lambda m, x: gonio.swap_(m, gnn.DecoupledLinear.from_linear, where=_plain(nn.Linear)),
    "swap_ norms": lambda m, x: gonio.swap_(m, gnn.SwitchableNorm2d.from_batch_norm),
    "parametrize_": lambda m, x: gonio.parametrize_(m, P.WeightNorm()),
    "parametrize_ twice": lambda m, x: _Both(m),
    "Penalty": lambda m, x: _Attached(m, x),
}


def _shifted(leaf: Any) -> Any:
    return leaf + 1 if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _in(dtype: torch.dtype) -> Callable[[Any], Any]:
    return lambda leaf: leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


class _Both:
    """Two edits of which the second stands on the first."""

    def __init__(self, model: nn.Module) -> None:
        first = _first_two(model, more=("Conv1D",))  # transformers' own linear layer
        self.edits = [
            gonio.parametrize_(model, P.SpectralNorm(), where=first),
            gonio.init_(model, init.lecun_, where=lambda path, module: not first(path, module)),
        ]

    def undo_(self) -> None:
        for edit in reversed(self.edits):
            edit.undo_()


class _Attached:
    """A penalty on weights and outputs, computed once."""

    def __init__(self, model: nn.Module, x: Any) -> None:
        few = _first_two(model)
        rules = [(None, R.Orthogonality(1e-4)), (few, R.SelfOrthogonality(1e-2)), (None, R.ScaleShift(1e-4))]
        self.penalty = gonio.Penalty(model, rules)
        tapped = [module for path, module in model.named_modules() if few(path, module)]
        for module in tapped:  # outputs count in training; the rest of the model would move its statistics
            module.train()
        call(model, x)
        assert bool(torch.isfinite(self.penalty()))
        for module in tapped:
            module.eval()

    def undo_(self) -> None:
        self.penalty.undo_()


def _plain(kind: type[nn.Module]) -> Callable[[str, nn.Module], bool]:
    """Layers of exactly this class: converters refuse subclasses that compute something else, and all with them."""
    return lambda path, module: type(module) is kind


def _first_two(model: nn.Module, *, more: tuple[str, ...] = ()) -> Callable[[str, nn.Module], bool]:
    """Two layers that share no weight, where each costs a forward pass."""
    uses = Counter(id(p) for m in model.modules() for p in m._parameters.values())
    found = [m for m in model.modules() if type(m) in (nn.Linear, nn.Conv2d) or type(m).__name__ in more]
    chosen = [m for m in found if uses[id(m._parameters["weight"])] == 1][:2] or found[:2]
    return lambda path, module: any(module is one for one in chosen)


def check_verb(verb: Callable[[nn.Module, Any], Any], model: nn.Module, x: Any) -> str:
    """Apply and undo; everything must be as before, to the bit. Returns "passed", or why it was refused."""
    before = _bits(model, x)
    try:
        edited = verb(model, x)
    except (NoMatchError, NotApplicableError) as error:
        _assert_same(before, _bits(model, x))  # a refusal changes nothing
        return f"refused: {error}"[:200]
    assert str(edited)
    edited.undo_()
    _assert_same(before, _bits(model, x))
    return "passed"


def _bits(model: nn.Module, x: Any) -> dict[str, Any]:
    hooks = [len(v) for m in model.modules() for k, v in vars(m).items() if k.endswith("_hooks")]
    return {
        "classes": [(path, type(m), m.training) for path, m in model.named_modules(remove_duplicate=False)],
        "parameters": [(path, id(p)) for path, p in model.named_parameters(remove_duplicate=False)],
        "hooks": sum(hooks),
        "state": {key: value.clone() for key, value in model.state_dict().items()},
        "outputs": outputs(model, x),
    }


def _assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    for name in ("classes", "parameters", "hooks"):
        assert before[name] == after[name], f"{name} differ"
    assert list(before["state"]) == list(after["state"]), "keys differ"
    for key, value in before["state"].items():
        assert torch.equal(value, after["state"][key]), f"{key} differs"
    for old, new in zip(before["outputs"], after["outputs"], strict=True):
        assert torch.equal(old, new), "the output differs"


def walk(name: str, build: Callable[[], tuple[nn.Module, Any]], folder: Path, *, verbs: bool) -> Passage:
    """All steps with one model; a step that fails is recorded, and the others go on where they can.

    Args:
        name: of the model.
        build: makes the model and an example that it takes: a tensor, a tuple or a dict.
        folder: for the checkpoint.
        verbs: whether each verb is applied and undone too, beside the passage itself.
    """
    start, found = time.perf_counter(), Passage(name)
    with _recorded(found, "build"):
        model, x = build()
        found.input = list(x.shape) if isinstance(x, Tensor) else []
        found.parameters = sum(p.numel() for p in model.parameters())
        found.traced = trace(model, training=False).reason
        prepared(model, x)
    if not found.failed:
        with _recorded(found, "measure"):
            _measure(found, model)
        if verbs:
            for verb, apply in VERBS.items():
                with _recorded(found, f"undo of {verb}"):
                    found.steps[f"undo of {verb}"] = check_verb(apply, model, x)
        with _recorded(found, "convert, train, undo"):
            _convert_and_train(found, model, x)
        for dtype in (torch.float32, torch.float64):
            with _recorded(found, f"fold in {str(dtype).removeprefix('torch.')}"):
                _fold(found, copy.deepcopy(model).to(dtype), tree_map(_in(dtype), x), dtype, folder)
    found.seconds = round(time.perf_counter() - start, 2)
    return found


@contextmanager
def _recorded(found: Passage, step: str) -> Iterator[None]:
    try:
        yield
        found.steps.setdefault(step, "passed")
    except Exception as error:  # the outcome of this step; the sweep goes on
        found.steps[step] = f"failed: {type(error).__name__}: {error}"[:400]


def _measure(found: Passage, model: nn.Module) -> None:
    measured = gonio.measure(model)
    assert str(measured)
    found.figures["tensors measured"] = len(measured.to_dict()["tensors"])
    found.figures["activations known"] = len(activation_after(model))


def _convert_and_train(found: Passage, model: nn.Module, x: Any) -> None:
    """A step with the converted model moves every trained parameter; the undo leaves the optimizer usable."""
    before = _bits(model, x)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3, momentum=0.9)
    edits = [gonio.parametrize_(model, P.WeightNorm(), optimizer=optimizer)]
    if any(facts_of(m).why_not_affine and isinstance(m, nn.BatchNorm2d) for m in model.modules()):
        edits.append(gonio.swap_(model, gnn.SwitchableNorm2d.from_batch_norm, optimizer=optimizer))
    found.figures["converted"] = sum(len(edit.changes) for edit in edits)
    model.train()
    loss = sum(output.float().square().mean() for output in _flat(call(model, x)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    model.eval()
    assert bool(torch.isfinite(loss)), "the loss is not finite"
    for edit in reversed(edits):
        edit.undo_()
    after = _bits(model, x)
    for name in ("classes", "parameters", "hooks"):
        assert before[name] == after[name], f"{name} differ after training and undo"
    assert list(before["state"]) == list(after["state"]), "keys differ after training and undo"
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters() if p.requires_grad}, "the optimizer holds other parameters"


def _flat(output: Any) -> list[Tensor]:
    leaves, _ = tree_flatten(output)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _fold(found: Passage, model: nn.Module, x: Any, dtype: torch.dtype, folder: Path) -> None:
    """Parametrized, folded, saved and loaded into a twin: the same function within the limits."""
    kind = str(dtype).removeprefix("torch.")
    gonio.parametrize_(model, P.WeightNorm())
    expected, twin = outputs(model, x), copy.deepcopy(model)
    edited = fold_(model)
    now = outputs(model, x)
    moved = _relative(now, expected)
    found.figures[f"fold deviation {kind}"] = moved
    found.figures["norms folded"] = sum("folded into" in change.what for change in edited.changes)
    found.figures["fold notes"] = [note[:300] for note in edited.notes[:5]]
    if moved > FOLD_LIMIT[kind]:
        own = _own_rounding(twin, x)
        found.figures[f"rounding {kind}"] = own
        assert moved <= ROUNDINGS * own, f"deviates by {moved:.2g}, and the model's own rounding is {own:.2g}"
        found.steps[f"fold in {kind}"] = f"passed within the model's own rounding: {moved:.2g}, {own:.2g}"
    path = folder / f"{found.model.replace('/', '_')}.safetensors"
    save_file({key: value.clone().contiguous() for key, value in model.state_dict().items()}, path)
    fold_(twin)
    twin.load_state_dict(load_file(path))
    path.unlink()
    for a, b in zip(outputs(twin, x), now, strict=True):
        assert torch.equal(a, b), "the loaded model computes something else"


def _own_rounding(model: nn.Module, x: Any) -> float:
    """How far rounding moves the model's outputs: the runs of the model and of three neighbours, whose weights are
    one rounding away, against the model's float64 run. One run alone may be close by chance.
    """
    runs = [outputs(_neighbour(model, seed), x) for seed in range(4)]
    wide = outputs(copy.deepcopy(model).double(), tree_map(_in(torch.float64), x))
    return max(_relative(run, wide) for run in runs)


def _neighbour(model: nn.Module, seed: int) -> nn.Module:
    """The same model for seed 0, otherwise one with each weight up or down by at most one rounding."""
    found = copy.deepcopy(model)
    with torch.no_grad():
        for index, parameter in enumerate(found.parameters() if seed else ()):
            up_or_down = seeded(*parameter.shape, seed=1000 * seed + index, dtype=parameter.dtype).sign()
            parameter *= 1 + torch.finfo(parameter.dtype).eps * up_or_down
    return found


def _relative(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference over all outputs, relative to the largest expected value."""
    scale = max(float(y.abs().max()) for y in expected)
    largest = max(float((a.double() - b.double()).abs().max()) for a, b in zip(found, expected, strict=True))
    return largest / (scale or 1.0)
