"""`hold_`: the norms of weights stay constant through the steps of any optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gonio.editing.edit import Edit, Edited, Refer, referrer
from gonio.editing.memory import memory_key
from gonio.editing.steps import check_optimizer, expect_steps_, per_parameter, refuse_kept_list, take_out_
from gonio.editing.where import Where, as_selector, asked_of, at, sites
from gonio.editing.wrappers import is_transparent, parameter_ids, real_optimizers, with_inner
from gonio.errors import (
    AlreadyAppliedError,
    InvalidArgumentError,
    NoMatchError,
    NotApplicableError,
    check_range,
    listing,
)
from gonio.execution import is_sharded
from gonio.geometry import Layout
from gonio.geometry.views import why_not_dense
from gonio.messages import say
from gonio.optim.holding import STEPS, HeldWeight, Hold, Step, hold_of, refuse_averages, step_of_hold
from gonio.optim.vectors import NORMS, Norm, Vectors, factors_of
from gonio.parametrizations import WeightNorm
from gonio.parametrizations.mechanism import attach, parametrization_of
from gonio.penalty.weights import WeightRef, weights_of
from gonio.surgery.blocks import Anatomy
from gonio.surgery.facts import TABLES, padding_rows
from gonio.surgery.graph import trace

_PARTS: dict[Norm, tuple[str, str]] = {
    "matrix": (say("matrix"), say("matrices")),
    "spectral": (say("matrix"), say("matrices")),
    "filters": (say("filter"), say("filters")),
    "columns": (say("column"), say("columns")),
}


@dataclass(frozen=True, eq=False, repr=False)
class Held(Edited):
    """The weights that :func:`hold_` holds. `str()` is a table; `undo_()` ends the hold.

    Then hooks, parameter groups, weight decay and layers are as before; trained weights stay.

    Attributes:
        changes: one :class:`gonio.surgery.Change` per weight.
        notes: what else was changed, such as weight decay, and what was left out.

    Example:
        >>> layer = nn.Linear(4, 3)
        >>> held = gonio.hold_(layer, torch.optim.SGD(layer.parameters(), lr=0.1), radius=2.0)
        >>> held
        <Held by hold_: 1 module>
        >>> held.state_dict()["weight"].flatten()
        tensor([2.])
    """

    _hold: Hold = field(repr=False)

    def state_dict(self) -> dict[str, Tensor]:
        """The radii by the names of the weights; the state of the optimizer contains them as well."""
        return {weight.label: weight.radius.clone() for weight in self._hold.weights}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over radii.

        Raises:
            InvalidArgumentError: if a weight is missing or has other vectors.
        """
        self._hold.load_radii(state)


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
    heads: Anatomy | None = None,
) -> Held:
    r"""Keep the norms of weights constant while an optimizer trains them; only their directions are trained.

    Each weight w, or each of its filters or columns, stays on the sphere of radius R:

    * step="free": :math:`w ← R (w + u)/‖w + u‖` with the optimizer's update u, a projection after the step;
    * step="fixed": :math:`w ← R·unit(w + ηR·unit(u))` with the learning rate η. The length of the update has no effect:
      a weight turns by arctan η if u is orthogonal to it (as for a layer before a normalisation), in every layer and at
      every width. It takes a copy of the held weights during the step, and for half precision one more in float32.

    It works with every optimizer of torch's interface, in a wrapper (Accelerate, Lightning, Lookahead, SAM) or not, by
    what happens around `optimizer.step()`. The radii are state of the optimizer, as tensors. Loaded weights are
    projected by the next step. An edit that overwrites a held weight (``fold_``, ``balance_``, ``init_``, ``lsuv_``)
    sets its radius to the new norm, and is refused where the radius was given as a number. A hold ends with its
    optimizer; copies of the model and of the optimizer are free.

    Args:
        model: as it will be trained; edits and parametrizations first.
        optimizer: of the weights. Build learning rate schedules after this call.
        where: which layers; None for all linear, convolutional, attention and recurrent ones in the optimizer. An
            embedding is held if it is selected.
        norm: "matrix" for the Frobenius norm of each matrix (of each group, and of each packed projection); "spectral"
            for its largest singular value, by up to 48 Lanczos steps for each weight and step of the optimizer;
            "filters" for the weights of each output; "columns" for those of each input.
        radius: "initial" for the norms that the weights have now, or one number to which all are set.
        step: "free" or "fixed".
        magnitude: "learned" multiplies each filter by a trained gain (:class:`gonio.parametrizations.WeightNorm` over
            directions of constant norm); needs norm="filters".
        magnitude_lr: learning rate of the gains; that of their layer by default. They do not decay.
        heads: what :func:`gonio.surgery.anatomy` has found in the model. Then each head of queries, keys and values is
            a matrix of its own, where heads are consecutive rows of equal number.

    Returns: :class:`Held`, whose `undo_()` ends the hold. A weight that a step has changed keeps its value, trained
        gain included; any other gets back the value from before.

    Raises:
        NoMatchError: if `where` selects no such layer with a weight in the optimizer.
        AlreadyAppliedError: if a selected weight is held already.
        NotApplicableError: if a vector is 0 and would stay so; if a learned gain has no effect because of a
            normalisation layer after it; if weight decay cannot be switched off for held weights alone because the
            optimizer has a schedule already, or is in a wrapper with groups of its own; for shards that cut vectors.
        InvalidArgumentError: for other values of the arguments, and for an optimizer whose steps cannot be observed.
        NormNotHeldError: later, in one of the first steps or in `optimizer.state_dict()`: the norms are not held,
            because something else than an observed step changes the weights, or because steps compute them from copies
            in float32, as optimizers for half precision do.

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
        For norm="spectral": T. Pethick et al., "Scion", arXiv 2502.07529, whose steps and constraint sets are balls of
        operator norms.
    Differs: a weight packed of several matrices is held matrix by matrix. Scion bounds the spectral norm, which is
        constant here.
    """
    check_arguments(norm, radius, step, magnitude, magnitude_lr)
    check_optimizer(optimizer, model, "hold_")
    real = real_optimizers(optimizer, verb="hold_")
    refuse_averages(optimizer, "hold_")
    if step == "fixed" and any(group.get("lr") is None for each in real for group in each.param_groups):
        do = "Pass step='free', or an optimizer with a learning rate."
        raise InvalidArgumentError("hold_(step='fixed') needs a learning rate", "a parameter group with lr=None", do)
    refs, left = _chosen(model, parameter_ids(optimizer), where, norm, magnitude)
    if heads is not None:
        refs = [_by_heads(ref, heads) for ref in refs]
    _refuse_own_groups(optimizer, real, refs, gains=magnitude is not None)
    with Edit(model, "hold_") as edit:
        edit.acts_on = list(real)
        for ref in refs:
            edit.refuse_unwritable(_own(ref))
            _refuse_unfit(model, ref, norm)
        if magnitude is not None:  # first: the gains keep the function, whatever the radius
            _learn_magnitudes_(edit, real, refs, magnitude_lr)
        refer = referrer(model)
        weights = [_held(edit, ref, norm, radius, refer) for ref in refs]
        if magnitude is not None:
            for ref, weight in zip(refs, weights, strict=True):
                edit.on_undo(partial(_take_gain_, ref, weight))
        for each in real:
            _stop_decay_(edit, each, weights)
        hold = Hold(model, weights, step, optimizer, real)
        edit.on_undo(hold.end_)
        hold.begin_()
        expect_steps_(edit, optimizer, {weight.label: weight.parameter for weight in weights})
        edit.note_stays(left)
    hold.complete = True
    return Held(**vars(edit.done()), _hold=hold)


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
    if number:
        check_range("hold_", radius=radius)  # type: ignore[arg-type]
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


def release_(model: nn.Module) -> Edited:
    """End the holds of a model's weights without their handles.

    Parameter groups, weight decay and learned gains stay as they are; `undo_()` of the :class:`Held` restores them.

    Returns: An edit whose `undo_()` holds the weights again, at the same radii.

    Raises:
        NoMatchError: if no weight of the model is held.

    Example:
        >>> layer = nn.Linear(4, 3)
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        >>> _ = gonio.hold_(layer, optimizer)
        >>> print(gonio.optim.release_(layer))
        release_: 1 module
          (model)  weight: not held any more
    """
    with Edit(model, "release_") as edit:
        for site in sites(model):
            for name, parameter in site.module._parameters.items():
                hold = None if parameter is None else hold_of(parameter)
                if hold is not None and parameter is not None:
                    edit.changed(site.path, say("{name}: not held any more", name=name))
                    edit.on_undo(partial(hold.begin_, parameter))
                    hold.end_(parameter)
        if not edit.changes:
            raise NoMatchError("release_", None, [])
    return edit.done()


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
            elif own.is_meta:
                why = say("its weight is on the meta device")
            elif own.is_complex():
                why = "its weight is complex, and gonio holds real ones"
            elif (stored := why_not_dense(own)) is not None:
                why = stored
            elif id(own) not in trained:
                why = "its weight is not in the optimizer"
            elif Vectors(ref.layout, own.ndim, norm).length(own) == 1:
                why = f"its {_PARTS[norm][1]} have one entry each, which could not move"
            else:
                able.append(ref.path)
            if not site.matches(selector):
                continue
            if why:
                left[ref.path] = why
            elif own is not None:
                taken.setdefault(id(own), ref)
    if not taken:
        raise NoMatchError("hold_", asked_of(selector), able, refused=left)
    return list(taken.values()), left


def _by_heads(ref: WeightRef, found: Anatomy) -> WeightRef:
    """The weight with a matrix for each head, if its rows are consecutive heads of equal size."""
    count = found.heads_in_rows(ref.label, len(_own(ref)))
    return ref if ref.layout.transposed or count == 0 else replace(ref, layout=Layout(blocks=count))


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
def _refuse_unfit(model: nn.Module, ref: WeightRef, norm: Norm) -> None:
    """Refuse a weight with a vector that has no direction, but for tables that have a row for padding, tied or not."""
    parameter = _own(ref)
    vectors = Vectors(ref.layout, parameter.ndim, norm)
    refuse = partial(NotApplicableError, "hold_", ref.path, action="hold", kind=type(ref.module).__name__)
    if is_sharded(parameter) and vectors.splits_shards():
        raise refuse("its shards cut its vectors", "Hold it by norm='matrix', or exclude it in `where`.")
    norms = vectors.norms(parameter.detach())
    fit = norms.isfinite() & ((norms > 0) | (memory_key(parameter) in padding_rows(model)))
    if not bool(fit.all()):
        bad = int((~fit).sum())
        of = "the norm of 1 of its vectors is" if bad == 1 else f"the norms of {bad} of its vectors are"
        why = f"{of} 0 or not finite in {norms.dtype}, and cannot be held"
        raise refuse(why, "Initialise them, or exclude the layer in `where`.")


@torch.no_grad()
def _held(edit: Edit, ref: WeightRef, norm: Norm, radius: Literal["initial"] | float, refer: Refer) -> HeldWeight:
    """One weight and its radii; its value is changed for a radius that is a number."""
    parameter = _own(ref)
    vectors = Vectors(ref.layout, parameter.ndim, norm)
    norms = vectors.norms(parameter.detach())
    if radius == "initial":
        radii, low, high = norms.clone(), float(norms.min()), float(norms.max())
        same = f"{low:.4g}" == f"{high:.4g}"
        at = f"{low:.4g}" if same else say("{low:.4g} to {high:.4g}", low=low, high=high)
    else:
        radii, at = torch.where(norms > 0, float(radius), 0.0).to(norms.dtype), f"{radius:g}"
    told = {"name": ref.name, "n": norms.numel(), "parts": _PARTS[norm][norms.numel() > 1], "at": at}
    said = say("{name}: norm of {n} {parts} held at {at}", **told)
    edit.changed(
        ref.path, said if norm != "spectral" else say("{name}: spectral norm of {n} {parts} held at {at}", **told)
    )
    number = None if radius == "initial" else float(radius)
    weight = HeldWeight(ref.label, parameter, vectors, radii, number, refer(parameter))
    if weight.at is not None:
        value = vectors.scaled(parameter.detach().to(norms.dtype), factors_of([radii], [norms])[0])
        edit.set_data_(parameter, value.to(parameter.dtype), unless=lambda: weight.trained)
    return weight


@torch.no_grad()
def _take_gain_(ref: WeightRef, weight: HeldWeight) -> None:
    """Give a trained direction its trained gain, while its layer still has it: once or more, with the same result."""
    if weight.trained:
        weight.parameter.copy_(getattr(ref.module, ref.name))


# --- the optimizer ------------------------------------------------------------------------------------------------


def _learn_magnitudes_(
    edit: Edit, optimizers: Sequence[Optimizer], refs: Sequence[WeightRef], rate: float | None
) -> None:
    """Put a weight norm on each layer, and its gains into groups of their own."""
    groups = [(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups]
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
            with at(site, ref.name):
                attach(ref.module, ref.name, norm or shared.setdefault(id(raw), WeightNorm()))
            if norm is None:
                index = next(i for i, (_, g) in enumerate(groups) if any(p is raw for p in g["params"]))
                gains.setdefault(index, []).extend(shared[id(raw)].parameters())
    for index, parameters in gains.items():
        optimizer, group = groups[index]
        options: dict[str, Any] = {"weight_decay": 0.0} if rate is None else {"weight_decay": 0.0, "lr": rate}
        if "matrices" in group:  # gains are no matrices for Muon
            options["matrices"] = False
        _new_group_(edit, optimizer, group, parameters, **options)


def _refuse_own_groups(optimizer: Any, real: Sequence[Optimizer], refs: Sequence[WeightRef], *, gains: bool) -> None:
    """Raise for a wrapper with other parameter groups than the optimizer in it, such as ZeroRedundancyOptimizer.

    It sets the options of the inner groups by its own ones in each step, so that a change of the inner ones is lost.
    """
    shared = {id(group) for each in real for group in each.param_groups}
    held = {id(_own(ref)) for ref in refs}
    for each in [each for each in with_inner(optimizer) if not is_transparent(each)]:
        own = [group for group in getattr(each, "param_groups", ()) if id(group) not in shared]
        mine = [group for group in own if any(id(p) in held for p in group["params"])]
        if mine and (gains or any(float(group.get("weight_decay") or 0) for group in mine)):
            name = type(each).__name__
            why = f"the {name} has parameter groups beside those of the optimizer in it, which would differ"
            do = "Build it with weight_decay=0 for weights that are held, and without magnitude=."
            raise NotApplicableError("hold_", "", why, do, action="hold weights of")


def _stop_decay_(edit: Edit, optimizer: Optimizer, weights: Sequence[HeldWeight]) -> None:
    """No weight decay for held weights; those of a group that has others as well move to a group of their own."""
    held = {id(weight.parameter): weight.label for weight in weights}
    for group in list(optimizer.param_groups):
        mine = [p for p in group["params"] if id(p) in held]
        decay = group.get("weight_decay", 0)
        if not mine or not float(decay or 0):
            continue
        labels = listing([held[id(p)] for p in mine], limit=4)
        told = {"decay": float(decay), "labels": labels}
        edit.note(
            say("weight decay of {decay:g} is 0 for {labels}: on a held weight it only rescales the step", **told)
        )
        if len(mine) < len(group["params"]):
            _new_group_(edit, optimizer, group, mine, weight_decay=0.0)
        else:
            edit.on_undo(partial(_set_decay_, optimizer, mine, decay))
            group["weight_decay"] = 0.0


def _new_group_(
    edit: Edit, optimizer: Optimizer, group: dict[str, Any], parameters: list[nn.Parameter], **options: Any
) -> None:
    """Give parameters a group with the options of another one, out of which they are taken if they are in it."""
    refuse_kept_list(optimizer, edit.verb)
    noted = "initial_lr" in group and "initial_lr" not in optimizer.defaults  # by a schedule, not by the class
    if noted or hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        raise NotApplicableError(
            "hold_", "", "the optimizer has a schedule, which does not know the parameter group that this adds",
            "Call hold_ before the schedule is built, or give weights that decay and those that are held groups of "
            "their own.", action="hold weights of",
        )  # fmt: skip
    before, alone = per_parameter(optimizer, group), {id(parameter) for parameter in parameters}
    others = [parameter for parameter in before["params"] if id(parameter) not in alone]
    shared = {name: group[name] for name in options if name in group}

    def restore() -> None:
        now, home = _present_group(optimizer, parameters), _present_group(optimizer, others)
        if now is not None and home is None:  # it was removed since
            now.update(shared)
        elif now is not None and home is not None and now is not home:
            optimizer.param_groups[:] = [each for each in optimizer.param_groups if each is not now]
            home.update({name: list(values) for name, values in before.items()})
        for parameter in parameters:
            if not any(parameter is p for p in before["params"]):
                optimizer.state.pop(parameter, None)

    made = {**group, **{name: [None] * len(parameters) for name in before}}
    edit.on_undo(restore)
    out = take_out_(optimizer, group, {id(p) for p in parameters})
    made.update(out if out["params"] else {"params": parameters}, **options)
    optimizer.param_groups.append(made)


def _present_group(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> dict[str, Any] | None:
    """The present group of Parameters: `load_state_dict` of an optimizer makes new ones."""
    wanted = {id(parameter) for parameter in parameters}
    return next((each for each in optimizer.param_groups if any(id(p) in wanted for p in each["params"])), None)


def _set_decay_(optimizer: Optimizer, parameters: Sequence[nn.Parameter], decay: Any) -> None:
    group = _present_group(optimizer, parameters)
    if group is not None:
        group["weight_decay"] = decay
