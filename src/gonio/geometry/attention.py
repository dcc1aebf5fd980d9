"""The largest logit of an attention head on any input, from its weights alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from gonio.errors import InvalidArgumentError
from gonio.geometry.certified import ROUNDING
from gonio.geometry.norms import as_real, check_finite

_TINY = 1e-12  # the least ratio of a constant to what is added to it


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
    rotary: bool | Literal["half", "pairs"] = False,
    scale: float | None = None,
) -> Tensor:
    r"""Upper bound of the absolute logits :math:`s\,⟨q, k⟩` of each head, for every input of the block, rounded up.

    The block reads a norm's result :math:`G\hat x + β` with :math:`‖\hat x‖ ≤ √d`, centred for LayerNorm. With
    :math:`A = W_q G`, :math:`a = W_q β + b_q`, and :math:`B`, :math:`b` alike of the keys:

    .. math::
        s\,\bigl(d\,σ_{\max}(A^⊤ B) + √d\,(‖A^⊤ b‖ + ‖B^⊤ a‖) + |a^⊤ b|\bigr)

    or with :math:`A_τ = [√d\,A,\; a/√τ_q]`, whose unit ball has :math:`√d\,Ax + a` as an image, and :math:`B_τ` alike,

    .. math::
        s\,\sqrt{(1 + τ_q)(1 + τ_k)}\;σ_{\max}(A_τ^⊤ B_τ), \qquad τ_q = ‖a‖ / (√d\,σ_{\max}(A))

    where that is smaller. Rotary positions turn pairs of entries, which a diagonal D with one value per pair commutes
    with, so that for all offsets

    .. math::
        s\,\sqrt{(1 + τ_q)(1 + τ_k)}\;σ_{\max}(D A_τ)\,σ_{\max}(D^{-1} B_τ)

    is a bound; D is 1, or where the pairs are given what makes the pair's rows equally long, if that is smaller. Where
    RMSNorms of queries and keys with gains :math:`g_q`, :math:`g_k` over the head size :math:`d_h` follow, the weights
    do not matter: :math:`s\,d_h \max_i |g_{q,i} g_{k,i}|`, with rotary positions over the pairs' largest entries.

    Args:
        query: weights (heads, head size, d) of the queries; key: (key heads, head size, d), each for as many
            consecutive heads. :func:`gonio.surgery.anatomy` gives the rows.
        norm: of the block's input; "layer" takes the mean out.
        gain, shift: G and β of that norm, (d,); None for ones and zeros. A norm that multiplies by 1 + w has the gain
            1 + w.
        query_bias, key_bias: (heads, head size) and (key heads, head size); None for zeros.
        query_gain, key_gain: of norms after the query and key layers, (head size,); both or none.
        rotary: whether positions turn queries and keys; "half" where entry i is paired with entry i + size/2, "pairs"
            where 2i is with 2i + 1, True where the pairs are not known.
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
    _check(query, key, norm, rotary, query_gain, key_gain)
    for given in (query, key, gain, shift, query_bias, key_bias, query_gain, key_gain):
        if given is not None:
            check_finite(as_real(given), "logit_bound")
    heads, size = query.shape[:2]
    s = size**-0.5 if scale is None else scale
    turned = _pairs(size, rotary)
    if query_gain is not None and key_gain is not None:
        ends = [torch.diag(as_real(g).detach().double())[None] * size**0.5 for g in (query_gain, key_gain)]
        none = ends[0].new_zeros(1, size)
        return abs(s) * largest_product((ends[0], none), (ends[1], none), turned).expand(heads)
    of_query = _read(query, query_bias, norm, gain, shift)
    m, constant = _read(key, key_bias, norm, gain, shift)
    shared = heads // len(key)
    of_key = m.repeat_interleave(shared, 0), constant.repeat_interleave(shared, 0)
    return abs(s) * largest_product(of_query, of_key, turned)


def largest_product(
    query: tuple[Tensor, Tensor], key: tuple[Tensor, Tensor], turned: Sequence[int] | None = None
) -> Tensor:
    """Upper bounds of |⟨q, k⟩| for q = M·u + a and k = N·v + b with ‖u‖, ‖v‖ ≤ 1, rounded up.

    Args:
        query: M (heads, size, n) and a (heads, size), in float64; `key` alike, where n may be another number.
        turned: where an isometry lies between, for each entry the first one of those that it turns among themselves;
            None where none does.
    """
    (q, a), (k, b) = (_reduced(m, shift) for m, shift in (query, key))
    plain = (_ball(q, a), _ball(k, b))
    if turned is not None:
        groups = torch.tensor(turned, device=q.device)
        sides = [torch.zeros_like(a).index_add_(-1, groups, x.square().sum(-1))[..., groups] for x in plain]
        even = (sides[1] / sides[0]).pow(0.25).nan_to_num(1.0, 1.0, 1.0)  # of rows that are 0, any scale
        even = torch.where(even > 0, even, torch.ones_like(even))[..., None]
        found = [_largest(x) * _largest(y) for x, y in (plain, (plain[0] * even, plain[1] / even))]
        return torch.minimum(*found) * (1 + ROUNDING)
    mixed = (q.mT @ b[..., None]).norm(dim=(-2, -1)) + (k.mT @ a[..., None]).norm(dim=(-2, -1))
    total = _largest(q.mT @ k) + mixed + (a * b).sum(-1).abs()
    return torch.minimum(total, _largest(plain[0].mT @ plain[1])) * (1 + ROUNDING)


def _reduced(matrix: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """A smaller matrix that maps the unit ball to the same set: M = RᵀQᵀ."""
    return (torch.linalg.qr(matrix.mT, mode="r")[1].mT if matrix.shape[-1] > matrix.shape[-2] else matrix), shift


def _ball(matrix: Tensor, shift: Tensor) -> Tensor:
    """A matrix whose image of the unit ball holds M·u + a for all u in it: √(1 + τ)·[M, a/√τ]."""
    length = shift.norm(dim=-1)
    ratio = (length / _largest(matrix)).nan_to_num(1.0).clamp(_TINY, 1 / _TINY)[..., None, None]
    return torch.cat([matrix, shift[..., None] / ratio.sqrt()], -1) * (1 + ratio).sqrt()


def _pairs(size: int, rotary: bool | str) -> list[int] | None:
    """For each entry the first one of those that positions turn among themselves; None without rotary positions."""
    if rotary is False:
        return None
    apart = {"half": size // 2, "pairs": 1}.get(str(rotary))
    if apart is None:
        return [0] * size
    return [i % apart for i in range(size)] if rotary == "half" else [i - i % 2 for i in range(size)]


def _largest(matrices: Tensor) -> Tensor:
    return torch.linalg.svdvals(matrices)[..., 0]


def _read(
    weight: Tensor, bias: Tensor | None, norm: str, gain: Tensor | None, shift: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The map of the unit ball of normed inputs, and the constant that it adds."""
    weight = as_real(weight).detach().double()
    constant = torch.zeros(weight.shape[:2], dtype=weight.dtype, device=weight.device)
    constant = constant if bias is None else constant + as_real(bias).detach().double()
    if shift is not None:
        constant = constant + weight @ as_real(shift).detach().double()
    weight = weight if gain is None else weight * as_real(gain).detach().double()
    return (weight - weight.mean(-1, keepdim=True) if norm == "layer" else weight) * weight.shape[-1] ** 0.5, constant


def _check(
    query: Tensor, key: Tensor, norm: str, rotary: bool | str, query_gain: Tensor | None, key_gain: Tensor | None
) -> None:
    if norm not in ("rms", "layer"):
        raise InvalidArgumentError("logit_bound(norm=) is 'rms' or 'layer'", repr(norm), "Choose one of them.")
    fit = query.ndim == key.ndim == 3 and query.shape[1:] == key.shape[1:] and len(key) and len(query) % len(key) == 0
    if not fit:
        found = f"{tuple(query.shape)} and {tuple(key.shape)}"
        do = "Unflatten the rows of the weights by heads."
        raise InvalidArgumentError("logit_bound() takes weights (heads, head size, width)", found, do)
    if rotary not in (False, True, "half", "pairs") or (isinstance(rotary, str) and query.shape[1] % 2):
        takes = "logit_bound(rotary=) is True, False, or 'half' or 'pairs' of an even head size"
        found = f"{rotary!r} with a head size of {query.shape[1]}"
        raise InvalidArgumentError(takes, found, "Pass True where other entries are turned.")
    if (query_gain is None) != (key_gain is None):
        do = "Pass ones for the norm that has no gain."
        raise InvalidArgumentError("logit_bound() takes query_gain and key_gain together", "one of them", do)
