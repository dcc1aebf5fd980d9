"""The private interface of torch that this package uses, and what it knows of sharded tensors, in one place."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gonio.errors import NotApplicableError

__all__ = ["redirect_fsdp_", "sharded_like", "weight_norm_kernel"]


def weight_norm_kernel(raw: Tensor, norms: Tensor) -> tuple[Tensor, Tensor]:
    """Filters on dim 0 scaled to `norms`, of shape (n, 1, …), and the norms they had; NaN for a zero filter."""
    weight, found = torch._weight_norm_interface(raw, norms, 0)
    return weight, found


def sharded_like(raw: Any, weight: Tensor) -> Tensor:
    """A weight that is the same in every process, distributed as the DTensor `raw` is; differentiable."""
    everywhere: Any = raw.from_local(weight, raw.device_mesh, run_check=False)
    distributed: Tensor = everywhere.redistribute(placements=raw.placements)
    return distributed


def redirect_fsdp_(hook: Callable[..., Any], layer: nn.Module, own_class: type[nn.Module]) -> None:
    """Let FSDP 2 read and replace the raw Parameter of a parametrized layer.

    FSDP reads ``layer.weight`` before the first forward, and after a load or a move, to see whether it still is the
    Parameter that it shards. On a parametrized layer it would find the effective weight and train that. Its record
    of the Parameter therefore gets a view of the layer: an instance of the layer's own class with the same
    ``__dict__``. Other readers of a sharded layer still get the effective weight.

    Args:
        hook: what was passed to ``register_load_state_dict_post_hook``. FSDP's hook refers to its record.
        layer: the parametrized layer.
        own_class: the class of the layer without parametrizations.

    Raises:
        NotApplicableError: if FSDP's hook has another form in the installed version of torch.
    """
    if not str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp."):
        return
    record: Any = getattr(inspect.getclosurevars(hook).nonlocals.get("self"), "_module_info", None)
    if getattr(record, "module", None) is not layer:
        raise NotApplicableError(
            "fully_shard()",
            type(layer).__name__,
            f"it is parametrized, and the FSDP of torch {torch.__version__} is not known to gonio",
            "Fold the model first: gonio.fold_(model).",
        )
    view = own_class.__new__(own_class)
    object.__setattr__(view, "__dict__", layer.__dict__)
    record.module = view
