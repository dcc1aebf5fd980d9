"""How the state of an optimizer moves when a parameter is rescaled.

If w becomes s·w and the function stays the same, its gradient becomes g/s. A state tensor that is a sum of
gradients then is divided by s, one of squared gradients by s², one in units of the parameter multiplied by
s, and one without a unit stays.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gonio.errors import NotApplicableError
from gonio.surgery.edit import Edit

__all__ = ["move_state_"]

# For each optimizer, by the name of its class: the power of 1/s by which each entry of its state moves.
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


def move_state_(edit: Edit, optimizer: torch.optim.Optimizer, path: str, parameter: nn.Parameter, s: Tensor) -> None:
    """Move what an optimizer remembers of a parameter that is being multiplied by s.

    Args:
        edit: records the old values.
        optimizer: one of `torch.optim`, or a subclass; others may hold state of their own for scalars alone.
        path: of the layer, for messages.
        parameter: of any shape.
        s: broadcasts against the parameter.

    Raises:
        NotApplicableError: if the state holds a tensor of unknown meaning.
    """
    powers = next((_POWERS[base.__name__] for base in type(optimizer).__mro__ if base.__name__ in _POWERS), {})
    for name, value in optimizer.state.get(parameter, {}).items():
        if not isinstance(value, Tensor) or (value.numel() == 1 and parameter.numel() != 1) or name == "step":
            continue
        if name not in powers or value.shape != parameter.shape:
            why = f"what {type(optimizer).__name__} remembers under {name!r} is of unknown scale"
            raise NotApplicableError("balance_", path, why, "Balance before the optimizer takes its first step.")
        if powers[name]:
            edit.set_data_(value, (value.double() / s.pow(powers[name])).to(value.dtype))
