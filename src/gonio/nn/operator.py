"""The options of a decoupled layer as one value."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from gonio.errors import InvalidArgumentError
from gonio.execution import ProcessGroup
from gonio.nn.angular import Angular, Cosine
from gonio.nn.magnitude import Magnitude, Tanh, Weighted

Gradient = Literal["exact", "weighted"]

TANH = Tanh()  # the defaults of a decoupled layer
COSINE = Cosine()


@dataclass(frozen=True, kw_only=True)
class Operator:
    r"""The options of a decoupled layer, which are the keyword arguments of its constructor beside torch's.

    Args:
        magnitude: one of :mod:`gonio.nn.magnitude`.
        angular: one of :mod:`gonio.nn.angular`.
        weighted: how :math:`\lVert w \rVert` enters. None: not at all. ``"linear"``: :math:`h` is
            multiplied by it. ``"tanh_product"``: :math:`\alpha\tanh(\lVert x \rVert\lVert w \rVert/\rho)`.
            ``"tanh_each"``: :math:`\alpha\tanh(\lVert x \rVert/\rho)\tanh(\lVert w \rVert/\rho_0)`, where
            :math:`\rho_0` is the radius as given, because a mean norm of inputs is no unit for filters.
        gradient: ``"exact"``, or ``"weighted"``, which multiplies the gradient of each filter by its
            norm and so removes its dependence on that norm; for ``weighted=None`` only.
        momentum: of the running mean norm, torch's convention; None averages all batches.
        synchronize: take the mean norm over all processes of a data-parallel training.
        process_group: the processes that share a batch, if they are not all. A layer with a group cannot be copied or
            pickled; its state dict can.

    Raises: InvalidArgumentError for an option of the wrong type, and for options that have no meaning together.

    Example:
        >>> layer = gonio.nn.DecoupledLinear(3, 2, magnitude=gonio.nn.magnitude.Ball())
        >>> layer.operator.magnitude, layer.operator.weighted
        (Ball(alpha=1.0, learn_alpha=False, radius=1.0, learn_radius=False, radius_in='mean_norm'), None)
    """

    magnitude: Magnitude = TANH
    angular: Angular = COSINE
    weighted: Weighted | None = None
    gradient: Gradient = "exact"
    momentum: float | None = 0.1
    synchronize: bool = True
    process_group: ProcessGroup | None = None

    def __post_init__(self) -> None:
        weightings, gradients = get_args(Weighted), get_args(Gradient)
        for name, valid, do in (
            ("magnitude", isinstance(self.magnitude, Magnitude), "an object of gonio.nn.magnitude, such as Tanh()"),
            ("angular", isinstance(self.angular, Angular), "an object of gonio.nn.angular, such as Cosine()"),
            ("weighted", self.weighted in (None, *weightings), f"None or one of {', '.join(weightings)}"),
            ("gradient", self.gradient in gradients, f"one of {', '.join(gradients)}"),
        ):
            if not valid:
                raise InvalidArgumentError(f"decoupled layer: invalid {name}", repr(getattr(self, name)), f"Pass {do}.")
        if self.weighted not in (None, *self.magnitude.weightings):
            known = type(self.magnitude).__name__
            problem = f"decoupled layer: weighted={self.weighted!r} is not defined for the magnitude {known}"
            do = f"Pass weighted={' or '.join(map(repr, (None, *self.magnitude.weightings)))}, or another magnitude."
            raise InvalidArgumentError(problem, repr(self.magnitude), do)
        if self.gradient == "weighted" and self.weighted is not None:
            problem = 'decoupled layer: gradient="weighted" is defined for weighted=None only'
            raise InvalidArgumentError(
                problem, f"weighted={self.weighted!r}", 'Pass weighted=None, or gradient="exact".'
            )
        _ = self.is_linear, self.takes_raw_filters  # cached now, and not while a compiler traces a layer

    @cached_property
    def is_linear(self) -> bool:
        """Whether the input's norm cancels: the operator is α·⟨w, x⟩ or α·⟨w, x⟩/‖w‖."""
        return self.magnitude.is_linear and self.angular.is_cosine

    @cached_property
    def takes_raw_filters(self) -> bool:
        """Whether the filters' norms cancel: the operator is ⟨w, x⟩ times a function of ‖x‖."""
        return self.weighted == "linear" and self.angular.is_cosine
