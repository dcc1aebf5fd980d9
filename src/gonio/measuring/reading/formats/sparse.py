"""Weights of compressed-tensors without their zeros: the other values, and a bit for each entry that says which it is.

`sparse-bitmask` stores how many values lie before each row; `sparse-24-bitmask`, of two values in every four entries,
has equally many in each row. The values may be codes of 8 bits, whose scale lies beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from gonio.errors import InvalidArgumentError
from gonio.measuring.reading.entry import StoredTensor
from gonio.measuring.reading.formats import FileTensors, Format, StoredTensors, StoredWeight, numbers_in, plain_floats
from gonio.measuring.reading.formats.scaled import scaled

_PARTS = ("compressed", "bitmask", "shape", "row_offsets")
_DIMS = 8  # of a weight


def _sparse(name: str, stored: FileTensors, config: Mapping[str, Any]) -> StoredWeight | None:
    path, _, last = name.rpartition(".")
    layer, own = stored.layers[path], f"{path}.weight".lstrip(".")
    if last != "compressed" or any(part not in layer for part in _PARTS[:3]) or layer["bitmask"].dtype != "uint8":
        return None
    parts = {part: layer[part] for part in _PARTS if part in layer}
    used = tuple(f"{path}.{part}".lstrip(".") for part in parts)
    shape = _shape(layer["shape"])
    why = "it has a weight beside it" if "weight" in layer else _unfit(parts, shape)
    if why:
        return StoredWeight(own, used, None, f"stored with a bit for each entry, and {why}", kind="sparse")
    whole = StoredTensor(shape, layer["compressed"].dtype, partial(_values, parts, shape))
    if whole.dtype.startswith(("float8", "int8")):
        rest = {f"{path}.{other}".lstrip("."): tensor for other, tensor in layer.items() if other not in parts}
        found = scaled(own, FileTensors({own: whole, **rest}), config)
        if found is not None:
            return replace(found, parts=(*used, *(part for part in found.parts if part != own)))
        whole = StoredTensor(shape, "float32", partial(plain_floats, whole)) if whole.floating else whole
    if not whole.floating:
        return StoredWeight(own, used, None, f"{whole.dtype} with a bit for each entry, and no scale", kind="sparse")
    return StoredWeight(own, used, whole, "stored without its zeros (compressed-tensors)", kind="sparse")


def _shape(stored: StoredTensor) -> tuple[int, ...]:
    """The numbers of a shape; empty if it holds none."""
    if stored.dtype not in ("int32", "int64") or not 0 < stored.entries <= _DIMS:
        return ()
    found = tuple(numbers_in(stored) or ())
    return found if all(n > 0 for n in found) else ()


def _unfit(parts: StoredTensors, shape: tuple[int, ...]) -> str:
    """Why the parts do not fit each other; empty if they do."""
    if not shape:
        return "its shape is none"
    rows, values = prod(shape[:-1]), parts["compressed"].entries
    if parts["bitmask"].entries != rows * -(-shape[-1] // 8):
        return "its mask does not fit its shape"
    if "row_offsets" not in parts:
        return "" if 2 * values == prod(shape) else "its values are not half as many as its entries"
    fits = parts["row_offsets"].entries == rows and parts["row_offsets"].dtype in ("int32", "int64")
    return "" if fits and values <= prod(shape) else "its values or the offsets of its rows do not fit its shape"


def _values(parts: StoredTensors, shape: tuple[int, ...]) -> Tensor:
    """The values at the entries whose bit is 1, and 0 at the others; the lowest bit of a byte is the first entry.

    References: [1] compressed-tensors, `sparse_bitmask.py` and `sparse_24_bitmask.py`.
    """
    rows, columns = prod(shape[:-1]), shape[-1]
    held, values = parts["bitmask"].load().reshape(rows, -1, 1), parts["compressed"].load().flatten()
    bits = (held >> torch.arange(8, dtype=torch.uint8, device="cpu") & 1).bool().flatten(1)
    counts, mask = bits.sum(1), bits[:, :columns]
    if "row_offsets" in parts:
        told = parts["row_offsets"].load().flatten()
    else:
        told = torch.arange(rows, device="cpu") * (len(values) // rows)
    wrong = (counts.cumsum(0) - counts != told) | (mask.sum(1) != counts)
    if wrong.any() or int(counts.sum()) != len(values):
        row = int(wrong.int().argmax()) if wrong.any() else rows
        found = f"another number of them in the rows before {row}, or bits outside of it"
        raise InvalidArgumentError(f"a mask needs {len(values)} bits", found, "The tensors do not fit.")
    made = torch.zeros(rows, columns, dtype=values.dtype, device="cpu")
    whole = made.view(torch.uint8) if values.element_size() == 1 else made  # torch has few operations for 8-bit floats
    whole.masked_scatter_(mask, values.view(whole.dtype))
    return made.reshape(shape)


FORMATS = (Format(_sparse, ("compressed",)),)
