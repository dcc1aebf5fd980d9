"""What a state dict's keys and shapes say about tensors whose layers are not at hand."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from gonio.geometry import Layout

__all__ = ["clean_names", "infer"]

_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_RECURRENT = re.compile(r"(.*?)weight_(ih|hh)(_l\d+(?:_reverse)?)?")
_KINDS = {2: "linear or embedding", 3: "1-d convolution", 4: "2-d convolution", 5: "3-d convolution"}


def clean_names(names: Iterable[str]) -> dict[str, str]:
    """Each key without the names that wrappers put into it; `module.` goes only if every key has it.

    Example:
        >>> from gonio.measuring.names import clean_names
        >>> clean_names(["module._orig_mod.fc.weight", "module.module.w"])
        {'module._orig_mod.fc.weight': 'fc.weight', 'module.module.w': 'module.w'}
    """
    names = list(names)
    shared = bool(names) and all(name.startswith("module.") for name in names)
    cleaned = {}
    for name in names:
        parts = (name.removeprefix("module.") if shared else name).split(".")
        cleaned[name] = ".".join(part for part in parts if part not in _WRAPPERS)
    unique = len(set(cleaned.values())) == len(cleaned)
    return cleaned if unique else {name: name for name in names}


def infer(name: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Layout | None, str, str, tuple[str, ...]]:
    """How the tensor `name` is stored, as far as its key and shape tell.

    A tensor of two to five dimensions that is called a weight is a stack of filters on dim 0: a linear layer
    or an embedding (2), a convolution (3 to 5). Whether a convolution is grouped or transposed no
    shape tells; it is read as neither, and the measurement says so.

    Args:
        name: the key.
        shapes: of all tensors of the state dict; the blocks of recurrent weights follow from two of them.

    Returns:
        The layout, or None; the kind; why there is no layout; notes.
    """
    shape = shapes[name]
    last = name.rsplit(".", 1)[-1]
    if len(shape) < 2:
        return None, f"{len(shape)}-d tensor", "a single number" if not shape else "a vector", ()
    if ".parametrizations." in f".{name}" and last.startswith("original"):
        raw = ("the tensor that a parametrization computes the weight from",)
        return Layout(), "parametrization", "", raw
    if ("weight" not in last and last not in ("kernel", "lora_A", "lora_B")) or len(shape) not in _KINDS:
        return None, f"{len(shape)}-d tensor", "not called a weight, so not read as filters", ()
    blocks, notes = _blocks(name, shapes)
    if len(shape) > 2:
        lone = shape[1] == 1 and shape[0] > 1
        notes = (*notes, "depthwise, or of one input channel" if lone else "groups unknown, read as 1")
    if f"{name}_parametrization.version" in shapes:
        notes = (*notes, "the tensor that a parametrization computes the weight from")
    return Layout(blocks=blocks), _KINDS[len(shape)], "", notes


def _blocks(name: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, tuple[str, ...]]:
    """Stacked matrices of packed attention and of recurrent weights."""
    shape = shapes[name]
    if name.endswith("in_proj_weight") and shape[0] == 3 * shape[1]:
        return 3, ("packed attention: three matrices",)
    found = _RECURRENT.fullmatch(name)
    if found:
        hidden = shapes.get(f"{found[1]}weight_hh{found[3] or ''}", (0, 0))[-1]
        blocks = shape[0] // hidden if hidden and shape[0] % hidden == 0 else 1
        if blocks in (3, 4):
            return blocks, (f"{'LSTM' if blocks == 4 else 'GRU'}: {blocks} matrices",)
    return 1, ()
