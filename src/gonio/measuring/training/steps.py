"""The figures of optimizer steps: a weight is copied before a step and compared with the weight after it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import atan, degrees, isfinite
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gonio.editing.steps import computes_gradients
from gonio.editing.where import modules_at
from gonio.editing.wrappers import inner_optimizers, parameter_ids, real_optimizers
from gonio.errors import InvalidArgumentError, with_article
from gonio.execution import is_sharded, leaves_of
from gonio.geometry import matrix_view
from gonio.measuring.figures.moments import Moments, StateMeasurement, StateSums, state_row, state_sums
from gonio.measuring.findings.state_rules import TURNED, Gradient, StepFacts
from gonio.measuring.reading.entry import TensorEntry
from gonio.measuring.reading.optimizers import number, options_of
from gonio.measuring.training.equilibrium import Equilibrium, equilibrium
from gonio.measuring.training.rotation import StepRotation, step_sums
from gonio.measuring.training.shards import ShardSums, Sums, divided, local, of_rows, row_sums, why_not
from gonio.optim.holding import step_of_hold
from gonio.surgery.graph import trace

Asked = Literal["filter_rotation", "initial_angle", "gradient", "state", "attention"]
Also = Collection[Asked]
ALSO = get_args(Asked)
TRAINING = (  # the columns of a CSV file, in this order
    *("learning_rate", "rotation", "predicted_rotation", "relative_update", "radial_share", "effective_rate"),
    *("filter_rotation_min", "filter_rotation_median", "filter_rotation_max", "initial_angle"),
    *("gradient_norm", "gradient_rms", "update_rms"),
)
Figures = dict[str, float]


def check_also(also: Also) -> None:
    """Refuse unknown figures."""
    unknown = [name for name in also if name not in ALSO]
    if isinstance(also, str) or unknown:
        raise InvalidArgumentError(f"Tracker(also=) takes {', '.join(ALSO)}", repr(also), "Pass a tuple of them.")


def checked_optimizers(model: nn.Module, optimizer: Any) -> tuple[list[Any], list[Optimizer]]:
    """The optimizers as they were given, each of which contains one that no other has, and those in them.

    Raises:
        InvalidArgumentError: for other objects, optimizers of another model, and wrappers that divide the parameters
            over processes.
    """
    given = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    known = {id(p) for p in model.parameters()}
    for each in given:
        if not hasattr(each, "param_groups"):
            do = "Pass the torch optimizer itself, or a list of them."
            raise InvalidArgumentError("Tracker(optimizer=) is an optimizer", type(each).__name__, do)
        if not parameter_ids(each) & known:
            do = "Pass the optimizer that trains this model, or leave it out and call step() after each step."
            found = f"{with_article(type(each).__name__)} of other parameters"
            raise InvalidArgumentError("Tracker(optimizer=) trains the model's parameters", found, do)
    watched, real = list[Any](), dict[int, Optimizer]()
    for each in sorted(given, key=lambda each: not inner_optimizers(each)):
        inner = {id(one): one for one in real_optimizers(each, verb="Tracker()")}
        if elsewhere := len(parameter_ids(each) - set[int]().union(*map(parameter_ids, inner.values()))):
            found = f"{with_article(type(each).__name__)}, {elsewhere} of whose parameters other optimizers step"
            do = "Leave optimizer= out, and call step() after each step."
            raise InvalidArgumentError("Tracker(optimizer=) measures the steps of one process", found, do)
        watched += [] if inner.keys() <= real.keys() else [each]
        real |= inner
    return watched, list(real.values())


def of_several(entries: Iterable[TensorEntry], optimizers: Sequence[Optimizer]) -> list[str]:
    """The layers whose weight is computed from parameters that different optimizers step, such as gains apart."""
    owners = {key: number for number, each in enumerate(optimizers) for key in parameter_ids(each)}
    found = []
    for entry in entries:
        try:
            leaves = [] if entry.load is None else _leaves_of(entry.load)
        except Exception:  # the model's own code; the measurement says why
            continue
        if len({owners[id(p)] for p in leaves if id(p) in owners}) > 1:
            found.append(entry.path)
    return found


# --- what rules judge -------------------------------------------------------------------------------------------------


@dataclass
class _Past:
    """Of one weight, what earlier measured steps have shown.

    Attributes:
        first: the first measured step at which its norm was not 0. It counts from the step after the last measured one
            before, at which it may have begun.
        still: measured steps in a row that did not turn it.
        gradient: what it had in these steps.
    """

    first: int | None = None
    still: int = 0
    gradient: Gradient = "none"


class JudgedSteps:
    """The facts of each weight at the latest measured step, gathered over the measured steps of a training."""

    def __init__(self) -> None:
        self.facts: list[StepFacts] = []
        self._past: dict[str, _Past] = {}
        self._latest: dict[str, int] = {}

    @torch.no_grad()
    def look_at_gradient(self, path: str, parameters: Sequence[Tensor]) -> None:
        """Note what gradient a weight has, before it is gone; its values only of one that the last step did not turn.

        Reading them waits for the device.
        """
        past = self._past.setdefault(path, _Past())
        given = [p.grad for p in parameters if p.grad is not None]
        if not given or past.gradient in ("others", "unknown"):
            return
        if not past.still or any(is_sharded(each) or each.layout != torch.strided for each in given):
            past.gradient = "unknown" if past.still else "zeros"
        else:
            past.gradient = "others" if any(bool(each.any()) for each in given) else "zeros"

    def judge(self, entry: TensorEntry, sums: Tensor, number: int, *, trained: bool) -> None:
        """Add the facts of one weight after its step.

        Args:
            sums: as of :func:`step_sums`.
            number: of the step.
            trained: whether it requires a gradient and has a learning rate.
        """
        found, past = StepRotation.of(sums), self._past.setdefault(entry.path, _Past())
        norm, moved = float(found.norm), float(sums[1])
        before, self._latest[entry.path] = self._latest.get(entry.path, 0), number
        if trained and (float(found.rotation) <= TURNED if norm else not moved):
            past.still += 1
        else:
            past.still, past.gradient = 0, "none"
        if norm and past.first is None:
            past.first = min(before, number - 1) + 1
        size = float(found.relative_update) if norm else None
        begun = number if past.first is None else number - past.first + 1
        dtype = entry.dtype
        self.facts.append(StepFacts(entry.path, size, begun, past.still, past.gradient if past.still else None, dtype))


# --- figures ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _State:
    """The sums of the state of one parameter, to be added over shards."""

    entry: TensorEntry
    moments: Moments
    step: float | None
    entries: int
    sums: Sums

    @property
    def figures(self) -> dict[str, Any]:
        return state_row(self.moments, StateSums(*self.sums().tolist()), self.entries)


class StepFigures:
    """The weights copied before a step, and their figures after it.

    Attributes:
        invariant: paths of the layers whose weights are scale-invariant; None if the model cannot be traced.
        predictions: the latest one of each layer.
        diverged: paths of the layers whose weights are not finite before or after the latest step.
        judged: what rules on steps judge of the weights, also at a step that changed none.
    """

    def __init__(self, model: nn.Module, also: Also) -> None:
        graph = trace(model, training=True)
        self.invariant = None if graph.reason else graph.scale_invariant
        self.predictions: dict[str, Equilibrium] = {}
        self.diverged: frozenset[str] = frozenset()
        self._model, self._also = model, frozenset(also)
        self._copies: dict[int, list[tuple[TensorEntry, Tensor]]] = {}  # by optimizer
        self._initial: dict[str, Tensor] = {}
        self._gradients: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self._states: dict[str, _State] = {}
        self.judged = JudgedSteps()

    @torch.no_grad()
    def copy(self, entries: Sequence[TensorEntry], optimizer: Optimizer) -> None:
        """Copy the weights that the optimizer is about to change."""
        parameters = self._parameters()
        held = parameter_ids(optimizer)
        if held.isdisjoint(map(id, self._model.parameters())):
            raise InvalidArgumentError(
                "Tracker(optimizer=) trains the model's parameters",
                f"{with_article(type(optimizer).__name__)} whose groups have other tensors now, as trainers that keep "
                "copies of the weights put there",
                "Leave optimizer= out, and call step() after each step.",
            )
        mine = [entry for entry in entries if any(id(p) in held for p in parameters(entry))]
        copies = [(entry, weight.detach().clone()) for entry in mine if (weight := entry.read()) is not None]
        self._copies[id(optimizer)] = copies
        self._look_at_gradients(optimizer, parameters, at_end=False)
        if "initial_angle" in self._also:
            for entry, weight in copies:
                if entry.path not in self._initial:
                    self._initial[entry.path] = local(weight).to("cpu", copy=True)

    @property
    def reads_gradients(self) -> bool:
        """Whether norms of gradients are asked for."""
        return "gradient" in self._also

    @torch.no_grad()
    def keep_gradients(self, optimizer: Optimizer, *, at_end: bool = False) -> None:
        """Of the gradients of copied weights the squares of this process's shard, without a scaler's factor.

        Those of a closure are known at the end of the step; others at its start, because some optimizers change them.
        """
        if not self.reads_gradients or computes_gradients(optimizer) is not at_end:
            return
        parameters = self._parameters()
        scale = getattr(optimizer, "grad_scale", None)  # left by torch's scaler to a fused optimizer while it steps
        factor = 1.0 if scale is None else float(scale) ** -2
        for entry, _ in self._copies.get(id(optimizer), ()):
            found = _squares_of_gradients(parameters(entry))
            self._gradients[entry.path] = [(like, factor * squares) for like, squares in found]

    def _look_at_gradients(
        self, optimizer: Optimizer, parameters: Callable[[TensorEntry], list[Tensor]], *, at_end: bool
    ) -> None:
        """For the rules; those of a closure are there at the end of the step alone."""
        if computes_gradients(optimizer) is at_end:
            for entry, _ in self._copies.get(id(optimizer), ()):
                self.judged.look_at_gradient(entry.path, parameters(entry))

    @torch.no_grad()
    def take(self, optimizer: Optimizer, number: int) -> list[tuple[TensorEntry, Figures]]:
        """The figures of the step, weight by weight, whose copies are released; none for a step that was skipped.

        Sums over the shards of all weights are added in one reduction; no weight is gathered. `number`: of the step.
        """
        parameters, total = self._parameters(), ShardSums()
        waiting: list[tuple[TensorEntry, dict[str, Sums], Equilibrium, float | None]] = []
        trained = set[str]()
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        self._states = {}
        self.keep_gradients(optimizer, at_end=True)
        self._look_at_gradients(optimizer, parameters, at_end=True)
        copies = self._copies.pop(id(optimizer), [])
        while copies:
            entry, before = copies.pop(0)
            after = entry.read()
            if after is not None and after.shape == before.shape:
                largest = max((p for p in parameters(entry) if id(p) in groups), key=Tensor.numel)
                given = groups[id(largest)].get("lr")
                rate = None if given is None else float(given)  # Adafactor computes its own
                sums = self._sums(entry, before, after, total)
                sums |= self._sums_of_state(entry, largest, optimizer, groups[id(largest)], total)
                waiting.append((entry, sums, _prediction(optimizer, largest, rate), rate))
                trained |= {entry.path} if largest.requires_grad and rate != 0 else set()
        total.reduce()
        self.diverged = frozenset(entry.path for entry, sums, *_ in waiting if not sums["step"]().isfinite().all())
        self.judged.facts = []
        for entry, sums, *_ in waiting:
            if entry.path not in self.diverged:
                self.judged.judge(entry, sums["step"](), number, trained=entry.path in trained)
        if not any(float(sums["step"]()[1]) for _, sums, _, _ in waiting):  # NaN counts as a change
            return []
        return [(entry, self._figures(entry, sums, prediction, rate)) for entry, sums, prediction, rate in waiting]

    def _sums(self, entry: TensorEntry, before: Tensor, after: Tensor, total: ShardSums) -> dict[str, Sums]:
        """The sums of one step, of its rows and of the gradient, added later."""
        made = {"step": total.add(before, step_sums(local(before), local(after)))}
        layout = entry.layout
        if "filter_rotation" in self._also and layout is not None:
            if divided(before) and not why_not(before, layout):
                w, change = local(before), local(after).double() - local(before).double()
                rows = torch.stack([row_sums(a, b, layout) for a, b in ((w, w), (change, change), (change, w))], dim=1)
                made["rows"] = total.add(before, of_rows(before, rows, layout))
            elif not divided(before):
                rows = step_sums(*(matrix_view(local(w), layout) for w in (before, after)), by_row=True)
                made["rows"] = partial(_with_places, rows.flatten(1).T)
        first = self._initial.get(entry.path)
        if first is not None and first.shape == (now := local(after)).shape:
            made["initial"] = total.add(after, step_sums(first.to(now.device), now))
        for like, squares in self._gradients.pop(entry.path, []):
            made["gradient"] = total.add(like, squares)
        return made

    def _sums_of_state(
        self, entry: TensorEntry, parameter: Tensor, optimizer: Optimizer, group: Mapping[str, Any], total: ShardSums
    ) -> dict[str, Sums]:
        """The sums of the state of one parameter, and what they are of, if they are asked for."""
        if "state" not in self._also:
            return {}
        held = optimizer.state.get(parameter, {})
        same = {n: t for n, t in held.items() if isinstance(t, Tensor) and t.shape == parameter.shape and n != "step"}
        tensors = {name: plain for name, t in same.items() if (plain := _plain(local(t))) is not None}
        options = options_of(group)
        moments = Moments.of(tensors, options)
        if any(type(local(same[name])) is not type(tensor) for name, tensor in tensors.items()):
            moments = replace(moments, other="codes")  # small numbers were rounded to 0, so the two are not compared
        if not (moments.first or moments.second):
            return {}
        step = number(held.get("step", options.get("step")))
        sums = total.add(parameter, state_sums(moments, tensors, step))
        self._states[entry.path] = _State(entry, moments, step, parameter.numel(), sums)
        return {"state": sums}

    def _figures(
        self, entry: TensorEntry, sums: Mapping[str, Sums], prediction: Equilibrium, rate: float | None
    ) -> Figures:
        step = StepRotation.of(sums["step"]())
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
        if "rows" in sums:
            *rows, places = sums["rows"]().view(-1, 3)
            if not float(places.sum()):
                turned = StepRotation.of(torch.stack(rows, dim=1)).rotation.nan_to_num(0)
                for name, value in (("min", turned.min()), ("median", turned.median()), ("max", turned.max())):
                    figures[f"filter_rotation_{name}"] = float(value)
        if "initial" in sums:
            figures["initial_angle"] = degrees(float(StepRotation.of(sums["initial"]()).rotation))
        if "gradient" in sums:
            figures["gradient_norm"] = float(sums["gradient"]()) ** 0.5
        if "state" in sums:
            found = self._states[entry.path].figures
            figures |= {name: found[name] for name in ("gradient_rms", "update_rms") if name in found}
        return {name: value for name, value in figures.items() if isfinite(value)}

    def state_rows(self) -> list[StateMeasurement]:
        """What the rules on states judge, of the step that was measured last."""
        return [
            StateMeasurement(
                name=one.entry.name,
                place=one.entry.name,
                path=one.entry.path,
                shape=(one.entries,),
                step=one.step,
                **one.figures,
            )
            for one in self._states.values()
        ]

    def without_optimizer(self, entries: Sequence[TensorEntry], held: set[int]) -> list[str]:
        """The layers of weights that train, of which no parameter is among these, by identity."""
        parameters, found = self._parameters(), []
        for entry in entries:
            try:
                mine = parameters(entry)
            except Exception:  # the model's own code; the measurement says why
                continue
            if any(p.requires_grad for p in mine) and held.isdisjoint(map(id, mine)):
                found.append(entry.path)
        return found

    def _parameters(self) -> Callable[[TensorEntry], list[Tensor]]:
        """A function that gives the parameters from which the weight of an entry is computed."""
        modules = modules_at(self._model)

        def parameters(entry: TensorEntry) -> list[Tensor]:
            path, _, name = entry.name.rpartition(".")
            module = modules.get(path, self._model)
            own = module._parameters.get(name)
            if own is not None:
                return [own]
            lists = module._modules.get("parametrizations")
            if isinstance(lists, nn.ModuleDict) and name in lists:
                return list(lists[name].parameters())
            return [] if entry.load is None else _leaves_of(entry.load)

        return parameters


def _plain(state: Any) -> Tensor | None:
    """The numbers of a tensor of an optimizer's state, dequantised; None of a class that does not give them."""
    if type(state) in (Tensor, nn.Parameter):
        return state
    try:
        made = state.dequantize()
    except Exception:  # of another library
        return None
    return made if type(made) is Tensor and made.shape == state.shape else None


def _leaves_of(load: Callable[[], Any]) -> list[Tensor]:
    """The parameters of a weight that a module computes, as hooks and methods do, from the derivative's own graph."""
    with torch.enable_grad():
        value = load()
    return [leaf for leaf in leaves_of(value) if isinstance(leaf, nn.Parameter)] if isinstance(value, Tensor) else []


def _squares_of_gradients(parameters: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The gradient of the largest parameter, and the sum of the squares of this process's shard of it."""
    gradients = [p.grad for p in sorted(parameters, key=Tensor.numel)[-1:] if p.grad is not None]
    plainly = [(gradient, local(gradient)) for gradient in gradients if gradient.layout == torch.strided]
    return [(gradient, part.detach().double().square().sum()[None]) for gradient, part in plainly]


def _with_places(rows: Tensor) -> Tensor:
    """Rows of a weight that is whole, as :func:`of_rows` gives those of a sharded one."""
    return torch.cat([rows, rows.new_zeros(1, 3)]).flatten()


def _prediction(optimizer: Optimizer, parameter: Tensor, rate: float | None) -> Equilibrium:
    """A held weight has no decay that an update could balance; with a fixed step it turns by arctan η at once."""
    held = step_of_hold(parameter)
    if held is None or not rate:
        return equilibrium(optimizer, parameter)
    return Equilibrium(atan(rate) if held == "fixed" else None, 0.0, "" if held == "fixed" else "held by hold_")
