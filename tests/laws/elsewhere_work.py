"""What runs on the second device of :mod:`laws.elsewhere`, and on the CPU beside it; `python -m` writes what was found.

Each piece of work returns what is compared: the two must agree, and everything of the model must stay on the device.
"""

from __future__ import annotations

import copy
import json
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gonio
from catalog import VERBS, VerbCase
from catalog.cases import seeded
from gonio.errors import GonioError
from gonio.lab.running.training import execute_run
from gonio.lab.tasks import digits
from gonio.lab.tasks.task import Task
from gonio.parametrizations import SpectralNorm
from laws.elsewhere import DEVICE, register, second_device
from laws.support import perturbed

Move = Callable[[nn.Module], nn.Module]


def _state(model: nn.Module) -> dict[str, Any]:
    return {name: x.detach().cpu().double().tolist() for name, x in model.state_dict().items() if isinstance(x, Tensor)}


def _signless(state: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """A state in which singular vectors, whose common sign is arbitrary, have none."""
    owners = [name for name, each in model.named_modules() if isinstance(each, SpectralNorm)]
    owned = {f"{owner}.{name}" for owner in owners for name, _ in model.get_submodule(owner).named_buffers()}
    return {name: torch.tensor(x).abs().tolist() if name in owned else x for name, x in state.items()}


def _all_there(model: nn.Module, device: str) -> None:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    left = [name for name, tensor in tensors if tensor.device.type != device]
    assert not left, f"left the device: {left}"


def applied(case: VerbCase, device: str) -> dict[str, Any]:
    """The model after a verb, what the verb says, and how far its undo is from the model before."""
    torch.manual_seed(0)
    model = copy.deepcopy(perturbed(case.model()).eval()).to(device)
    before = _state(model)
    try:
        edited = case.apply(model)
    except GonioError as error:  # a copy is refused, as that of a model with a hold; then it is so on every device
        return {"refused": type(error).__name__}
    _all_there(model, device)
    found = {"state": _signless(_state(model), model), "said": str(edited)}
    edited.undo_()
    _all_there(model, device)
    assert _state(model) == before, "its undo did not restore the model"
    return found


def measured(device: str) -> dict[str, Any]:
    """Figures of a network, with a batch on the CPU and with every figure on request."""
    model = _network().to(device)
    whole = gonio.measure(model, batch=seeded(4, 2, 5, 5), extra_figures=("operator_norm", "quantisation"))
    return whole.to_dict()


def changed(device: str) -> dict[str, Any]:
    """The difference of a network on the CPU and one on the device."""
    before, after = _network(), _network().to(device)
    with torch.no_grad():
        after[4].weight.mul_(1.5)
    return gonio.measure(before, after).to_dict()


def tracked(device: str) -> dict[str, Any]:
    """What a tracker records of three steps."""
    model = _network().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tracker = gonio.Tracker(model, every=1, optimizer=optimizer)
    for step in range(3):
        model(seeded(4, 2, 5, 5).to(device)).square().mean().backward()
        optimizer.step()
        tracker.step(step)
        optimizer.zero_grad()
    return {"records": str(tracker)}


def treated(device: str) -> dict[str, Any]:
    """What the doctor does to a network with a dead filter."""
    model = _network().to(device)
    with torch.no_grad():
        for parameter in model[4].parameters():
            parameter[2] = 0
    return {"said": str(gonio.doctor(model, batch=seeded(4, 2, 5, 5)))}


def known(device: str) -> dict[str, Any]:
    """The anatomy of an attention block, confirmed by running on an example of the CPU."""
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True).eval().to(device)
    return {"said": str(gonio.surgery.anatomy(block, example=seeded(3, 5, 8)))}


def ran(device: str) -> dict[str, Any]:
    """One run of a study: built, trained for an epoch on augmented examples, judged, attacked and measured."""
    training = gonio.lab.TrainingConfig(epochs=1, batch_size=25, lr=0.05)
    plan = gonio.lab.make_plan(["self-orthogonality"], task="digits", seeds=1, training=training, robust=True)
    plan = replace(plan, device=device, measure=gonio.lab.plan.Measure("angle_spread", {}))
    record = execute_run(plan, plan.recipes[1], 0)["record"]
    return {key: value for key, value in record.items() if key != "seconds"}


def placed(device: str) -> dict[str, Any]:
    """Where a task's examples are while it trains: on the device unless their augmentation needs the CPU."""
    there = digits().on(torch.device(device))
    batches = [next(_shuffled(task)) for task in (digits(), there)]
    assert all(torch.equal(one.cpu(), other.cpu()) for one, other in zip(*batches, strict=True))
    own = replace(digits(), augment=lambda x, draw: x + torch.randn(x.shape, generator=draw)).on(torch.device(device))
    return {"own": own.train.inputs.device.type == "cpu", "built in": there.train.inputs.device.type == device}


def _shuffled(task: Task) -> Iterator[tuple[Tensor, Tensor]]:
    return task.train.shuffled(25, seed=0, epoch=0, smallest=2, augment=task.augment, workers=0)


def _network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(100, 6), nn.ReLU(),
        nn.Linear(6, 3),
    ).eval()  # fmt: skip


# --- controls -----------------------------------------------------------------------------------------------


def mixing(device: str) -> dict[str, Any]:
    """Adds a tensor of the CPU to a weight."""
    model = _network().to(device)
    return {"sum": float((model[4].weight + torch.ones(100)).sum())}


def drawing(device: str) -> dict[str, Any]:
    """Draws weights from a generator of the CPU."""
    model = _network().to(device)
    with torch.no_grad():
        model[4].weight.normal_(generator=torch.Generator().manual_seed(0))
    return _state(model)


def leaving(device: str) -> dict[str, Any]:
    """Hands a weight to NumPy."""
    return {"sum": float(_network().to(device)[4].weight.detach().numpy().sum())}


WORK: dict[str, Callable[[str], dict[str, Any]]] = {
    **{case.name: lambda device, case=case: applied(case, device) for case in VERBS},  # type: ignore[misc]
    "measure": measured,
    "measure two models": changed,
    "Tracker": tracked,
    "doctor": treated,
    "anatomy": known,
    "a run of a study": ran,
    "examples of a task": placed,
}
CONTROLS = {"mixing": mixing, "drawing": drawing, "leaving": leaving}


def main(path: str) -> None:
    """Do everything on both devices; write the two results, or the error, by name."""
    register()
    found: dict[str, Any] = {}
    for name, work in {**WORK, **CONTROLS}.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                on_cpu = work("cpu")
                with second_device():
                    found[name] = [on_cpu, work(DEVICE)]
        except Exception:  # reported by the parent as the failure of this case
            found[name] = traceback.format_exc()
    Path(path).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
