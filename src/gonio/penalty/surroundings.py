"""What the model's graph says about the layers that are penalised."""

from __future__ import annotations

from functools import cached_property

from torch import nn

from gonio.surgery.graph import activation_after, followed_by_norm, trace

__all__ = ["HOMOGENEOUS", "Surroundings"]

HOMOGENEOUS = frozenset({"relu", "leaky_relu", "linear"})


class Surroundings:
    """What follows each layer; the model is traced when that is first asked for."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._asked = False

    @cached_property
    def _norms(self) -> dict[int, str]:
        self._asked = True
        return self._by_module(followed_by_norm(self.model))

    @cached_property
    def _activations(self) -> dict[int, str]:
        return self._by_module(activation_after(self.model))

    def _by_module(self, found: dict[str, str]) -> dict[int, str]:
        return {id(self.model.get_submodule(path)): what for path, what in found.items()}

    def norm_after(self, module: nn.Module) -> str | None:
        """The path of the normalisation layer that takes the scale of this one away."""
        return self._norms.get(id(module))

    def activation_after(self, module: nn.Module) -> str | None:
        """The name of the activation that follows, if it is known."""
        return self._activations.get(id(module))

    def remarks(self) -> list[str]:
        """Why nothing is known about normalisation, where it was asked for."""
        if not self._asked or self._norms:
            return []
        reason = trace(self.model).reason
        if not reason:
            return []
        return [
            f"the model cannot be traced ({reason}), so weights before a normalisation layer were not told "
            "apart; exclude them in `where`"
        ]
