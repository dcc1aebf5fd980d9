"""A fake accelerator: tensors of another device on a CPU build of torch, and what would make it wait for the CPU.

torch lends the slot of third-party devices to Python, and `FakeTensorMode` gives tensors of that device a shape without
values. An operation on tensors of two devices raises there, as on an accelerator. :class:`Watch` records, with the
place in gonio, what an accelerator waits for: a number that the CPU reads, a shape that depends on values, a copy
between the devices. Both forms of a formula run: the plain one, and the one that ordinary tensors get.

The registration lasts as long as the process, so the law runs this file in a process of its own.
"""

from __future__ import annotations

import copy
import json
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

import gonio
from catalog import PARAMETRIZATIONS, REGULARIZERS, ParametrizationCase, RegularizerCase
from gonio import parametrizations as P
from gonio import regularizers as R
from gonio.optim import holding
from gonio.parametrizations import spectral_views
from laws.support import MODULES, ModuleCase, control, parametrized

DEVICE = "fakegpu"
READS = {"_local_scalar_dense", "equal", "is_nonzero"}
SHAPES = {"nonzero", "unique_dim", "_unique2", "masked_select"}
STEPS = 2
Phases = dict[str, list[str]]  # what was recorded, by the part of a training in which it happened


# --- the device -------------------------------------------------------------------------------------


class Watch(TorchDispatchMode):
    """Records synchronisation points; a number that is read is 1, and a shape that is waited for has one entry."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        tensors = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        devices = {x.device.type for x in tensors if x.device.type != "meta"}
        if DEVICE in devices and name in READS:
            self.note("reads a number")
            return _one(tensors[0].dtype, name)
        if DEVICE in devices and name in SHAPES:
            self.note("waits for a shape")
            return torch.zeros(1, tensors[0].ndim, dtype=torch.long, device=DEVICE)
        if DEVICE in devices and name.startswith("index") and any(x.device.type == "cpu" and x.ndim for x in tensors):
            self.note("copies indices")
        result = func(*args, **(kwargs or {}))
        waits = not (kwargs or {}).get("non_blocking") or result.device.type == "cpu"
        if name in ("_to_copy", "copy_") and waits and {result.device.type, *devices} == {"cpu", DEVICE}:
            self.note("copies between devices")
        return result

    def note(self, event: str) -> None:
        self.events.append(f"{event}: {place()}")


def _one(kind: torch.dtype, name: str) -> bool | int | float:
    if name != "_local_scalar_dense" or kind is torch.bool:
        return True
    return 1.0 if kind.is_floating_point else 1


def place() -> str:
    """The innermost line of gonio that runs: file and function."""
    frames = [frame for frame in traceback.extract_stack() if "/src/gonio/" in frame.filename]
    return f"{Path(frames[-1].filename).name} {frames[-1].name}" if frames else "outside gonio"


@contextmanager
def accelerator() -> Iterator[Watch]:
    """Tensors without values, and a record of what happens; `torch.tensor(…, device=)` is one more copy."""
    with FakeTensorMode(), Watch() as watch:
        original = torch.tensor, Tensor.new_tensor

        def tensor(data: Any, *, device: Any = None, **options: Any) -> Tensor:
            made = original[0](data, **options)
            if device is None or torch.device(device).type != DEVICE:
                return made
            watch.note("copies between devices")
            return torch.empty_like(made, device=device)

        def new_tensor(self: Tensor, data: Any, **options: Any) -> Tensor:
            return tensor(data, device=self.device, **{"dtype": self.dtype, **options})

        torch.tensor, Tensor.new_tensor = tensor, new_tensor
        try:
            yield watch
        finally:
            torch.tensor, Tensor.new_tensor = original


@contextmanager
def as_ordinary(fast: bool) -> Iterator[None]:
    """Fake tensors as ordinary ones: their tables are kept and, where `fast`, the second form of a formula runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spectral_views, "Tensor", FakeTensor)
        patch.setattr(spectral_views, "_TAPS", {})
        for name, module in list(sys.modules.items()):
            if fast and name.startswith("gonio.") and "ordinary_eager" in vars(module):
                patch.setattr(module, "ordinary_eager", lambda *_: True)
        yield


def moved(module: nn.Module) -> nn.Module:
    """A copy of a module of real tensors, on the fake device."""
    return copy.deepcopy(module, {id(t): fake(t) for t in chain(module.parameters(), module.buffers())})


def fake(tensor: Tensor) -> Tensor:
    found = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=DEVICE)
    return nn.Parameter(found, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else found


# --- what runs on it --------------------------------------------------------------------------------


def trained(case: ModuleCase) -> Phases:
    """Training steps and an evaluation of a layer."""
    original = case.make()
    with accelerator() as watch:
        module, x = moved(original), torch.empty(case.shape, device=DEVICE, requires_grad=True)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        for _ in range(STEPS):
            module(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        training, watch.events = watch.events, []
        module.eval()(x)
    return {"step": training, "evaluation": watch.events}


def penalised(case: RegularizerCase) -> Phases:
    """A penalty on a layer whose weight or outputs have the shape of the case."""
    shape = case.shape if case.reads == "weight" else (case.shape[1], 3, *[1] * (len(case.shape) - 2))
    layer = nn.Linear(shape[1], shape[0]) if len(shape) == 2 else nn.Conv2d(shape[1], shape[0], shape[2:])
    return with_penalty(layer, case.make())


def with_penalty(layer: nn.Module, regularizer: R.Regularizer, *, forwards: int = 1) -> Phases:
    """A penalty that is built, called, added to gradients, and whose values are read."""
    with accelerator() as watch:
        layer = moved(layer)
        x = torch.empty((2, layer.weight.shape[1], *[8] * (layer.weight.ndim - 2)), device=DEVICE)
        penalty = gonio.Penalty(layer, [(None, regularizer)])
        found, watch.events = {"build": watch.events}, []
        for _ in range(STEPS):
            outputs = sum(layer(x).sum() for _ in range(forwards))
            (outputs + penalty()).backward()
        found["step"], watch.events = watch.events, []
        penalty.values()
        found["values"], watch.events = watch.events, []
        for _ in range(STEPS if isinstance(regularizer, R.WeightRegularizer) else 0):
            penalty.add_grads_()
        found["add_grads_"] = watch.events
    return found


def ticked(case: ParametrizationCase) -> Phases:
    """Steps of an optimizer that advance singular vectors."""
    original = parametrized(case)
    with accelerator() as watch:
        layer = moved(original)
        P.tick_(layer)
        found, watch.events = {"first tick": watch.events}, []
        for _ in range(STEPS):
            P.tick_(layer)
        found["tick"] = watch.events
    return found


def attached(case: ParametrizationCase) -> Phases:
    """A layer that is on the device when it is parametrized."""
    original = case.layer()
    with accelerator() as watch:
        layer = moved(original)
        P.attach(layer, "weight", case.make())
    return {"build": watch.events}


def tracked() -> Phases:
    """A Tracker in steps in which it measures and in others."""
    original = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    with accelerator() as watch:
        model = moved(original)
        tracker = gonio.Tracker(model, every=2)
        found, watch.events = {"build": watch.events}, []
        tracker.step(1)
        found["step"], watch.events = watch.events, []
        tracker.step(2)
        found["measurement"] = watch.events
    return found


def turned(make: Callable[[nn.Module, torch.optim.Optimizer], Any]) -> Phases:
    """Steps of an optimizer whose updates are turned or held."""
    original = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    with accelerator() as watch:
        model = moved(original)
        optimizer = gonio.optim.Muon(gonio.param_groups(model, matrices=True), lr=0.1)
        made = make(model, optimizer)
        found = {}
        for name in ("first step", "step"):
            watch.events = []
            model(torch.empty(2, 6, device=DEVICE)).sum().backward()
            optimizer.step()
            found[name] = watch.events
        del made
    return found


class _Reading(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(self.bias.sum())


class _Mixing(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.ones(3)


class _Listing(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.tensor([1.0, 2.0, 3.0], device=x.device)


class _InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * grad.sum().item()


class _Backward(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return _InBackward.apply(super().forward(x))


CONTROLS = [control(kind) for kind in (nn.Linear, _Reading, _Mixing, _Listing, _Backward)]


def works(modules: Sequence[ModuleCase] = MODULES) -> Iterator[tuple[str, Callable[[], Phases]]]:
    """What is run, by name."""
    for case in modules:
        yield f"module {case.name}", lambda case=case: trained(case)
    for case in REGULARIZERS:
        yield f"penalty {case.name}", lambda case=case: penalised(case)
    yield "penalty of samples", lambda: with_penalty(nn.Linear(5, 4), R.SelfOrthogonality(1.0, samples=4))
    yield "penalty of two runs", lambda: with_penalty(nn.Linear(5, 4), R.SelfOrthogonality(1.0), forwards=2)
    for case in PARAMETRIZATIONS:
        yield f"attach {case.name}", lambda case=case: attached(case)
        if case.name.startswith("SpectralNorm"):
            yield f"tick {case.name}", lambda case=case: ticked(case)
    yield "Tracker", tracked
    yield "Muon", lambda: turned(lambda model, optimizer: None)
    yield "hold_", held


def held() -> Phases:
    """Norms are read after the first steps, which waits; the steps after these are looked at here."""
    before, holding.CHECKED = holding.CHECKED, 0
    try:
        return turned(lambda model, optimizer: gonio.hold_(model, optimizer))
    finally:
        holding.CHECKED = before


def main(path: str) -> None:
    """Run everything in both forms; write what was recorded, or the error, by name."""
    backend_registration._setup_privateuseone_for_python_backend(DEVICE)
    found: dict[str, Phases | str] = {}
    for fast in (False, True):
        for name, work in works([*MODULES, *CONTROLS]):
            try:
                with as_ordinary(fast), warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # torch warns of pointers of tensors that have no values
                    found[f"{name}{', fast' * fast}"] = work()
            except Exception:  # reported by the parent as the failure of this case
                found[f"{name}{', fast' * fast}"] = traceback.format_exc()
    Path(path).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
