"""The layout of a tensor that is read without its model: from its key, its shape and the tensors beside it.

A key says what torch's layers call their weights; it is held against the shapes of the bias and of the other tensors
of the same layer. What these do not settle is assumed with a note, or left unread with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from gonio.geometry import Layout
from gonio.geometry.views import ATTENTION

Shapes = Mapping[str, tuple[int, ...]]

_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_RECURRENT = re.compile(r"(.*?)weight_(ih|hh|hr)(_l\d+(?:_reverse)?)?")
_KINDS = {2: "linear or embedding", 3: "1-d convolution", 4: "2-d convolution", 5: "3-d convolution"}
_RAW = "the tensor that a parametrization computes the weight from"
UNKNOWN = "not called a weight, so not read as filters"
INPUTS_FIRST = "stored with its inputs first, as the bias tells"
SMALL_KERNEL = 8  # positions of a convolution in a dimension, less than it has channels


def clean_names(names: Iterable[str]) -> dict[str, str]:
    """Each key without the names that wrappers add; `module.` is removed only if every key begins with it.

    Example:
        >>> from gonio.measuring.reading.layouts import clean_names
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


def stores_inputs_first(shapes: Shapes) -> bool:
    """Whether all matrices of a file whose bias tells have their inputs first (`Conv1D` of GPT-2 and its kin)."""
    found = set()
    for name, shape in shapes.items():
        bias = _bias_of(name, shapes)
        if len(shape) == 2 and bias is not None and len(bias) == 1 and shape[0] != shape[1] and bias[0] in shape:
            found.add(bias[0] == shape[1])
    return found == {True}


def _bias_of(name: str, shapes: Shapes) -> tuple[int, ...] | None:
    """The shape of the bias beside a weight; None without one."""
    path, _, last = name.rpartition("weight")
    return shapes.get(f"{path}bias{last}") if name.rpartition(".")[2].count("weight") == 1 else None


def infer(name: str, shapes: Shapes, *, inputs_first: bool = False) -> tuple[Layout | None, str, str, tuple[str, ...]]:
    """The layout of a tensor, or None; its kind; the reason for None; notes.

    A weight of two to five dimensions is a stack of filters on dim 0: a linear layer or an embedding (2), a
    convolution (3 to 5). Groups and transposition of a convolution cannot be seen; it is read as neither.

    Args:
        shapes: of all tensors of the state dict.
        inputs_first: whether matrices of the file that are square, and have a bias, have their inputs first too.
    """
    shape = shapes[name]
    last = name.rpartition(".")[2]
    if len(shape) < 2:
        return None, f"{len(shape)}-d tensor", "a single number" if not shape else "a vector", ()
    if ".parametrizations." in f".{name}" and last == "original":
        return Layout(), "parametrization", "", (_RAW,)
    bias = _bias_of(name, shapes)
    recurrent = _RECURRENT.fullmatch(name)
    named = last in ("weight", "lora_A", "lora_B", *ATTENTION) or recurrent is not None
    told = bias is not None and len(bias) == 1 and bias[0] in (shape[0], shape[1])
    if len(shape) not in _KINDS or not (named or told):
        return None, f"{len(shape)}-d tensor", UNKNOWN, ()
    if bias is not None and bias == shape:
        return None, f"{len(shape)}-d tensor", "gains: its bias has the same shape", ()
    if len(shape) == 2 and told and bias is not None and recurrent is None and last not in ATTENTION:
        square = shape[0] == shape[1]
        if (not square and bias[0] == shape[1]) or (square and inputs_first):
            return Layout(transposed=True), _KINDS[2], "", (INPUTS_FIRST if not square else f"{INPUTS_FIRST}es",)
    if len(shape) > 2 and told and bias is not None and bias[0] != shape[0]:
        return Layout(transposed=True), f"transposed {_KINDS[len(shape)]}", "", ("outputs on dim 1, as its bias tells",)
    blocks, notes = _blocks(name, shapes)
    if len(shape) > 2:
        lone = shape[1] == 1 and shape[0] > 1
        notes = (*notes, "depthwise, or of one input channel" if lone else "groups unknown, read as 1")
    if f"{name}_parametrization._extra_state" in shapes:
        notes = (*notes, _RAW)
    return Layout(blocks=blocks), _KINDS[len(shape)], "", notes


def _blocks(name: str, shapes: Shapes) -> tuple[int, tuple[str, ...]]:
    """The number of stacked matrices in packed attention and recurrent weights, and a note."""
    shape = shapes[name]
    if name.endswith("in_proj_weight") and shape[0] == 3 * shape[1]:
        return 3, ("packed attention: three matrices",)
    if (found := _RECURRENT.fullmatch(name)) and found[2] != "hr":
        path, layer = found[1], found[3] or ""
        projected = shapes.get(f"{path}weight_hr{layer}", ())  # (outputs, hidden) where an LSTM projects its output
        hidden = (projected or shapes.get(f"{path}weight_hh{layer}", (0,)))[-1]
        blocks = shape[0] // hidden if hidden and shape[0] % hidden == 0 else 1
        if blocks in (3, 4):
            return blocks, (f"{'LSTM' if blocks == 4 else 'GRU'}: {blocks} matrices",)
    return 1, ()


def is_batched_kernel(shape: tuple[int, ...]) -> bool:
    """Whether a shape is (1, outputs, inputs, k, k) of a modulated convolution, and none of a 3-d convolution."""
    return len(shape) == 5 and shape[0] == 1 and shape[3] == shape[4] <= SMALL_KERNEL < shape[2]


def why_no_filters(tensor: Tensor, *, lone: bool) -> str:
    """Why the values of a tensor are no filters, where name and shape alone say that they are; empty if they may be.

    Gains of a norm over several dimensions begin at 1 and stay near it, entry by entry. A fixed kernel (blur) repeats
    one row of positive values in every channel. Neither can be a layer's random or trained filters.

    Args:
        lone: whether each filter has one input channel.
    """
    first = tensor.reshape(len(tensor), -1)[:2].float()  # most tensors are told by two rows
    if bool(((first > 0.5) & (first < 2)).all()):
        values = tensor.float()
        if bool(((values > 0.5) & (values < 2)).all()):
            return "every value is within a factor of two of 1: gains, not filters"
    if lone and tensor.ndim > 2 and bool((first >= 0).all()) and torch.equal(first[0], first[-1]):
        if bool((tensor == tensor[:1]).all()):
            return "the same kernel in every channel: fixed, not trained"
    return ""
