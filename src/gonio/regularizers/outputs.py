"""What a regularizer of layer outputs is."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gonio.geometry.norms import full_precision
from gonio.regularizers.base import Evaluation, Regularizer, require

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["OutputRegularizer"]


@dataclass(frozen=True)
class OutputRegularizer(Regularizer):
    """A regularizer of what a layer puts out for a batch."""

    @property
    @abstractmethod
    def ignores_bias(self) -> bool:
        """Whether the value stays when a constant is added to an output channel."""

    def value(
        self,
        outputs: Tensor,
        *,
        groups: int = 1,
        generator: torch.Generator | None = None,
        process_group: ProcessGroup | None = None,
    ) -> Tensor:
        """The penalty at strength 1; a differentiable scalar.

        Computed in float32 at least, also under autocast.

        Args:
            outputs: (N, k) or (N, k, *positions) with k output channels, bias removed.
            groups: channels of different groups see different inputs and are never paired.
            generator: where the method samples.
            process_group: the batch is spread over its processes; the value is that of the whole batch.
        """
        return self.evaluate(outputs, groups=groups, generator=generator, process_group=process_group).value

    def __call__(
        self,
        outputs: Tensor,
        *,
        groups: int = 1,
        generator: torch.Generator | None = None,
        process_group: ProcessGroup | None = None,
    ) -> Tensor:
        """strength × :meth:`value`."""
        return self.strength * self.value(outputs, groups=groups, generator=generator, process_group=process_group)

    def evaluate(
        self,
        outputs: Tensor,
        *,
        groups: int = 1,
        generator: torch.Generator | None = None,
        process_group: ProcessGroup | None = None,
    ) -> Evaluation:
        """The value together with its summands; arguments as for :meth:`value`."""
        require(
            outputs.ndim >= 2 and outputs.shape[1] % groups == 0,
            f"{type(self).__name__} takes outputs (N, k, *positions) with k divisible by groups={groups}",
            f"shape {tuple(outputs.shape)}",
            "Put the channels on dim 1, for example with .flatten(0, -2) after a linear layer.",
        )
        with full_precision(outputs):
            return self._evaluate(outputs, groups, generator, process_group)

    @abstractmethod
    def _evaluate(
        self,
        outputs: Tensor,
        groups: int,
        generator: torch.Generator | None,
        process_group: ProcessGroup | None,
    ) -> Evaluation:
        """The value for outputs, still in their own dtype."""
