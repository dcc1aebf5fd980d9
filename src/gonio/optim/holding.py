"""What happens around the steps of an optimizer that holds weights: projection, radii, and checks of the norms."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gonio.editing.copies import Copies
from gonio.editing.edit import Edit, Follower, Ref, follow_
from gonio.editing.optimizer_states import KEPT_RADIUS
from gonio.editing.steps import Sum, differ, sum_of, watch
from gonio.editing.wrappers import is_transparent, parameter_ids, with_inner
from gonio.errors import GonioWarning, InvalidArgumentError, NormNotHeldError, NotApplicableError, listing, with_article
from gonio.messages import say
from gonio.optim.vectors import Vectors, factors_of, norms_of, write_

Step = Literal["free", "fixed"]
STEPS = get_args(Step)
KEY = "gonio_hold"  # in the state dict of an optimizer that has no state of a held weight yet
CHECKED = 3  # the first steps, after which the norms are measured
_WITHOUT_COPIES = "Train the weights themselves, in float32 under torch.autocast, instead of copies of them"


@dataclass(eq=False)
class HeldWeight:
    """One weight on its spheres: the radius of each of its vectors."""

    label: str
    parameter: nn.Parameter
    vectors: Vectors
    radius: Tensor
    at: float | None  # the number that was given as the radius
    there: Ref  # the Parameter, as long as its layer has it
    before: Tensor | None = None  # the step, for a fixed one
    had_gradient: bool = False  # before the step: some optimizers clear gradients in it
    version: int = -1
    trained: bool = False  # a step under the hold has changed it
    sum: Sum | None = None  # of its entries at the last check, if the optimizer does not have it

    def moved(self) -> bool:
        """Whether the step may have changed the weight."""
        return self.had_gradient or self.parameter.grad is not None or self.parameter._version != self.version

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient other than 0 has arrived."""
        grad = self.parameter.grad
        return grad is not None and (grad.is_sparse or bool(grad.any()))

    @torch.no_grad()
    def off(self) -> float:
        """The largest relative difference of a norm from its radius; NaN in a training that diverged."""
        norms = self.vectors.norms(self.parameter.detach())
        radius = self.radius.to(norms.device)
        return float(((norms - radius).abs() / radius.clamp_min(torch.finfo(norms.dtype).tiny)).max())

    def changed(self) -> bool:
        """Whether it has other entries than at the last call, also by what is written through `.data`."""
        before, self.sum = self.sum, sum_of(self.parameter)
        return before is not None and differ(before, self.sum)

    @property
    def tolerance(self) -> float:
        """Above the rounding of a norm, and far below any change by a step."""
        return float(torch.finfo(self.parameter.dtype).eps ** 0.5)


@torch.no_grad()
def project_(weights: Sequence[HeldWeight]) -> None:
    """Scale each vector to its radius."""
    vectors = [weight.vectors for weight in weights]
    norms = norms_of(vectors, [weight.parameter.detach() for weight in weights])
    for weight, factors in zip(weights, factors_of([weight.radius for weight in weights], norms), strict=True):
        weight.vectors.scale_(weight.parameter, factors)


@torch.no_grad()
def fix_(weights: Sequence[HeldWeight], rate: float) -> None:
    """Replace the optimizer's change u by one of norm ηR: w ← R·unit(w − ηR·unit(−u)).

    The changes are computed twice, so that at most one of them is in memory beside the weights as they were.
    """
    starts = [(weight, before) for weight in weights if (before := weight.before) is not None]
    vectors, radii = [weight.vectors for weight, _ in starts], [weight.radius for weight, _ in starts]

    def change(weight: HeldWeight, before: Tensor) -> Tensor:
        return weight.parameter.detach().to(weight.radius.dtype) - before

    moved: list[Tensor] = []
    factors = factors_of(radii, norms_of(vectors, (change(*start) for start in starts)), rate)
    for (weight, before), factor in zip(starts, factors, strict=True):
        # out of place: torch refuses to add in place to a weight of fewer rows than processes
        moved.append(before.to(weight.radius.dtype) + weight.vectors.scaled(change(weight, before), factor))
    for (weight, _), w, factor in zip(starts, moved, factors_of(radii, norms_of(vectors, moved)), strict=True):
        write_(weight.parameter, weight.vectors.scaled(w, factor))


def alike_weights(weights: Iterable[HeldWeight]) -> list[list[HeldWeight]]:
    """Weights by device and by the dtype of their norms."""
    found: dict[tuple[torch.device, torch.dtype], list[HeldWeight]] = {}
    for weight in weights:
        if weight.radius.device != weight.parameter.device:  # the model was moved
            weight.radius = weight.radius.to(weight.parameter.device)
        found.setdefault((weight.radius.device, weight.radius.dtype), []).append(weight)
    return list(found.values())


def refuse_averages(optimizer: Any, verb: str) -> None:
    """Raise for an optimizer with `train()` and `eval()`, which exchange the weights that steps train and an average.

    Schedule-free optimizers and SPlus have them. What is done to the weights after a step is not done to the other
    ones, among them those that are saved and evaluated.
    """
    for each in with_inner(optimizer):
        if not is_transparent(each) and all(callable(getattr(each, name, None)) for name in ("train", "eval")):
            asked = f"{verb} needs an optimizer whose steps change the weights that are evaluated"
            found = f"{with_article(type(each).__name__)}, whose eval() replaces them by an average"
            raise InvalidArgumentError(asked, found, "Pass one without train() and eval().")


class Hold:
    """What happens around the steps of an optimizer that holds weights.

    It refers weakly to the optimizer, whose hooks refer to it: both are collected together.
    """

    def __init__(
        self, model: nn.Module, weights: Sequence[HeldWeight], step: Step, optimizer: Any, real: Sequence[Optimizer]
    ) -> None:
        self._model = weakref.ref(model)
        self.weights, self.step = tuple(weights), step
        self.complete = False  # once hold_ has changed everything
        self._given, self._real = weakref.ref(optimizer), [weakref.ref(each) for each in real]
        self._active: dict[int, HeldWeight] = {}
        self._follows: dict[int, Follower] = {}
        self._ends: list[Callable[[], None]] = []
        self._steps = 0  # that were observed
        self._copies = Copies(CHECKED)
        self._loaded: dict[str, Tensor] = {}

    def active(self, key: int) -> HeldWeight | None:
        """The weight of this `id`, if its hold is in force: neither was it ended, nor is the optimizer gone."""
        return self._active.get(key) if self._optimizers() else None

    def _optimizers(self) -> list[Optimizer]:
        return [each for ref in self._real if (each := ref()) is not None]

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has the radii, and holds nothing."""
        return _of_a_copy, ([(w.label, w.parameter, w.vectors, w.radius, w.at) for w in self.weights], self.step)

    # begin and end; both can run again

    def begin_(self, parameter: Tensor | None = None) -> None:
        """Hold one weight, or all."""
        for weight in self.weights:
            key = id(weight.parameter)
            if (parameter is None or weight.parameter is parameter) and key not in self._active:
                self._active[key] = weight
                _HOLDS[key] = self
                self._follows[key] = follow_(weight.parameter, partial(_follow, weakref.ref(self), key))
        if not _WATCHED:
            _WATCHED.append(watch(None, before=_warn_of_a_copy))
        if not self._ends:
            given = self._given()
            for each in self._optimizers() if given is None else [given]:
                around = {"before": self._before, "after": self._after, "settled": self._settled}
                self._ends.append(watch(each, **around, verb="hold_"))  # type: ignore[arg-type]
            for optimizer in self._optimizers():
                self._ends += [
                    optimizer.register_state_dict_post_hook(self._save).remove,
                    optimizer.register_load_state_dict_pre_hook(self._load).remove,
                    optimizer.register_load_state_dict_post_hook(self._loaded_).remove,
                ]

    def end_(self, parameter: Tensor | None = None) -> None:
        """End the hold of one weight, or of all."""
        for key, weight in list(self._active.items()):
            if parameter is None or weight.parameter is parameter:
                self._follows.pop(key, None)
                self._active.pop(key, None)
        for optimizer in self._optimizers():
            for parameter, state in list(_states(optimizer).items()):
                if KEPT_RADIUS in state and step_of_hold(parameter) is None:
                    del state[KEPT_RADIUS]
                    if not state:
                        del optimizer.state[parameter]
        if not self._active:
            for end in self._ends:
                end()
            self._ends.clear()

    # around a step

    def _mine(self, group: Mapping[str, Any]) -> list[HeldWeight]:
        return [self._active[id(p)] for p in group["params"] if id(p) in self._active]

    def _let_go_of_replaced(self) -> None:
        """End the hold of weights that their layers do not have any more, nor optimizers or gradients, and warn."""
        moved = {key: weight for key, weight in self._active.items() if weight.there() is not weight.parameter}
        if not moved:
            return
        known, model = set().union(*map(parameter_ids, self._optimizers())), self._model()
        here = set() if model is None else {id(parameter) for parameter in model.parameters()}
        stale = [w for key, w in moved.items() if key in known and key not in here and not w.has_gradient]
        gone = [w for key, w in moved.items() if key not in known]
        for weights, new, do in (
            (gone, "the model and the optimizer have other Parameters there now", "Call hold_ for them"),
            (
                stale,
                "the model has other Parameters there now, or none, and the optimizer steps the old ones",
                "Build the optimizer after the last change of the model, and call hold_ again",
            ),
        ):
            for weight in weights:
                self.end_(weight.parameter)
            if weights:
                labels = listing([weight.label for weight in weights])
                text = f"hold_ does not hold {labels} any more: {new}. {do}, or ignore this."
                warnings.warn(text, GonioWarning, stacklevel=2)

    def _before(self, optimizer: Optimizer) -> None:
        self._let_go_of_replaced()
        for weight in self._active.values():
            weight.had_gradient, weight.version = weight.parameter.grad is not None, weight.parameter._version
        if self.step == "fixed":
            for weight in [weight for group in optimizer.param_groups for weight in self._mine(group)]:
                weight.before = weight.parameter.detach().clone()

    def _after(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            mine = self._mine(group)
            moved = [weight for weight in mine if weight.moved()]
            self._refuse_copies(moved, optimizer)
            for weight in moved:
                weight.trained = True
                self._take_radius(optimizer, weight)
            for alike in alike_weights(moved):
                if self.step == "fixed":
                    fix_(alike, float(group["lr"]))
                else:
                    project_(alike)
            for weight in mine:
                weight.before = None
                self._copies.left(weight.parameter)
            for weight in moved:
                self._keep_radius(optimizer, weight)
        self._steps += 1
        self._check_held()

    def _settled(self, optimizer: Optimizer) -> None:
        """A wrapper such as Lookahead changes weights after the step of the optimizer in it."""
        mine = [weight for group in optimizer.param_groups for weight in self._mine(group)]
        for alike in alike_weights(
            weight for weight in mine if weight.moved() and weight.off() > weight.tolerance / 100
        ):
            project_(alike)

    # radii: state of the optimizer

    def _take_radius(self, optimizer: Optimizer, weight: HeldWeight) -> None:
        kept = _states(optimizer).get(weight.parameter, {}).get(KEPT_RADIUS)
        if isinstance(kept, Tensor) and kept.shape == weight.radius.shape:
            weight.radius = kept.to(weight.radius)

    def _keep_radius(self, optimizer: Optimizer, weight: HeldWeight) -> None:
        """Store the radius, once the optimizer has stored its own state: many make theirs only where there is none.

        One that stores none for a weight which it has changed, as SGD, gets a number for each of its other parameters
        too, because torch.distributed.checkpoint loads state of all parameters that can be trained, or of none.
        """
        states = _states(optimizer)
        if not states.get(weight.parameter):
            if weight.parameter._version == weight.version:
                return
            for parameter in [p for group in optimizer.param_groups for p in group["params"]]:
                if parameter.requires_grad and not states.get(parameter):
                    states[parameter] = {KEPT_RADIUS: torch.zeros((), device="cpu", dtype=torch.float32)}
            states[weight.parameter] = {}
        states[weight.parameter][KEPT_RADIUS] = weight.radius

    def set_radius(self, weight: HeldWeight, radius: Tensor) -> None:
        """Hold a weight at another radius from now on."""
        weight.radius = radius
        for optimizer in self._optimizers():
            state = _states(optimizer).get(weight.parameter, {})
            if KEPT_RADIUS in state:
                state[KEPT_RADIUS] = radius

    def load_radii(self, state: Mapping[str, Tensor]) -> None:
        """Take over radii by the labels of the weights."""
        for weight in self._active.values():
            _check_radius(weight, state.get(weight.label))
        for weight in self._active.values():
            self.set_radius(weight, state[weight.label].to(weight.radius))

    def _save(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        self._check_observed(optimizer)
        states = _states(optimizer)
        mine = [weight for group in optimizer.param_groups for weight in self._mine(group)]
        rest = {w.label: w.radius.clone() for w in mine if KEPT_RADIUS not in states.get(w.parameter, {})}
        if rest:
            state[KEY] = {**state.get(KEY, {}), **rest}

    def _load(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Note the radii of a state dict: torch casts state to the dtype of the weights."""
        self._loaded = {}
        for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=False):
            for parameter, key in zip(group["params"], saved["params"], strict=False):
                weight, kept = self._active.get(id(parameter)), state["state"].get(key, {}).get(KEPT_RADIUS)
                if weight is not None and isinstance(kept, Tensor):
                    self._loaded[weight.label] = _check_radius(weight, kept)
        for weight in self._active.values() if KEY in state else ():  # before the first step, and in older files
            if weight.label not in self._loaded:
                self._loaded[weight.label] = _check_radius(weight, state[KEY].get(weight.label))

    def _loaded_(self, optimizer: Optimizer) -> None:
        for weight in self._active.values():
            if weight.label in self._loaded:
                self.set_radius(weight, self._loaded[weight.label].to(weight.radius))

    # a promise that is watched

    def _refuse_copies(self, moved: Sequence[HeldWeight], optimizer: Optimizer) -> None:
        """An optimizer that computes weights from copies of its own takes no notice of a projection."""
        given = self._given()
        for weight in moved:
            if where := self._copies.of(weight.parameter, optimizer if given is None else given):
                found = f"each step computes it from a copy in a wider type ({where}), which keeps a norm of its own"
                raise NormNotHeldError(weight.label, found, _WITHOUT_COPIES)

    def _check_held(self) -> None:
        """After one of the first steps, every weight that it changed has its norm; others do not change in any step.

        Trainers that keep copies of the weights (DeepSpeed) put these into the groups, and write to the weights later,
        which may change no entry of a weight in half precision for many steps.
        """
        given = self._given()
        known = set().union(*map(parameter_ids, [*self._optimizers(), *([] if given is None else [given])]))
        for key, weight in self._active.items():
            wrong = self._steps <= CHECKED and weight.had_gradient and weight.off() > weight.tolerance
            if key not in known and weight.there() is weight.parameter and (weight.changed() or wrong):
                found = "it changes, and the parameter groups of the optimizer do not have it any more"
                do = f"{_WITHOUT_COPIES}, or call hold_ after whatever replaces its parameter groups"
                raise NormNotHeldError(weight.label, found, do)
            if wrong:
                raise NormNotHeldError(
                    weight.label,
                    "its norm changed in a step, which did not reach it in the parameter groups of the optimizer",
                    "Call hold_ on the optimizer that trains the weight, after whatever replaces its parameter groups",
                )

    def _check_observed(self, optimizer: Optimizer) -> None:
        """Where the optimizer has state or gradients, but no step was observed, the weights have their norms."""
        if self._steps:
            return
        for group in optimizer.param_groups:
            for weight in self._mine(group):
                trained = weight.parameter.grad is not None or bool(_states(optimizer).get(weight.parameter))
                if trained and weight.off() > weight.tolerance:
                    raise NormNotHeldError(
                        weight.label,
                        f"its norm changed, and no step() of the {type(optimizer).__name__} was observed",
                        "Train by step() of a torch.optim.Optimizer; a hold cannot act on other methods",
                    )


def _of_a_copy(weights: Sequence[tuple[str, nn.Parameter, Vectors, Tensor, float | None]], step: Step) -> Hold:
    """A hold without model and optimizer, whose copies are free."""
    nothing = nn.Module()
    return Hold(nothing, [HeldWeight(*each, there=_nowhere) for each in weights], step, nothing, [])


def _nowhere() -> None:
    return None


def _states(optimizer: Optimizer) -> dict[Any, Any]:
    return optimizer.state if isinstance(optimizer.state, dict) else {}


def _check_radius(weight: HeldWeight, radius: Tensor | None) -> Tensor:
    if radius is None or radius.shape != weight.radius.shape:
        raise InvalidArgumentError(
            f"the state of hold_() has a radius of shape {tuple(weight.radius.shape)} for {weight.label}",
            "none" if radius is None else f"one of shape {tuple(radius.shape)}",
            "Hold the same weights by the same norm as when the state was saved.",
        )
    return radius


@torch.no_grad()
def _follow(ref: weakref.ref[Hold], key: int, edit: Edit) -> None:
    """An edit has overwritten a held weight: hold its new norms, or refuse where a number was given."""
    hold = ref()
    weight = None if hold is None or not hold.complete else hold.active(key)
    if hold is None or weight is None or weight.off() <= weight.tolerance:
        return
    if weight.at is not None:
        why = say("hold_ holds its norm at {at:g}, which this changes", at=weight.at)
        raise NotApplicableError(edit.verb, weight.label, why, "End the hold first: held.undo_().", action="change")
    edit.on_undo(partial(hold.set_radius, weight, weight.radius))
    hold.set_radius(weight, weight.vectors.norms(weight.parameter.detach()))
    edit.note(say("{weight} is held at its new norm from now on", weight=weight.label))


# --- copies ---------------------------------------------------------------------------------------------------------

_WATCHED: list[Callable[[], None]] = []  # registered with the first hold, and stays
_STEPPED: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def _warn_of_a_copy(optimizer: Optimizer) -> None:
    """In the first step of an optimizer: warn if its state has radii of a hold, but no weight of it is held."""
    if optimizer in _STEPPED:
        return
    _STEPPED.add(optimizer)
    states = _states(optimizer)
    kept = any(isinstance(state, dict) and KEPT_RADIUS in state for state in states.values())
    if kept and not any(isinstance(each, Tensor) and step_of_hold(each) for each in states):
        text = (
            f"the state of this {type(optimizer).__name__} has the norms that hold_ held, but nothing holds them: "
            "copies of an optimizer, and others that load its state, are free. Call hold_ with it, or ignore this."
        )
        warnings.warn(text, GonioWarning, stacklevel=2)


# --- which hold is in force ---------------------------------------------------------------------------------------

# The hold of a weight, by the `id` of the weight; a hold lives as long as its optimizer or its handle.
_HOLDS: weakref.WeakValueDictionary[int, Hold] = weakref.WeakValueDictionary()


def hold_of(parameter: Tensor) -> Hold | None:
    """The hold in force of a parameter."""
    hold = _HOLDS.get(id(parameter))
    weight = None if hold is None else hold.active(id(parameter))
    return hold if weight is not None and weight.parameter is parameter else None


def step_of_hold(parameter: Tensor) -> Step | None:
    """Whether a parameter is held, and by which step.

    Example:
        >>> from gonio.optim.holding import step_of_hold
        >>> layer = nn.Linear(2, 2)
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        >>> held = gonio.hold_(layer, optimizer, step="fixed")
        >>> step_of_hold(layer.weight), step_of_hold(layer.bias)
        ('fixed', None)
    """
    hold = hold_of(parameter)
    return None if hold is None else hold.step
