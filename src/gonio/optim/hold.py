"""`hold_`: the norms of weights stay constant through the steps of any optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gonio.errors import AlreadyAppliedError, InvalidArgumentError, NoMatchError, NotApplicableError, listing
from gonio.execution import is_sharded
from gonio.optim.vectors import NORMS, Norm, Vectors, factors_of, norms_of, write_
from gonio.parametrizations import WeightNorm
from gonio.parametrizations.mechanism import attach, parametrization_of
from gonio.penalty.terms import TABLES, WeightRef, weights_of
from gonio.surgery.edit import Change, Edit, Edited
from gonio.surgery.graph import trace
from gonio.surgery.steps import check_optimizer, parameter_ids
from gonio.surgery.where import Where, as_selector, sites

Step = Literal["free", "fixed"]
STEPS = ("free", "fixed")
KEY = "gonio_hold"  # in an optimizer's state dict


@dataclass(eq=False)
class _HeldWeight:
    """One weight on its spheres: the radius of each of its vectors."""

    label: str
    parameter: nn.Parameter
    vectors: Vectors
    radius: Tensor
    before: Tensor | None = None


@torch.no_grad()
def _project_(weights: Sequence[_HeldWeight]) -> None:
    """Scale each vector to its radius."""
    vectors = [weight.vectors for weight in weights]
    norms = norms_of(vectors, [weight.parameter.detach() for weight in weights])
    for weight, factors in zip(weights, factors_of([weight.radius for weight in weights], norms), strict=True):
        weight.vectors.scale_(weight.parameter, factors)


@torch.no_grad()
def _fix_(weights: Sequence[_HeldWeight], rate: float) -> None:
    """Replace the optimizer's change u by one of norm ηR: w ← R·unit(w − ηR·unit(−u)).

    The changes are computed twice, so that at most one of them is in memory beside the weights as they were.
    """
    starts = [(weight, before) for weight in weights if (before := weight.before) is not None]
    vectors, radii = [weight.vectors for weight, _ in starts], [weight.radius for weight, _ in starts]

    def change(weight: _HeldWeight, before: Tensor) -> Tensor:
        return weight.parameter.detach().to(weight.radius.dtype) - before

    moved: list[Tensor] = []
    factors = factors_of(radii, norms_of(vectors, (change(*start) for start in starts)), rate)
    for (weight, before), factor in zip(starts, factors, strict=True):
        # out of place: torch refuses to add in place to a weight of fewer rows than processes
        moved.append(before.to(weight.radius.dtype) + weight.vectors.scaled(change(weight, before), factor))
        weight.before = None
    for (weight, _), w, factor in zip(starts, moved, factors_of(radii, norms_of(vectors, moved)), strict=True):
        write_(weight.parameter, weight.vectors.scaled(w, factor))


def _alike(weights: Iterable[_HeldWeight]) -> list[list[_HeldWeight]]:
    """Weights by device and by the dtype of their norms."""
    found: dict[tuple[torch.device, torch.dtype], list[_HeldWeight]] = {}
    for weight in weights:
        if weight.radius.device != weight.parameter.device:  # the model was moved
            weight.radius = weight.radius.to(weight.parameter.device)
        found.setdefault((weight.radius.device, weight.radius.dtype), []).append(weight)
    return list(found.values())


@dataclass(frozen=True, eq=False)
class Held:
    """The weights that :func:`hold_` holds. `str()` is a table; `undo_()` ends it.

    Attributes:
        changes: one :class:`gonio.surgery.Change` per weight.
        notes: what else was changed, such as weight decay, and what was left out.
    """

    edited: Edited
    _weights: tuple[_HeldWeight, ...] = field(repr=False)

    @property
    def changes(self) -> tuple[Change, ...]:
        return self.edited.changes

    @property
    def notes(self) -> tuple[str, ...]:
        return self.edited.notes

    def undo_(self) -> None:
        """End the hold: hooks, parameter groups, weight decay and layers are as before; trained weights stay.

        Raises:
            UndoError: as :meth:`gonio.Edited.undo_`.
        """
        self.edited.undo_()

    def state_dict(self) -> dict[str, Tensor]:
        """The radii by the names of the weights; `optimizer.state_dict()` contains them as well."""
        return {weight.label: weight.radius.clone() for weight in self._weights}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over radii.

        Raises:
            InvalidArgumentError: if a weight is missing or has other vectors.
        """
        _load_radii(self._weights, state)

    def __len__(self) -> int:
        """The number of changed modules."""
        return len(self.edited)

    def __repr__(self) -> str:
        return repr(self.edited).replace("Edited", "Held", 1)

    def _repr_html_(self) -> str:
        return self.edited._repr_html_()

    def __str__(self) -> str:
        return str(self.edited)


def _load_radii(weights: Sequence[_HeldWeight], state: Mapping[str, Tensor]) -> None:
    for weight in weights:
        found = state.get(weight.label)
        if found is None or found.shape != weight.radius.shape:
            raise InvalidArgumentError(
                f"the state of hold_() has a radius of shape {tuple(weight.radius.shape)} for {weight.label}",
                "none" if found is None else f"one of shape {tuple(found.shape)}",
                "Hold the same weights by the same norm as when the state was saved.",
            )
    for weight in weights:
        weight.radius = state[weight.label].to(weight.radius)


def hold_(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    where: Where = None,
    norm: Norm = "matrix",
    radius: Literal["initial"] | float = "initial",
    step: Step = "free",
    magnitude: Literal["learned"] | None = None,
    magnitude_lr: float | None = None,
) -> Held:
    r"""Keep the norms of weights constant while an optimizer trains them; only their directions are trained.

    Each weight w, or each of its filters or columns, stays on the sphere of radius R:

    * step="free": :math:`w ← R (w + u)/‖w + u‖` with the optimizer's update u, a projection after the step;
    * step="fixed": :math:`w ← R·unit(w + ηR·unit(u))` with the learning rate η. The length of the update has no effect:
      a weight turns by arctan η if u is orthogonal to it (as for a layer before a normalisation), in every layer and at
      every width. It takes a copy of the held weights during the step, and for half precision one more in float32.

    It works with every optimizer of torch's interface, by hooks of `optimizer.step()`. Radii are in the state dict of
    the optimizer. Loaded weights are projected by the next step.

    Args:
        model: as it will be trained; edits and parametrizations first.
        optimizer: of the weights. Build learning rate schedules after this call.
        where: which layers; None for all linear, convolutional, attention and recurrent ones in the optimizer. An
            embedding is held if it is selected.
        norm: "matrix" for the Frobenius norm of each matrix (of each group, and of each packed projection); "filters"
            for the weights of each output; "columns" for those of each input.
        radius: "initial" for the norms that the weights have now, or one number to which all are set.
        step: "free" or "fixed".
        magnitude: "learned" multiplies each filter by a trained gain (:class:`gonio.parametrizations.WeightNorm` over
            directions of constant norm); needs norm="filters".
        magnitude_lr: learning rate of the gains; that of their layer by default. They do not decay.

    Returns: :class:`Held`, whose `undo_()` ends the hold.

    Raises:
        NoMatchError: if `where` selects no such layer with a weight in the optimizer.
        AlreadyAppliedError: if a selected weight is held already.
        NotApplicableError: if a vector is 0 and would stay so; if a learned gain has no effect because of a
            normalisation layer after it; if weight decay cannot be switched off for held weights alone because the
            optimizer has a schedule already; for shards that cut vectors.
        InvalidArgumentError: for other values of the arguments.

    Note:
        Weight decay of a held weight would only rescale its step. It is set to 0, and a note says so; weights that are
        not held move to a parameter group of their own if they share one.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        >>> held = gonio.hold_(model, optimizer, norm="filters", radius=1.0)
        >>> for _ in range(3):
        ...     optimizer.zero_grad()
        ...     model(torch.randn(5, 8)).square().sum().backward()
        ...     optimizer.step()
        >>> torch.allclose(model[0].weight.norm(dim=1), torch.ones(16))
        True
        >>> print(held)
        hold_: 2 modules
          0  weight: norm of 16 filters held at 1
          2  weight: norm of 4 filters held at 1
          note: weight decay of 0.01 is 0 for 0.weight, 2.weight: on a held weight it only rescales the step
        >>> held.undo_()

    Source: Wen et al., "Hyperball", arXiv 2606.16899 (norm="matrix", step="fixed"); Loshchilov et al., "nGPT", arXiv
        2410.01131 (filters and columns along the embedding, step="free", radius=1); Karras et al., "EDM2", arXiv
        2312.02696, §2.3 (forced weight normalisation, "filters").
    Differs: a weight packed of several matrices is held matrix by matrix.
    """
    check_arguments(norm, radius, step, magnitude, magnitude_lr)
    check_optimizer(optimizer, model)
    refs, left = _chosen(model, parameter_ids(optimizer), where, norm, magnitude)
    with Edit(model, "hold_") as edit:
        if magnitude is not None:  # first: the gains keep the function, whatever the radius
            _learn_magnitudes_(edit, optimizer, refs, magnitude_lr)
        weights = [_held(edit, ref, norm, radius) for ref in refs]
        _stop_decay_(edit, optimizer, weights)
        _register_(edit, optimizer, weights, step)
        edit.note_stays(left)
    return Held(edit.done(), tuple(weights))


def check_arguments(
    norm: str = "matrix",
    radius: object = "initial",
    step: str = "free",
    magnitude: object = None,
    magnitude_lr: object = None,
) -> None:
    """Refuse arguments of :func:`hold_` that no model and no optimizer could make right."""
    for name, value, choices in (
        ("norm", norm, NORMS), ("step", step, STEPS), ("magnitude", magnitude, (None, "learned")),
    ):  # fmt: skip
        if value not in choices:
            known = ", ".join(map(repr, choices))
            raise InvalidArgumentError(f"hold_({name}=) is one of {known}", repr(value), "Choose one of them.")
    number = isinstance(radius, (int, float)) and not isinstance(radius, bool)
    if radius != "initial" and not (number and 0 < float(radius) < float("inf")):  # type: ignore[arg-type]
        do = "Pass the norm that weights shall have."
        raise InvalidArgumentError("hold_(radius=) is 'initial' or a positive number", repr(radius), do)
    if magnitude is not None and norm != "filters":
        do = "Pass norm='filters': each filter has its gain."
        raise InvalidArgumentError("hold_(magnitude='learned') holds filters", f"norm={norm!r}", do)
    if magnitude is None and magnitude_lr is not None:
        found = f"magnitude_lr={magnitude_lr} without gains"
        raise InvalidArgumentError("hold_(magnitude_lr=) is the learning rate of gains", found, "Add 'learned'.")


# --- which weights ------------------------------------------------------------------------------------------------


def holdable(model: nn.Module, where: Where = None, **arguments: Any) -> dict[str, str]:
    """The layers that :func:`hold_` would hold with an optimizer of all parameters; the model is not changed.

    Args:
        arguments: the others of :func:`hold_`.

    Returns: by path, why a selected layer is left out; empty for a layer that is held.

    Raises: as :func:`hold_`, as far as the model decides it.

    Example:
        >>> from gonio.optim.hold import holdable
        >>> holdable(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1)), norm="columns")
        {'0': '', '2': 'its columns have one entry each, which could not move'}
    """
    check_arguments(**arguments)
    trained, norm = {id(p) for p in model.parameters()}, arguments.get("norm", "matrix")
    refs, left = _chosen(model, trained, where, norm, arguments.get("magnitude"))
    return {**{ref.path: "" for ref in refs}, **left}


# Held weights by `id`, with the step. (A WeakKeyDictionary compares its keys by ==, which tensors do entry by entry.)
_HOLDS: dict[int, tuple[weakref.ref[Tensor], Step]] = {}


def step_of_hold(parameter: Tensor) -> Step | None:
    """Whether a parameter is held, and by which step.

    Example:
        >>> from gonio.optim.hold import step_of_hold
        >>> layer = nn.Linear(2, 2)
        >>> held = gonio.hold_(layer, torch.optim.SGD(layer.parameters(), lr=0.1), step="fixed")
        >>> step_of_hold(layer.weight), step_of_hold(layer.bias)
        ('fixed', None)
    """
    ref, step = _HOLDS.get(id(parameter), (None, None))
    return step if ref is not None and ref() is parameter else None


def _note_hold_(parameter: Tensor, step: Step) -> None:
    key = id(parameter)
    _HOLDS[key] = (weakref.ref(parameter, lambda _: _HOLDS.pop(key, None)), step)


def _chosen(
    model: nn.Module, trained: set[int], where: Where, norm: Norm, magnitude: str | None
) -> tuple[list[WeightRef], dict[str, str]]:
    """The weights to hold, and the layers that are left out; refuses held ones and gains without effect."""
    refs, left = _selected(model, trained, where, norm)
    for ref in refs:
        if step_of_hold(_own(ref)) is not None:
            raise AlreadyAppliedError("hold_", ref.path, f"a hold of {ref.name!r}")
    if magnitude is not None:
        _refuse_idle_gains(model, refs)
    return refs, left


def _selected(model: nn.Module, trained: set[int], where: Where, norm: Norm) -> tuple[list[WeightRef], dict[str, str]]:
    """The weights to hold, tied ones once, and the layers that are left out although selected."""
    selector = as_selector(where)
    taken: dict[int, WeightRef] = {}
    left: dict[str, str] = {}
    able: list[str] = []
    for site in sites(model):
        for ref in weights_of(site):
            own, why = ref.module._parameters.get(ref.name), ""
            if where is None and isinstance(ref.module, TABLES):
                continue
            if own is None:
                why = "its weight is computed from other parameters"
            elif id(own) not in trained:
                why = "its weight is not in the optimizer"
            elif Vectors(ref.layout, own.ndim, norm).length(own) == 1:
                why = f"its {norm} have one entry each, which could not move"
            else:
                able.append(ref.path)
            if not site.matches(selector):
                continue
            if why:
                left[ref.path] = why
            elif own is not None:
                taken.setdefault(id(own), ref)
    if not taken:
        refused = [f"{path} ({why})" for path, why in left.items()]
        raise NoMatchError("hold_", str(selector), able, refused=refused)
    return list(taken.values()), left


def _own(ref: WeightRef) -> nn.Parameter:
    return ref.module._parameters[ref.name]  # type: ignore[return-value]


def _refuse_idle_gains(model: nn.Module, refs: Sequence[WeightRef]) -> None:
    """Gains that a normalisation layer divides out again would be trained without effect."""
    invariant = trace(model, training=True).scale_invariant
    idle = [ref.path for ref in refs if ref.path in invariant]
    if idle:
        why = f"a normalisation layer after it removes the learned gain (here of {listing(idle)})"
        do = "Hold these layers without magnitude='learned', in a call of their own."
        raise NotApplicableError("hold_", idle[0], why, do, action="learn the magnitude of")


@torch.no_grad()
def _held(edit: Edit, ref: WeightRef, norm: Norm, radius: Literal["initial"] | float) -> _HeldWeight:
    """One weight and its radii; its value is changed for a radius that is a number."""
    parameter = _own(ref)
    vectors = Vectors(ref.layout, parameter.ndim, norm)
    refuse = partial(NotApplicableError, "hold_", ref.path, action="hold", kind=type(ref.module).__name__)
    if is_sharded(parameter) and vectors.splits_shards():
        raise refuse("its shards cut its vectors", "Hold it by norm='matrix', or exclude it in `where`.")
    norms = vectors.norms(parameter.detach())
    if not bool((norms > 0).all()) and getattr(ref.module, "padding_idx", None) is None:
        why = f"{int((norms == 0).sum())} of its vectors are 0 or not finite, and 0 cannot be scaled to a norm"
        raise refuse(why, "Initialise them, or exclude the layer in `where`.")
    if radius == "initial":
        radii, at = norms.clone(), _range(norms)
    else:
        radii, at = torch.where(norms > 0, float(radius), 0.0).to(norms.dtype), f"{radius:g}"
        value = vectors.scaled(parameter.detach().to(norms.dtype), factors_of([radii], [norms])[0])
        edit.set_data_(parameter, value.to(parameter.dtype))
    what = {"matrix": ("matrix", "matrices"), "filters": ("filter", "filters"), "columns": ("column", "columns")}[norm]
    count = norms.numel()
    edit.changed(ref.path, f"{ref.name}: norm of {count} {what[count > 1]} held at {at}")
    return _HeldWeight(ref.label, parameter, vectors, radii)


def _range(norms: Tensor) -> str:
    low, high = float(norms.min()), float(norms.max())
    return f"{low:.4g}" if f"{low:.4g}" == f"{high:.4g}" else f"{low:.4g} to {high:.4g}"


# --- the optimizer ------------------------------------------------------------------------------------------------


def _learn_magnitudes_(edit: Edit, optimizer: Optimizer, refs: Sequence[WeightRef], rate: float | None) -> None:
    """Put a weight norm on each layer, and its gains into groups of their own."""
    gains: dict[int, list[nn.Parameter]] = {}
    shared: dict[int, WeightNorm] = {}
    chosen = {id(_own(ref)) for ref in refs}
    for site in sites(edit.model):
        for ref in weights_of(site):
            raw = ref.module._parameters.get(ref.name)
            if raw is None or id(raw) not in chosen:
                continue
            if parametrization_of(ref.module, ref.name) is not None:
                raise AlreadyAppliedError("hold_", ref.path, f"a parametrization of {ref.name!r}")
            edit.snapshot_(ref.module)
            norm = shared.get(id(raw))
            attach(ref.module, ref.name, norm or shared.setdefault(id(raw), WeightNorm()))
            if norm is None:
                index = next(i for i, g in enumerate(optimizer.param_groups) if any(p is raw for p in g["params"]))
                gains.setdefault(index, []).extend(shared[id(raw)].parameters())
    for index, parameters in gains.items():
        group = optimizer.param_groups[index]
        options: dict[str, Any] = {"weight_decay": 0.0} if rate is None else {"weight_decay": 0.0, "lr": rate}
        if "matrices" in group:  # gains are no matrices for Muon
            options["matrices"] = False
        _new_group_(edit, optimizer, group, parameters, **options)


def _stop_decay_(edit: Edit, optimizer: Optimizer, weights: Sequence[_HeldWeight]) -> None:
    """No weight decay for held weights; those of a group that has others as well move to a group of their own."""
    held = {id(weight.parameter): weight.label for weight in weights}
    for group in list(optimizer.param_groups):
        mine = [p for p in group["params"] if id(p) in held]
        decay = group.get("weight_decay", 0)
        if not mine or not float(decay):
            continue
        labels = listing([held[id(p)] for p in mine], limit=4)
        edit.note(f"weight decay of {float(decay):g} is 0 for {labels}: on a held weight it only rescales the step")
        if len(mine) < len(group["params"]):
            _new_group_(edit, optimizer, group, mine, weight_decay=0.0)
        else:
            edit.on_undo(partial(group.__setitem__, "weight_decay", decay))
            group["weight_decay"] = 0.0


def _new_group_(
    edit: Edit, optimizer: Optimizer, group: dict[str, Any], parameters: list[nn.Parameter], **options: Any
) -> None:
    """Give parameters a group with the options of another one, out of which they are taken if they are in it."""
    if "initial_lr" in group:
        raise NotApplicableError(
            "hold_", "", "the optimizer has a schedule, which does not know the parameter group that this adds",
            "Call hold_ before the schedule is built, or give weights that decay and those that are held groups of "
            "their own.", action="hold weights of",
        )  # fmt: skip
    ids = {id(p) for p in parameters}
    before = list(group["params"])
    made = {**group, "params": parameters, **options}

    def restore() -> None:
        optimizer.param_groups[:] = [each for each in optimizer.param_groups if each is not made]
        group["params"] = before
        for parameter in parameters:
            if not any(parameter is p for p in before):
                optimizer.state.pop(parameter, None)

    edit.on_undo(restore)
    group["params"] = [p for p in before if id(p) not in ids]
    optimizer.param_groups.append(made)


def _register_(edit: Edit, optimizer: Optimizer, weights: Sequence[_HeldWeight], step: Step) -> None:
    """The hooks that hold the weights and keep their radii in the optimizer's state dict."""
    by_id = {id(weight.parameter): weight for weight in weights}

    def before_step(_: Optimizer, args: Any, kwargs: Any) -> None:
        for weight in weights:
            weight.before = weight.parameter.detach().clone()

    def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            mine = [by_id[id(p)] for p in group["params"] if id(p) in by_id]
            if step == "fixed":
                for alike in _alike(mine):
                    _fix_(alike, float(group["lr"]))
            else:
                for alike in _alike(weight for weight in mine if weight.parameter.grad is not None):
                    _project_(alike)

    def save(_: Optimizer, state: dict[str, Any]) -> None:
        state[KEY] = {**state.get(KEY, {}), **{weight.label: weight.radius.clone() for weight in weights}}

    def load(_: Optimizer, state: dict[str, Any]) -> None:
        if KEY in state:
            _load_radii(weights, state[KEY])

    handles = [
        optimizer.register_step_post_hook(after_step),
        optimizer.register_state_dict_post_hook(save),
        optimizer.register_load_state_dict_pre_hook(load),
    ]
    if step == "fixed":
        handles.append(optimizer.register_step_pre_hook(before_step))

    def end() -> None:
        for handle in handles:
            handle.remove()
        for weight in weights:
            _HOLDS.pop(id(weight.parameter), None)

    edit.on_undo(end)
    for weight in weights:
        _note_hold_(weight.parameter, step)
