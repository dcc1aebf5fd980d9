"""The state that an optimizer keeps of a parameter: what its tensors are, and how they follow a rescaling."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gonio.editing.edit import Edit
from gonio.editing.wrappers import inner_optimizers, is_transparent
from gonio.errors import NotApplicableError, with_article

Value = TypeVar("Value")
KEPT_RADIUS = "gonio_radius"  # of a held weight (gonio.hold_), in the state of its optimizer

# By type: the power of 1/s by which each entry of an optimizer's state is multiplied.
_ADAM = {"exp_avg": 1, "exp_avg_sq": 2, "max_exp_avg_sq": 2}
_POWERS: dict[type[Optimizer], dict[str, int]] = {
    torch.optim.SGD: {"momentum_buffer": 1},
    torch.optim.ASGD: {"ax": -1},
    torch.optim.Adagrad: {"sum": 2},
    torch.optim.Adadelta: {"square_avg": 2, "acc_delta": -2},
    torch.optim.RMSprop: {"square_avg": 2, "grad_avg": 1, "momentum_buffer": 0},
    torch.optim.Rprop: {"prev": 1, "step_size": -1},
    torch.optim.Adamax: {"exp_avg": 1, "exp_inf": 1},
    **dict.fromkeys((torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam), _ADAM),
    torch.optim.SparseAdam: _ADAM,
    **({torch.optim.Muon: {"momentum_buffer": 1}} if hasattr(torch.optim, "Muon") else {}),
}
# By type: what an optimizer keeps once for all of its parameters, in the state of the first one.
_JOINT: dict[type[Optimizer], frozenset[str]] = {
    torch.optim.LBFGS: frozenset({"old_dirs", "old_stps", "prev_flat_grad"})
}


def is_joint(names: Iterable[str]) -> bool:
    """Whether a state is that of all parameters of an optimizer together, told by what it keeps.

    Example:
        >>> from gonio.editing.optimizer_states import is_joint
        >>> is_joint(["d", "old_dirs", "old_stps", "prev_flat_grad"]), is_joint(["exp_avg", "exp_avg_sq"])
        (True, False)
    """
    return any(kept <= set(names) for kept in _JOINT.values())


def state_powers(names: Iterable[str]) -> Mapping[str, int]:
    """What tensors of an optimizer's state are, where its type is not known: 1 of gradients, 2 of their squares.

    Types are told by the names of what they keep: of those that may keep all of these, the ones that keep least else.

    Returns:
        The power by which each is in units of the gradient; without those that no known type keeps, and without all if
        such types differ.

    Example:
        >>> from gonio.editing.optimizer_states import state_powers
        >>> state_powers(["exp_avg", "exp_avg_sq"]), state_powers(["exp_avg_sq_row"])
        ({'exp_avg': 1, 'exp_avg_sq': 2}, {})
    """
    known = {name for powers in _POWERS.values() for name in powers}
    wanted = [name for name in names if name in known]
    may = [powers for powers in _POWERS.values() if wanted and powers.keys() >= set(wanted)]
    least = min(map(len, may), default=0)
    found = {tuple(powers[name] for name in wanted) for powers in may if len(powers) == least}
    return dict(zip(wanted, found.pop(), strict=True)) if len(found) == 1 else {}


def of_kind(optimizer: Optimizer, kinds: Mapping[type[Optimizer], Value]) -> Value | None:
    """The entry for the type of an optimizer, or for a base class whose `step` it inherits; None for another type.

    Example:
        >>> from gonio.editing.optimizer_states import of_kind
        >>> class Mine(torch.optim.SGD):
        ...     def step(self, closure=None): ...
        >>> weights = list(nn.Linear(2, 2).parameters())
        >>> kinds = {torch.optim.SGD: "SGD"}
        >>> of_kind(torch.optim.SGD(weights, lr=0.1), kinds), of_kind(Mine(weights, lr=0.1), kinds)
        ('SGD', None)
    """
    step = inspect.unwrap(type(optimizer).step)
    for base in type(optimizer).__mro__:
        if base in kinds:
            known: Any = base
            return kinds[base] if inspect.unwrap(known.step) is step else None
    return None


def move_state_(edit: Edit, optimizer: Optimizer, path: str, parameter: nn.Parameter, s: Tensor) -> None:
    """Rescale an optimizer's state of a parameter that is multiplied by s while the function stays the same.

    The parameter's gradient g becomes g/s. A state tensor that is a sum of gradients is divided by s, one of
    squared gradients by s², one in units of the parameter multiplied by s; one without a unit stays. Optimizers
    of other types may have scalar state only, unless their class says the powers in `state_powers`; other state raises.
    """
    while is_transparent(optimizer):
        (optimizer,) = inner_optimizers(optimizer)
    refuse = partial(NotApplicableError, "balance_", path, action="balance")
    if not hasattr(optimizer, "state"):
        raise refuse(
            f"what {with_article(type(optimizer).__name__)} stores of it is unknown", "Balance before it is built."
        )
    powers = of_kind(optimizer, _POWERS) or getattr(type(optimizer), "state_powers", {})
    for name, value in optimizer.state.get(parameter, {}).items():
        single = isinstance(value, Tensor) and value.numel() == 1 and parameter.numel() != 1
        if not isinstance(value, Tensor) or single or name == "step" or name == KEPT_RADIUS:
            continue
        if name not in powers or value.shape != parameter.shape:
            why = f"the unit of {name!r} in the state of {type(optimizer).__name__} is unknown"
            raise refuse(why, "Balance before the optimizer takes its first step.")
        if powers[name]:
            edit.on_undo(partial(_set_state_, optimizer, parameter, name, value.clone()))
            edit.overwrite_(value, (value.double() / s.pow(powers[name])).to(value.dtype))


def _set_state_(optimizer: Optimizer, parameter: nn.Parameter, name: str, before: Tensor) -> None:
    """Overwrite the present tensor of the state: `load_state_dict` of an optimizer makes new ones."""
    now = optimizer.state.get(parameter, {}).get(name)
    if isinstance(now, Tensor) and now.shape == before.shape:
        Edit.overwrite_(now, before)
