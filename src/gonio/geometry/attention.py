"""The largest logit of an attention head on any input, from its weights alone."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from gonio.errors import InvalidArgumentError
from gonio.geometry.certified import ROUNDING
from gonio.geometry.norms import as_real


def logit_bound(
    query: Tensor,
    key: Tensor,
    *,
    norm: Literal["rms", "layer"] = "rms",
    gain: Tensor | None = None,
    shift: Tensor | None = None,
    query_bias: Tensor | None = None,
    key_bias: Tensor | None = None,
    query_gain: Tensor | None = None,
    key_gain: Tensor | None = None,
    rotary: bool = False,
    scale: float | None = None,
) -> Tensor:
    r"""Upper bound of the absolute logits :math:`s\,⟨q, k⟩` of each head, for every input of the block, rounded up.

    The block reads a norm's result :math:`G\hat x + β` with :math:`‖\hat x‖ ≤ √d`, centred for LayerNorm. With
    :math:`A = W_q G`, :math:`a = W_q β + b_q`, and :math:`B`, :math:`b` alike of the keys:

    .. math::
        s\,\bigl(d\,σ_{\max}(A^⊤ B) + √d\,(‖A^⊤ b‖ + ‖B^⊤ a‖) + |a^⊤ b|\bigr)

    With rotary positions, :math:`s\,(√d\,σ_{\max}(A) + ‖a‖)(√d\,σ_{\max}(B) + ‖b‖)`, which holds for all offsets. Where
    RMSNorms of queries and keys with gains :math:`g_q`, :math:`g_k` over the head size :math:`d_h` follow, the weights
    do not matter: :math:`s\,d_h \max_i |g_{q,i} g_{k,i}|`, with rotary positions :math:`s\,d_h \max|g_q| \max|g_k|`.

    Args:
        query: weights (heads, head size, d) of the queries; key: (key heads, head size, d), each for as many
            consecutive heads. :func:`gonio.surgery.anatomy` gives the rows.
        norm: of the block's input; "layer" takes the mean out.
        gain, shift: G and β of that norm, (d,); None for ones and zeros. A norm that multiplies by 1 + w has the gain
            1 + w.
        query_bias, key_bias: (heads, head size) and (key heads, head size); None for zeros.
        query_gain, key_gain: of norms after the query and key layers, (head size,); both or none.
        rotary: whether positions rotate queries and keys.
        scale: s; None for 1/√(head size).

    Returns: float64 of shape (heads,).

    Raises: InvalidArgumentError for shapes that do not fit, and for entries that are not finite.

    Example:
        >>> weight = torch.eye(4)[None]
        >>> round(float(gonio.geometry.logit_bound(weight, weight)), 6)  # ‖x̂‖² = 4 along one axis, over √4
        2.0
        >>> ones = torch.ones(4)
        >>> round(float(gonio.geometry.logit_bound(100 * weight, weight, query_gain=ones, key_gain=ones)), 6)
        2.0

    Source: derived here; the product form of Kim et al., "The Lipschitz constant of self-attention", ICML 2021, has no
        bound for inputs without a norm.
    """
    query, key = as_real(query), as_real(key)
    _check(query, key, norm, query_gain, key_gain)
    heads, size, width = query.shape
    s = size**-0.5 if scale is None else scale
    gains = [None if g is None else as_real(g).double() for g in (query_gain, key_gain)]
    if gains[0] is not None and gains[1] is not None:
        both = (gains[0].abs().amax() * gains[1].abs().amax()) if rotary else (gains[0] * gains[1]).abs().amax()
        return (abs(s) * size * both * (1 + ROUNDING)).expand(heads).clone()
    a, shift_a = _read(query, query_bias, norm, gain, shift)
    b, shift_b = _read(key, key_bias, norm, gain, shift)
    b, shift_b = (t.repeat_interleave(heads // len(key), 0) for t in (b, shift_b))
    root = width**0.5
    if rotary:
        ends = (root * _largest(m) + v.norm(dim=-1) for m, v in ((a, shift_a), (b, shift_b)))
        return abs(s) * torch.stack(list(ends)).prod(0) * (1 + ROUNDING)
    small = [torch.linalg.qr(m.mT, mode="r")[1] for m in (a, b)]  # Aᵀ = QR, so that AᵀB has the values of R_a R_bᵀ
    mixed = (a.mT @ shift_b[..., None]).norm(dim=(-2, -1)) + (b.mT @ shift_a[..., None]).norm(dim=(-2, -1))
    total = width * _largest(small[0] @ small[1].mT) + root * mixed + (shift_a * shift_b).sum(-1).abs()
    return abs(s) * total * (1 + ROUNDING)


def _largest(matrices: Tensor) -> Tensor:
    return torch.linalg.svdvals(matrices)[..., 0]


def _read(
    weight: Tensor, bias: Tensor | None, norm: str, gain: Tensor | None, shift: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The map of the normed input, and the constant that it adds."""
    weight = as_real(weight).detach().double()
    constant = torch.zeros(weight.shape[:2], dtype=weight.dtype, device=weight.device)
    constant = constant if bias is None else constant + as_real(bias).detach().double()
    if shift is not None:
        constant = constant + weight @ as_real(shift).detach().double()
    weight = weight if gain is None else weight * as_real(gain).detach().double()
    return (weight - weight.mean(-1, keepdim=True) if norm == "layer" else weight), constant


def _check(query: Tensor, key: Tensor, norm: str, query_gain: Tensor | None, key_gain: Tensor | None) -> None:
    if norm not in ("rms", "layer"):
        raise InvalidArgumentError("logit_bound(norm=) is 'rms' or 'layer'", repr(norm), "Choose one of them.")
    fit = query.ndim == key.ndim == 3 and query.shape[1:] == key.shape[1:] and len(key) and len(query) % len(key) == 0
    if not fit:
        found = f"{tuple(query.shape)} and {tuple(key.shape)}"
        do = "Unflatten the rows of the weights by heads."
        raise InvalidArgumentError("logit_bound() takes weights (heads, head size, width)", found, do)
    if (query_gain is None) != (key_gain is None):
        do = "Pass ones for the norm that has no gain."
        raise InvalidArgumentError("logit_bound() takes query_gain and key_gain together", "one of them", do)
    if not (bool(query.isfinite().all()) and bool(key.isfinite().all())):
        do = "Find the step that made them."
        raise InvalidArgumentError("logit_bound() needs finite weights", "NaN or infinity", do)
