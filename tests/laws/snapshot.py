"""Everything about a model that undo must bring back, as one comparable value."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from gonio.surgery.equivalent import call


@dataclass(frozen=True)
class Snapshot:
    """Identities and values of a model, in order."""

    classes: list[tuple[str, type]]
    modules: list[tuple[str, int]]
    parameters: list[tuple[str, int, bool]]
    buffers: list[str]
    training: list[tuple[str, bool]]
    attributes: list[tuple[str, list[str]]]
    hooks: list[tuple[str, str, int]]
    state: list[tuple[str, Any]]
    outputs: list[Tensor]

    @classmethod
    def of(cls, model: nn.Module, x: Any) -> Snapshot:
        """Of a model and an input: a tensor, a tuple of arguments or a dict."""
        named = list(model.named_modules(remove_duplicate=False))
        parameters = list(model.named_parameters(remove_duplicate=False))
        return cls(
            classes=[(path, type(m)) for path, m in named],
            modules=[(path, id(m)) for path, m in named],
            parameters=[(name, id(p), p.requires_grad) for name, p in parameters],
            buffers=[name for name, _ in model.named_buffers(remove_duplicate=False)],
            training=[(path, m.training) for path, m in named],
            attributes=[(path, sorted(vars(m))) for path, m in named],
            hooks=_hooks(model),
            state=[(key, _kept(value)) for key, value in model.state_dict().items()],
            outputs=_outputs(model, x),
        )


def _hooks(model: nn.Module) -> list[tuple[str, str, int]]:
    """How many hooks hang on each module and each tensor."""
    found = []
    for path, module in model.named_modules():
        counts = {key: len(value) for key, value in vars(module).items() if key.endswith("_hooks")}
        found += [(path, key, count) for key, count in sorted(counts.items()) if count]
    for path, parameter in model.named_parameters():
        for key in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            hooks = getattr(parameter, key, None)
            if hooks:
                found.append((path, key, len(hooks)))
    return found


@torch.no_grad()
def _outputs(model: nn.Module, x: Any) -> list[Tensor]:
    """Outputs of copies in both modes, from one state of the global generator (for dropout)."""
    found = []
    for training in (False, True):
        twin = copied(model).train(training)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            leaves, _ = tree_flatten(call(twin, x))
        found += [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return found


def _kept(value: Any) -> Any:
    """An entry of a state dict, which `get_extra_state` may make anything."""
    return value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def copied(model: nn.Module) -> nn.Module:
    """A deep copy, also of sparse parameters and of a weight that a hook of torch.nn.utils computed with a graph."""
    attributes = [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]
    copies: dict[int, Any] = {id(value): value.detach().clone() for value in attributes if not value.is_leaf}
    for p in model.parameters():
        if p.layout is not torch.strided:  # torch copies dense parameters alone
            copies[id(p)] = nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad)
    return copy.deepcopy(model, copies)


def assert_restored(before: Snapshot, after: Snapshot) -> None:
    for name in ("classes", "modules", "parameters", "buffers", "training", "attributes", "hooks"):
        _assert_same(name, getattr(before, name), getattr(after, name))
    _assert_same("state-dict keys", [key for key, _ in before.state], [key for key, _ in after.state])
    for (key, old), (_, new) in zip(before.state, after.state, strict=True):
        assert _equal(old, new), f"{key!r} has other values after undo"
    for old, new in zip(before.outputs, after.outputs, strict=True):
        assert _equal(old, new), "the output differs after undo"


def _equal(old: Any, new: Any) -> bool:
    if not isinstance(old, Tensor):
        return bool(old == new)
    a, b = (t.to_dense() if t.layout is not torch.strided else t for t in (old, new))
    return a.dtype == b.dtype and torch.equal(a, b)


def _assert_same(name: str, old: list[Any], new: list[Any]) -> None:
    gone = [entry for entry in old if entry not in new]
    added = [entry for entry in new if entry not in old]
    assert old == new, f"{name} differ after undo: gone {gone}, added {added}, or another order"
