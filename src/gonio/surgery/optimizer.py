"""Keep an optimizer valid when an edit adds, removes or rescales parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from gonio.editing.edit import Edit
from gonio.errors import InvalidArgumentError, NotApplicableError, UntrainedParametersError


def parameter_ids(optimizer: Optimizer) -> set[int]:
    """`id` of each Parameter in an optimizer's groups."""
    return {id(p) for group in getattr(optimizer, "param_groups", ()) for p in group["params"]}


def check_optimizer(optimizer: Optimizer | None, model: nn.Module) -> None:
    """Raise unless the optimizer holds parameters of the model."""
    if optimizer is not None and not parameter_ids(optimizer) & {id(p) for p in model.parameters()}:
        raise _holds_none()


def update_optimizer_(
    edit: Edit,
    path: str,
    optimizer: Optimizer | None,
    before: Sequence[nn.Parameter],
    after: Mapping[str, nn.Parameter],
) -> None:
    """Give a layer's new parameters to the given optimizer; without one, guard against a step that omits them.

    With an optimizer, new parameters join the group of the layer's old ones, and removed ones leave it with
    their state. A Parameter that the model still uses elsewhere is not removed, and one that the optimizer has
    already is not new. The edit's undo restores groups and state. `before` and `after` are the layer's parameters.
    """
    if optimizer is None:
        known = {id(parameter) for parameter in edit.present}
        added = {f"{path}.{name}".removeprefix("."): weakref.ref(p) for name, p in after.items() if id(p) not in known}
        if added:
            waiting = _Waiting(edit.verb, added, _trained(before), _trained(edit.present))
            edit.on_undo(waiting.end)
            _WAITING.append(waiting)
            _update_hook()
        return
    held = parameter_ids(optimizer)
    used = {id(p) for p in edit.model.parameters()}
    new = [p for p in dict.fromkeys(after.values()) if id(p) not in held and not any(p is b for b in before)]
    gone = {id(p) for p in before} - used
    trained = any(id(p) in held for p in before) or any(p.requires_grad for p in new)
    if not (new or gone) or not trained:  # the same parameters, or a frozen layer
        return
    group = _group_of(optimizer, before, used)
    edit.on_undo(_restorer(optimizer))
    for each in optimizer.param_groups:
        each["params"] = [p for p in each["params"] if id(p) not in gone]
    for parameter in before:
        if id(parameter) in gone:
            optimizer.state.pop(parameter, None)
    group["params"].extend(new)


def note_added(edit: Edit) -> None:
    """Note how many parameters the model has that it had not; an optimizer does not find them by itself."""
    known = {id(parameter) for parameter in edit.present}
    count = sum(id(p) not in known for p in edit.model.parameters())
    if count:
        edit.note(f"{count} new parameter{'s' * (count > 1)}: build the optimizer after this edit, or pass optimizer=")


def _group_of(optimizer: Optimizer, layer: Sequence[nn.Parameter], model: set[int]) -> dict[str, Any]:
    """The group of the layer's parameters; of any of the model's for a layer that had none."""
    wanted = {id(p) for p in layer} or model
    for group in optimizer.param_groups:
        if any(id(p) in wanted for p in group["params"]):
            return group
    raise _holds_none()


def _holds_none() -> InvalidArgumentError:
    return InvalidArgumentError(
        "optimizer= must hold the parameters of the layers that change",
        "an optimizer that holds none of them",
        "Pass the optimizer built from this model's parameters.",
    )


def _restorer(optimizer: Optimizer) -> Callable[[], None]:
    params = [list(group["params"]) for group in optimizer.param_groups]
    state = dict(optimizer.state)

    def restore() -> None:
        for group, before in zip(optimizer.param_groups, params, strict=False):  # groups added since stay
            group["params"] = before
        for parameter, value in state.items():
            optimizer.state.setdefault(parameter, value)
        known = parameter_ids(optimizer)
        for parameter in [p for p in optimizer.state if id(p) not in known]:
            del optimizer.state[parameter]

    return restore


# --- the state of a rescaled parameter ------------------------------------------------------------------

# For each optimizer, by the name of its class: the power of 1/s by which each entry of its state is multiplied.
_ADAM = {"exp_avg": 1, "exp_avg_sq": 2, "max_exp_avg_sq": 2}
_POWERS: dict[str, dict[str, int]] = {
    "SGD": {"momentum_buffer": 1},
    "Muon": {"momentum_buffer": 1},
    "ASGD": {"ax": -1},
    "Adagrad": {"sum": 2},
    "Adadelta": {"square_avg": 2, "acc_delta": -2},
    "RMSprop": {"square_avg": 2, "grad_avg": 1, "momentum_buffer": 0},
    "Rprop": {"prev": 1, "step_size": -1},
    "Adamax": {"exp_avg": 1, "exp_inf": 1},
    **dict.fromkeys(("Adam", "AdamW", "NAdam", "RAdam", "SparseAdam"), _ADAM),
}


def move_state_(edit: Edit, optimizer: Optimizer, path: str, parameter: nn.Parameter, s: Tensor) -> None:
    """Rescale an optimizer's state of a parameter that is multiplied by s while the function stays the same.

    The parameter's gradient g becomes g/s. A state tensor that is a sum of gradients is divided by s, one of
    squared gradients by s², one in units of the parameter multiplied by s; one without a unit stays. Optimizers
    that are neither of `torch.optim` nor a subclass may have scalar state only; other state raises.
    """
    powers = next((_POWERS[base.__name__] for base in type(optimizer).__mro__ if base.__name__ in _POWERS), {})
    for name, value in optimizer.state.get(parameter, {}).items():
        if not isinstance(value, Tensor) or (value.numel() == 1 and parameter.numel() != 1) or name == "step":
            continue
        if name not in powers or value.shape != parameter.shape:
            why = f"the unit of {name!r} in the state of {type(optimizer).__name__} is unknown"
            do = "Balance before the optimizer takes its first step."
            raise NotApplicableError("balance_", path, why, do, action="balance")
        if powers[name]:
            edit.set_data_(value, (value.double() / s.pow(powers[name])).to(value.dtype))


# --- parameters that no optimizer has yet -------------------------------------------------------------

# Note [Optimizers that were built before]
# An edit without `optimizer=` cannot know whether an optimizer exists or will be built; torch keeps no list of them,
# but a hook is called with each optimizer that takes a step. Added parameters count as trained as soon as an optimizer
# that has them takes a step. Until then, an optimizer that trains the layer without them would leave them at their
# initial values:
#
# * if it holds every trained parameter that the model had before the edit, its step raises. Where a second optimizer
#   has the added parameters, that one must step first;
# * if it holds only some of them, training is split between optimizers, and one that has not taken a step yet may
#   have the added parameters: its second step raises.
#
# The hook is registered while parameters wait. Torch iterates over its hooks during a step, so the hook cannot remove
# itself there; the next edit or undo removes it.


@dataclass(eq=False)
class _Waiting:
    """The parameters that an edit added to one layer, until an optimizer that has them takes a step."""

    verb: str
    added: dict[str, weakref.ref[nn.Parameter]]  # by name
    layer: list[weakref.ref[nn.Parameter]]  # the trained parameters that the layer had
    model: list[weakref.ref[nn.Parameter]]  # and that the model had
    # optimizers that trained the layer without the added parameters once
    stepped: weakref.WeakSet[Optimizer] = field(default_factory=weakref.WeakSet)

    def observe(self, held: set[int]) -> None:
        """Drop the added parameters that an optimizer about to step holds, and those that no longer exist."""
        self.added = {name: ref for name, ref in self.added.items() if (p := ref()) is not None and id(p) not in held}

    def untrained(self) -> list[str]:
        """Names of the added parameters that should be trained and are in no optimizer that has stepped."""
        return [name for name, ref in self.added.items() if (p := ref()) is not None and p.requires_grad]

    def refuses(self, optimizer: Optimizer, held: set[int]) -> bool:
        """Whether a step of this optimizer must raise; see Note [Optimizers that were built before]."""
        if not self.untrained():
            return False
        if _holds(all, held, self.model):
            return True
        if not _holds(any, held, self.layer):
            return False
        again = optimizer in self.stepped
        self.stepped.add(optimizer)
        return again

    def end(self) -> None:
        """Wait no longer."""
        _WAITING[:] = [waiting for waiting in _WAITING if waiting is not self]
        _update_hook()


_WAITING: list[_Waiting] = []
_HOOKS: list[RemovableHandle] = []


def _trained(parameters: Iterable[nn.Parameter]) -> list[weakref.ref[nn.Parameter]]:
    return [weakref.ref(parameter) for parameter in parameters if parameter.requires_grad]


def _holds(quantifier: Callable[[Iterable[bool]], bool], held: set[int], refs: list[weakref.ref[nn.Parameter]]) -> bool:
    """Whether an optimizer holds all, or any, of the parameters that still exist; False if none does."""
    there = [id(p) in held for ref in refs if (p := ref()) is not None]
    return bool(there) and quantifier(there)


def _update_hook() -> None:
    """Register the hook once any parameters wait. It stays: another thread may be in a step, which iterates over it."""
    _WAITING[:] = [waiting for waiting in _WAITING if any(ref() is not None for ref in waiting.added.values())]
    if _WAITING and not _HOOKS:
        _HOOKS.append(register_optimizer_step_pre_hook(_before_step))


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    if not _WAITING:
        return
    held = parameter_ids(optimizer)
    for waiting in _WAITING:
        waiting.observe(held)
    _WAITING[:] = [waiting for waiting in _WAITING if waiting.added]
    refusing = [waiting for waiting in _WAITING if waiting.refuses(optimizer, held)]
    if refusing:
        names = [name for waiting in refusing for name in waiting.untrained()]
        raise UntrainedParametersError(refusing[0].verb, names)
