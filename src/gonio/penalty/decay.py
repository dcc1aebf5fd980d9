"""Which parameters weight decay should shrink, and which not and why."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from torch import nn
from torch.nn.parameter import is_lazy

from gonio.editing.memory import overlapping
from gonio.editing.where import sites, unwrapped
from gonio.errors import InvalidArgumentError, listing
from gonio.geometry.views import view_shape
from gonio.penalty.penalty import Penalty
from gonio.penalty.weights import weights_of
from gonio.surgery.facts import TABLES


@dataclass(frozen=True, repr=False)
class Groups(Sequence[dict[str, Any]]):
    """Parameter groups, which an optimizer takes like a list of them."""

    groups: tuple[dict[str, Any], ...]

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | Sequence[dict[str, Any]]:
        return self.groups[index]

    def __len__(self) -> int:
        return len(self.groups)

    def __repr__(self) -> str:
        """The first line of the text, without the tensors."""
        return f"<{type(self).__name__}: {str(self).splitlines()[0]}>"


@dataclass(frozen=True, repr=False)
class ParamGroups(Groups):
    """Two parameter groups for an optimizer; printing them says what is in which and why.

    Example:
        >>> groups = gonio.param_groups(nn.Linear(4, 2), 5e-4)
        >>> groups.decayed, groups.spared
        (('weight',), {'bias': 'a bias'})
    """

    decayed: tuple[str, ...]  # the names in the first group, which decays
    spared: Mapping[str, str]  # the names of the others, and why each does not decay

    def __str__(self) -> str:
        width = max((len(name) for name in (*self.decayed, *self.spared)), default=0)
        lines = [f"  {name:<{width}}  decays" for name in self.decayed]
        lines += [f"  {name:<{width}}  does not: {why}" for name, why in self.spared.items()]
        count = f"{len(self.decayed)} tensor{'s' * (len(self.decayed) != 1)}"
        head = f"weight decay {self.groups[0]['weight_decay']:g} on {count}, not on {len(self.spared)}"
        return "\n".join([head, *lines])


def decay_groups(model: nn.Module, weight_decay: float, *, penalty: Penalty | None = None) -> ParamGroups:
    """The model's trainable parameters in two groups: weights decay, and nothing else does.

    Weights are the tensors of linear layers, convolutions, attention and recurrent layers that have filters. Biases,
    the scales of normalisation layers, one scale per filter (weight normalisation's magnitudes, whatever their number
    of dimensions), look-up tables, tokens and positions do not decay: shrinking them moves what the network computes
    without making any direction simpler. A weight whose scale a penalty already draws down would be shrunk twice.

    A weight before a normalisation layer decays, as is usual: its scale does not change the function, and decay then
    holds the effective learning rate.

    Args:
        penalty: weights under its terms on scale (`L2`, `ScaleShift`) do not decay as well.

    Raises:
        InvalidArgumentError: if weight_decay is negative or not finite, or the model has nothing to train, lazy
            parameters, or two parameters on one memory.

    Example:
        >>> from gonio.penalty import decay_groups
        >>> groups = decay_groups(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), 5e-4)
        >>> print(groups)
        weight decay 0.0005 on 1 tensor, not on 3
          0.weight  decays
          0.bias    does not: a bias
          1.weight  does not: one number per unit
          1.bias    does not: a bias
        >>> optimizer = torch.optim.SGD(groups, lr=0.1)

    See also:
        :meth:`gonio.Penalty.check`, which finds scale that an optimizer and a penalty shrink both.
    """
    check_decay(weight_decay)
    reasons, parameters = decay_reasons(model, penalty), dict(model.named_parameters())
    spared = {name: why for name, why in reasons.items() if why is not None}
    decayed = [name for name in reasons if name not in spared]
    groups = (
        {"params": [parameters[name] for name in decayed], "weight_decay": weight_decay},
        {"params": [parameters[name] for name in spared], "weight_decay": 0.0},
    )
    return ParamGroups(groups, tuple(decayed), spared)


def check_decay(weight_decay: float | None) -> None:
    """Raise for a weight decay that is negative or not finite."""
    if weight_decay is not None and not 0 <= weight_decay < math.inf:
        asked = "param_groups() needs a finite weight_decay >= 0"
        raise InvalidArgumentError(asked, f"{weight_decay}", "0 decays nothing.")


def decay_reasons(model: nn.Module, penalty: Penalty | None) -> dict[str, str | None]:
    """Why each trainable parameter, by name, does not decay; None for one that does.

    Raises: InvalidArgumentError if nothing trains, or a number would be trained twice.
    """
    weights, tables = weights_and_tables(unwrapped(model))
    held = penalty.scaled_parameters() if penalty is not None else {}
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not trained:
        do = "Thaw what should train first."
        raise InvalidArgumentError("param_groups() needs parameters that train", "none requires a gradient", do)
    if lazy := [name for name, parameter in trained if is_lazy(parameter)]:
        do = "Run one batch first."
        raise InvalidArgumentError("param_groups() needs the shapes of the parameters", f"lazy {listing(lazy)}", do)
    if shared := overlapping(parameter for _, parameter in trained):
        do = "Let the layers hold one Parameter; load_state_dict(assign=True) and nn.Parameter(a.data) make another."
        found = listing([name for name, parameter in trained if id(parameter) in shared])
        needs = "param_groups() needs parameters that share no memory, for a number would be stepped and decayed twice"
        raise InvalidArgumentError(needs, f"shared memory of {found}", do)
    return {name: held.get(id(p)) or _why_spared(name, p, weights, tables) for name, p in trained}


def weights_and_tables(model: nn.Module) -> tuple[set[int], set[int]]:
    """Parameters that hold more than a number per filter of some weight, and those of tables, by identity."""
    weights: set[int] = set()
    tables: set[int] = set()
    for ref in (ref for site in sites(model) for ref in weights_of(site)):
        if isinstance(ref.module, TABLES):
            tables.update(map(id, ref.parameters()))
            continue
        groups, filters, _ = view_shape(ref.tensor().shape, ref.layout)
        own = ref.module._parameters.get(ref.name)
        for parameter in ref.parameters():
            if parameter.numel() > groups * filters or (parameter is own and parameter.ndim == 2):
                weights.add(id(parameter))
    return weights, tables


def _why_spared(name: str, parameter: nn.Parameter, weights: set[int], tables: set[int]) -> str | None:
    if id(parameter) in weights:
        return None
    bias = "bias" in name.rsplit(".", 1)[-1]
    return "a table that is looked up" if id(parameter) in tables and not bias else why_no_weight(name, parameter)


def why_no_weight(name: str, parameter: nn.Parameter) -> str:
    """What a parameter is that no layer uses as a weight with filters."""
    if "bias" in name.rsplit(".", 1)[-1]:
        return "a bias"
    return "one number per unit" if sum(size > 1 for size in parameter.shape) < 2 else "no weight with filters"
