"""The options of a decoupled operator, and which of them go together."""

from __future__ import annotations

from typing import Literal, get_args

from gonio.errors import InvalidArgumentError
from gonio.nn.angular import Angular, Cosine
from gonio.nn.gradient import Gradient
from gonio.nn.magnitude import Magnitude, Tanh

__all__ = ["COSINE", "TANH", "Weighted", "check_operator"]

Weighted = Literal["linear", "tanh_product", "tanh_each"]

TANH = Tanh()  # the parts of a decoupled layer that is told nothing else
COSINE = Cosine()


def check_operator(
    owner: str, magnitude: object, angular: object, weighted: Weighted | None, gradient: Gradient
) -> None:
    """Raise for options that are not of their kind, or have no meaning together."""
    if not isinstance(magnitude, Magnitude):
        do = "Give one of gonio.nn.magnitude, such as Tanh()."
        raise InvalidArgumentError(f"{owner} was asked for its magnitude", repr(magnitude), do)
    if not isinstance(angular, Angular):
        do = "Give one of gonio.nn.angular, such as Cosine()."
        raise InvalidArgumentError(f"{owner} was asked for its angular part", repr(angular), do)
    if weighted is not None and weighted not in get_args(Weighted):
        do = f"Give None or one of {', '.join(get_args(Weighted))}."
        raise InvalidArgumentError(f"{owner} was asked for weighted", repr(weighted), do)
    if weighted in ("tanh_product", "tanh_each") and not isinstance(magnitude, Tanh):
        asked = f"{owner} was asked for weighted={weighted!r}, which is defined for the magnitude Tanh"
        raise InvalidArgumentError(asked, repr(magnitude), 'Use magnitude=Tanh(…), or weighted="linear".')
    if gradient not in get_args(Gradient):
        do = f"Give one of {', '.join(get_args(Gradient))}."
        raise InvalidArgumentError(f"{owner} was asked for gradient", repr(gradient), do)
    if gradient == "weighted" and weighted is not None:
        asked = f'{owner} was asked for gradient="weighted", which removes 1/‖w‖ from the gradient of unit filters'
        raise InvalidArgumentError(asked, f"weighted={weighted!r}", 'Use weighted=None, or gradient="exact".')
