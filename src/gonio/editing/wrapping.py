"""Wrappers of torch.compile, data parallelism and sharding around or in a model.

The order that always works is: edit, build the optimizer, then compile, replicate or shard. A later edit
works where its result is right, and is refused elsewhere:

* compiled: edits inside act, and the next call compiles anew; the verbs run the model eagerly themselves.
* replicated (DDP): the parameters are fixed when it is wrapped; an edit may change values and the
  computation, but may not add or remove parameters.
* sharded (FSDP 2): values can be set (`init_`, `calibrate_`); everything else is refused.
* sharded by tensor parallelism: as for FSDP 2. `parallelize_module` itself fails on parametrized layers.
* sharded (FSDP 1): parameters are slices of one flat tensor; every edit is refused.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from gonio.errors import NotApplicableError

_CONTENT = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_BEFORE = "Edit the model before it is sharded."
_PARALLEL = frozenset({"DataParallel", "DistributedDataParallel", "AveragedModel"})


def _class_names(module: nn.Module) -> set[str]:
    return {base.__name__ for base in type(module).__mro__}


def adds_no_name(parent: nn.Module, name: str) -> bool:
    """Whether `name` is the name that a wrapper gives to its content; paths leave it out."""
    return name in _CONTENT or (name == "module" and bool(_class_names(parent) & _PARALLEL))


def holds_original(module: nn.Module) -> bool:
    """Whether a wrapper holds a reference to the module itself, so that replacing the child has no effect."""
    return "OptimizedModule" in _class_names(module)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside the wrappers of compilation, parallelism and averaging."""
    while True:
        inner = next((child for name, child in model._modules.items() if adds_no_name(model, name)), None)
        if inner is None:
            return model
        model = inner


def is_replicated(model: nn.Module) -> bool:
    """Whether DistributedDataParallel is around the model or a part of it."""
    return any("DistributedDataParallel" in _class_names(module) for module in model.modules())


def is_sharded(model: nn.Module) -> bool:
    """Whether any parameter is one process's part of a larger tensor."""
    return any(hasattr(parameter, "device_mesh") for parameter in model.parameters())


def reshard_(model: nn.Module) -> None:
    """Reshard a model in FSDP 2: after a forward it may still hold whole tensors in the place of its shards."""
    for module in model.modules():
        if "FSDPModule" in _class_names(module):
            module.reshard()  # type: ignore[operator]


def refuse_flat_shards(model: nn.Module, verb: str, *, do: str = _BEFORE, action: str = "change") -> None:
    """Raise for a model in FSDP 1."""
    if any("FullyShardedDataParallel" in _class_names(module) for module in model.modules()):
        why = "its parameters are slices of one flat tensor (FSDP 1)"
        raise NotApplicableError(verb, "", why, do, action=action)


def refuse_shards(model: nn.Module, verb: str) -> None:
    """Raise where whole tensors are needed and the model has shards."""
    refuse_flat_shards(model, verb)
    if not is_sharded(model):
        return
    why, do = "its parameters are sharded", _BEFORE
    if not any("FSDPModule" in _class_names(module) for module in model.modules()):
        why = "its parameters are sharded by tensor parallelism"
        do = "Edit the model before; parallelize_module takes plain layers alone, without a parametrization."
    raise NotApplicableError(verb, "", why, do, action="change")


def run_eagerly(model: nn.Module) -> AbstractContextManager[None]:
    """A context in which compiled modules run eagerly: hooks fire, and nothing is compiled."""
    if not any(holds_original(m) or m._compiled_call_impl is not None for m in model.modules()):
        return nullcontext()  # set_stance imports the compiler
    stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance
