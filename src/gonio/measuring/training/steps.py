"""The figures of optimizer steps: a weight is copied before a step and compared with the weight after it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from math import atan, degrees, isfinite
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gonio.editing.steps import parameter_ids, real_optimizers
from gonio.errors import InvalidArgumentError
from gonio.geometry import matrix_view
from gonio.geometry.norms import whole
from gonio.measuring.reading.entry import TensorEntry
from gonio.measuring.training.equilibrium import Equilibrium, equilibrium
from gonio.measuring.training.rotation import angle_between, step_rotation
from gonio.optim.holding import step_of_hold
from gonio.surgery import sites
from gonio.surgery.graph import trace

Also = Collection[Literal["filter_rotation", "initial_angle", "attention"]]
ALSO = ("filter_rotation", "initial_angle", "attention")
TRAINING = (  # the columns of a CSV file, in this order
    *("learning_rate", "rotation", "predicted_rotation", "relative_update", "radial_share", "effective_rate"),
    *("filter_rotation_min", "filter_rotation_median", "filter_rotation_max", "initial_angle"),
)
Figures = dict[str, float]


def check_also(also: Also) -> None:
    """Refuse unknown figures."""
    unknown = [name for name in also if name not in ALSO]
    if isinstance(also, str) or unknown:
        raise InvalidArgumentError(f"Tracker(also=) takes {', '.join(ALSO)}", repr(also), "Pass a tuple of them.")


def checked_optimizers(model: nn.Module, optimizer: Any) -> list[Optimizer]:
    """The optimizers as a list, without their wrappers.

    Raises:
        InvalidArgumentError: for other objects, and optimizers of another model.
    """
    given = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    known = {id(p) for p in model.parameters()}
    for each in given:
        if not hasattr(each, "param_groups"):
            do = "Pass the torch optimizer itself, or a list of them."
            raise InvalidArgumentError("Tracker(optimizer=) is an optimizer", type(each).__name__, do)
        if not parameter_ids(each) & known:
            do = "Pass the optimizer that trains this model."
            found = f"a {type(each).__name__} of other parameters"
            raise InvalidArgumentError("Tracker(optimizer=) trains the model's parameters", found, do)
    return list({id(real): real for each in given for real in real_optimizers(each, verb="Tracker()")}.values())


# --- figures ------------------------------------------------------------------------------------------------------


class StepFigures:
    """The weights copied before a step, and their figures after it.

    Attributes:
        invariant: paths of the layers whose weights are scale-invariant; None if the model cannot be traced.
        predictions: the latest one of each layer.
    """

    def __init__(self, model: nn.Module, also: Also) -> None:
        graph = trace(model, training=True)
        self.invariant = None if graph.reason else graph.scale_invariant
        self.predictions: dict[str, Equilibrium] = {}
        self._model, self._also = model, frozenset(also)
        self._copies: list[tuple[TensorEntry, Tensor]] = []
        self._initial: dict[str, Tensor] = {}

    @torch.no_grad()
    def copy(self, entries: Sequence[TensorEntry], optimizer: Optimizer) -> None:
        """Copy the weights that the optimizer is about to change."""
        parameters = self._parameters()
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        mine = [entry for entry in entries if any(id(p) in held for p in parameters(entry))]
        self._copies = [(entry, weight.detach().clone()) for entry in mine if (weight := entry.read()) is not None]
        if "initial_angle" in self._also:
            for entry, weight in self._copies:
                self._initial.setdefault(entry.path, weight.to("cpu", copy=True))

    @torch.no_grad()
    def take(self, optimizer: Optimizer) -> list[tuple[TensorEntry, Figures]]:
        """The figures of the step, weight by weight, whose copies are released; none for a step that was skipped."""
        parameters, found = self._parameters(), []
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        while self._copies:
            entry, before = self._copies.pop(0)
            after = entry.read()
            if after is not None and after.shape == before.shape:
                largest = max((p for p in parameters(entry) if id(p) in groups), key=Tensor.numel)
                given = groups[id(largest)].get("lr")
                rate = None if given is None else float(given)  # Adafactor computes its own
                found.append((entry, self._figures(entry, before, after, _prediction(optimizer, largest, rate), rate)))
        return found if any(figures.get("relative_update") for _, figures in found) else []

    def _figures(
        self, entry: TensorEntry, before: Tensor, after: Tensor, prediction: Equilibrium, rate: float | None
    ) -> Figures:
        step = step_rotation(before, after)
        norm = float(step.norm)
        figures = {
            **({} if rate is None else {"learning_rate": rate}),
            "rotation": float(step.rotation),
            "relative_update": float(step.relative_update),
            "radial_share": float(step.radial_share),
        }
        self.predictions[entry.path] = prediction
        if prediction.rotation is not None:
            figures["predicted_rotation"] = prediction.rotation
        if norm and rate is not None and self.invariant is not None and entry.path in self.invariant:
            figures["effective_rate"] = rate / norm**2
        if "filter_rotation" in self._also and entry.layout is not None:
            rows = (matrix_view(whole(w), entry.layout) for w in (before, after))
            turned = step_rotation(*rows, by_row=True).rotation.nan_to_num(0)
            for name, value in (("min", turned.min()), ("median", turned.median()), ("max", turned.max())):
                figures[f"filter_rotation_{name}"] = float(value)
        if entry.path in self._initial:
            figures["initial_angle"] = degrees(angle_between(self._initial[entry.path].to(after.device), after))
        return {name: value for name, value in figures.items() if isfinite(value)}

    def _parameters(self) -> Callable[[TensorEntry], list[Tensor]]:
        """A function that gives the parameters from which the weight of an entry is computed."""
        modules = {site.path: site.module for site in sites(self._model)}

        def parameters(entry: TensorEntry) -> list[Tensor]:
            path, _, name = entry.name.rpartition(".")
            module = modules.get(path, self._model)
            own = module._parameters.get(name)
            if own is not None:
                return [own]
            lists = module._modules.get("parametrizations")
            return list(lists[name].parameters()) if isinstance(lists, nn.ModuleDict) and name in lists else []

        return parameters


def _prediction(optimizer: Optimizer, parameter: Tensor, rate: float | None) -> Equilibrium:
    """A held weight has no decay that an update could balance; with a fixed step it turns by arctan η at once."""
    held = step_of_hold(parameter)
    if held is None or not rate:
        return equilibrium(optimizer, parameter)
    return Equilibrium(atan(rate) if held == "fixed" else None, 0.0, "" if held == "fixed" else "held by hold_")
