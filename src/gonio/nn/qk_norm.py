"""A linear layer with normalised queries and keys (QK-norm)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gonio.errors import InvalidArgumentError

Rows = tuple[int, int]  # start and stop


class QKNormLinear(nn.Linear):
    r"""A linear layer whose outputs are RMS-normalised, head by head, within the rows of queries and of keys.

    With :math:`y = Wx + b`, and :math:`y_h` the :math:`d` outputs of the rows of head :math:`h`,

    .. math::
        y_h \leftarrow g \odot \frac{y_h}{\sqrt{\lVert y_h \rVert^2 / d + \varepsilon}}

    with one trained gain :math:`g` for all heads of queries, and one for all heads of keys. Other rows, such as the
    values of a fused layer, stay as they are.

    A normalised head has :math:`\lVert y_h \rVert \leq \sqrt d \max_i |g_i|`, whatever weight and input are. So for
    queries and keys from two such layers, or from one, the logits of every head are bounded:

    .. math::
        \frac{|\langle q, k \rangle|}{\sqrt d} \leq \sqrt d\, \max_i |g^q_i g^k_i|
            \leq \sqrt d\, \max_i |g^q_i| \max_i |g^k_i|

    Rotary positions between the layer and the product keep the second bound, because they keep norms;
    :func:`gonio.geometry.logit_bound` has the one that knows the pairs.

    Args:
        in_features, out_features, bias: as in torch.
        query: the rows `(start, stop)` of each head of queries, all of one size; key: those of the keys, which may have
            another size.
        eps: ε, added to the mean square. A zero head gives 0.
        device, dtype: as in torch.

    Attributes:
        query_gain, key_gain: the gains, (d,), which start at 1; None without heads of that kind.
        weight, bias: as in torch, under the same keys of the state dict.

    Shape: (…, in_features) → (…, out_features).

    Invariances: Rescaling the rows of a head, and their biases, by a positive factor, up to ε.

    Raises: InvalidArgumentError for rows outside the layer, heads that overlap, heads of one kind and different sizes,
        no heads, and an `eps` that is not positive.

    Example:
        >>> layer = gonio.nn.QKNormLinear(6, 12, query=[(0, 4)], key=[(4, 8)])  # the last 4 rows are values
        >>> x = torch.randn(5, 6)
        >>> with torch.no_grad():
        ...     _ = layer.weight.mul_(1000.0)
        >>> q, k, v = layer(x).split(4, -1)
        >>> bool(((q @ k.mT).abs() / 4**0.5 <= 4**0.5 * 1.0001).all()), bool((v.abs() > 100).any())
        (True, True)
        >>> torch.equal(v, nn.functional.linear(x, layer.weight, layer.bias)[:, 8:])
        True

    Folding: impossible, the output is not linear in the input.

    References: A. Henry et al., "Query-key normalization for transformers", 2020. https://arxiv.org/abs/2010.04245;
        M. Dehghani et al., "Scaling vision transformers to 22 billion parameters", 2023, section 2.
        https://arxiv.org/abs/2302.05442; A. Yang et al., "Qwen3 technical report", 2025.
        https://arxiv.org/abs/2505.09388: RMSNorm per head, before rotary positions.

    Differs: Henry et al. normalise to length 1 and train one factor of the logits in the place of 1/√d; Dehghani et al.
        use LayerNorm without a shift. The form here is Qwen3's, whose gains all heads of a block share.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        query: Sequence[Rows] = (),
        key: Sequence[Rows] = (),
        eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_eps(eps)
        heads = {"query": _checked("query", query, out_features), "key": _checked("key", key, out_features)}
        rows = [row for role in heads.values() for each in role for row in range(*each)]
        if not rows:
            asked = "QKNormLinear normalises the rows of heads, given as query or key"
            raise InvalidArgumentError(asked, "neither", "Use torch's Linear where there are none.")
        if len(set(rows)) < len(rows):
            asked = "QKNormLinear: each row belongs to one head"
            raise InvalidArgumentError(asked, f"query={query!r}, key={key!r}", "Pass rows that do not overlap.")
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.query, self.key, self.eps = heads["query"], heads["key"], eps
        for role, own in heads.items():
            gain = torch.empty(own[0][1] - own[0][0], device=device, dtype=dtype) if own else None
            self.register_parameter(f"{role}_gain", None if gain is None else nn.Parameter(gain))
        self._repeats, self._segments = _layout(out_features, heads)
        self._reset_gains_()

    query_gain: nn.Parameter | None
    key_gain: nn.Parameter | None

    def reset_parameters(self) -> None:
        """Draw weight and bias anew as torch does, and set the gains to 1."""
        super().reset_parameters()
        if "query_gain" in self._parameters:  # torch's constructor calls this before there are gains
            self._reset_gains_()

    def _reset_gains_(self) -> None:
        for gain in (self.query_gain, self.key_gain):
            if gain is not None:
                nn.init.ones_(gain)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        parts = y.unflatten(-1, (self._repeats, -1)).split([count for _, count in self._segments], -1)
        made = [self._normalized(part, role) for part, (role, _) in zip(parts, self._segments, strict=True)]
        return (made[0] if len(made) == 1 else torch.cat(made, -1)).flatten(-2)

    def _normalized(self, part: Tensor, role: str) -> Tensor:
        """Rows of one kind, (…, rows), whose heads are adjacent."""
        gain = self._parameters[f"{role}_gain"] if role else None
        if gain is None:
            return part
        # under autocast the outputs are narrower than the gain, and a norm of both has no fused form
        heads = part.unflatten(-1, (-1, len(gain)))
        return F.rms_norm(heads, gain.shape, gain.to(part.dtype), self.eps).to(part.dtype).flatten(-2)

    def extra_repr(self) -> str:
        heads = [(role, own) for role, own in (("query", self.query), ("key", self.key)) if own]
        told = [f"{role}={len(own)} head{'s' * (len(own) > 1)} of {own[0][1] - own[0][0]}" for role, own in heads]
        return ", ".join([super().extra_repr(), *told, f"eps={self.eps}"])


def check_eps(eps: object) -> None:
    """Refuse what is no ε of a :class:`QKNormLinear`."""
    if not (isinstance(eps, (int, float)) and 0 < eps < math.inf):
        raise InvalidArgumentError("QKNormLinear: eps must be positive", repr(eps), "1e-6 is the default.")


def _checked(role: str, heads: Sequence[Rows], count: int) -> tuple[Rows, ...]:
    """The rows of the heads of one kind, in their order in the layer."""
    found = tuple(sorted((int(start), int(stop)) for start, stop in heads))
    if any(not 0 <= start < stop <= count for start, stop in found):
        asked = f"QKNormLinear({role}=) takes half-open ranges of the {count} rows"
        raise InvalidArgumentError(asked, repr(heads), "Pass e.g. [(0, 64), (64, 128)].")
    if len({stop - start for start, stop in found}) > 1:
        asked = f"QKNormLinear({role}=) takes heads of one size, which share a gain"
        raise InvalidArgumentError(asked, repr(heads), "Pass ranges of equal length.")
    return found


def _layout(count: int, heads: dict[str, tuple[Rows, ...]]) -> tuple[int, tuple[tuple[str, int], ...]]:
    """How often the order of the rows repeats, and of one period the kinds of adjacent rows, each with their number.

    Heads that alternate, as in a layer with query, key and value of one head after the other, are normalised together.
    """
    kinds = [("", 0)] * count
    for role, own in heads.items():
        for start, stop in own:
            kinds[start:stop] = [(role, entry) for entry in range(stop - start)]
    period = next(n for n in range(1, count + 1) if count % n == 0 and kinds == kinds[:n] * (count // n))
    segments = itertools.groupby(kinds[:period], key=lambda kind: kind[0])
    return count // period, tuple((role, len(list(rows))) for role, rows in segments)
