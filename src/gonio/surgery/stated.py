"""Heads and experts as the registered type of an attention, its attributes and its configuration state them.

This is what is known of a model without running it; :func:`gonio.surgery.anatomy` finds the same by running it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from gonio.surgery.facts import facts_of

# What configurations call these numbers; a model has one of the names.
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers")
WIDTHS = ("hidden_size", "n_embd", "d_model", "dim")
HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads", "encoder_attention_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "n_experts")


def stated_rows(around: Sequence[nn.Module], name: str, filters: int, inputs: int) -> tuple[int, ...]:
    """The sizes of consecutive heads in a tensor of queries, keys and values; () for other tensors.

    Args:
        around: the module that has the tensor, then those around it, the nearest first.
        name: the tensor's attribute.
        filters, inputs: its rows, and the columns of each.

    Example:
        >>> from gonio.surgery.stated import stated_rows
        >>> stated_rows([nn.MultiheadAttention(8, 2)], "in_proj_weight", 24, 8)
        (4,)
    """
    fused = _fused(around, name)
    if fused is None:
        return ()
    owner, parts = fused
    parts = parts or filters // inputs
    count = stated_number(owner, HEADS)
    if not count or parts not in (2, 3):
        return ()
    key, value = (stated_number(owner, (size,)) for size in ("key_dim", "val_dim"))
    sizes = ((key, key, value) if parts == 3 else (key, value)) if key and value else ()
    if sizes and filters == count * sum(sizes):  # LeViT: a head's query, key and value differ in size
        return sizes
    kv = stated_number(owner, KV_HEADS) or count
    total = count + 2 * kv if parts == 3 else 2 * kv
    return (filters // total,) if filters % total == 0 and filters // total > 1 else ()


def _fused(around: Sequence[nn.Module], name: str) -> tuple[nn.Module, int] | None:
    """The attention whose queries, keys and values the tensor computes at once, and how many of them."""
    inside = around[0]
    for owner in around[:3]:
        for layer, parts in facts_of(owner).fused.items():
            if layer == name if owner is inside else owner._modules.get(layer) is inside:
                return owner, parts
        inside = owner
    return None


def stated_number(module: nn.Module, names: Sequence[str]) -> int:
    """The first of these attributes of a module, or of its configuration, that is a positive number; else 0.

    Example:
        >>> from gonio.surgery.stated import HEADS, stated_number
        >>> stated_number(nn.MultiheadAttention(8, 2), HEADS)
        2
    """
    config = vars(module).get("config")  # of the object itself: a wrapper may forward attributes
    for name in names:
        for value in (vars(module).get(name), getattr(config, name, None)):
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return 0
