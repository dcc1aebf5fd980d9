"""The Self-Orthogonality Module: angles between filters, estimated from the signs of their outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gonio.errors import InvalidArgumentError
from gonio.execution import ProcessGroup, apply, ordinary_eager
from gonio.geometry.norms import widen
from gonio.regularizers.base import Evaluation, OutputRegularizer, identity_like, require
from gonio.regularizers.kernels import Pairs, SelfOrthogonalityTerms, first_sample, total

MOST_PROBES = 2**20


@dataclass(frozen=True, kw_only=True)
class SelfOrthogonality(OutputRegularizer):
    r"""Draws the mean of the angles between filters to 90° and their spread to 0, computed from outputs alone.

    Two filters at angle :math:`\theta_{ij}` give outputs of equal sign with probability
    :math:`1 - \theta_{ij}/\pi` if inputs are uniform in direction, so

    .. math::
        \vartheta_{ij} = \hat t_i^\top \hat t_j \approx 1 - \frac{2 \theta_{ij}}{\pi}, \qquad
        t_i = \tanh\bigl(\gamma (y_i - \bar y_i)\bigr), \quad \hat t_i = t_i / \lVert t_i \rVert,

    with :math:`y_i` the outputs of filter i for the batch. The value is, per group,

    .. math:: \text{mean\_ratio} \cdot \bigl(\operatorname{mean}_{i \ne j} \vartheta_{ij}\bigr)^2 +
              \text{spread\_ratio} \cdot \operatorname{mean}_{i \ne j} \vartheta_{ij}^2

    averaged over groups, or, with ``reduction="sum"``, the same with sums, added over groups. An output that does not
    vary (a dead filter) has no sign and is left out of the pairs.

    Positions of a convolution's output count as samples. Estimated from b samples, orthogonal filters have
    a spread of 1/b (mean) or :math:`k(k-1)/b` (sum), which nothing removes: see :meth:`debias`.

    Args:
        strength: 0.01 to 0.1 leaves the accuracy of small networks as it is; from 1 on it may cost accuracy. Where
            learning rate × strength is large (0.05 to 0.3 for SGD with momentum in small networks), steps overshoot and
            the filters collapse, which :func:`gonio.measure` finds; the mean term does so first.
        mean_ratio: the paper's :math:`\lambda_1`; 0 for the spread term alone.
        spread_ratio: the paper's :math:`\lambda_2`; 0 for the mean term alone.
        gamma: how hard the sign is. With gamma times the standard deviation of the outputs well below 1 the tanh is
            linear and :math:`\vartheta` a cosine of outputs; well above 10 most entries have no gradient.
        center: subtract each output's mean. Without it, inputs that are not centred (after a ReLU) show orthogonal
            filters as correlated, by 0.5.
        standardize: divide each output first by its standard deviation (without `center`, by its root mean square
            about 0), so that gamma means the same in every layer.
        reduction: over pairs of filters.
        samples: use this many random samples of a batch, where there are more.
        probes: in a :class:`gonio.Penalty`, read the outputs for so many standard normal inputs, drawn at each step,
            in place of those of the batch: probes are uniform in direction, whatever the inputs of a layer are.

    Invariances:
        Permuting samples or filters, flipping filters (spread term), rescaling all outputs if standardised;
        with `center`, adding a constant to an output.

    Raises:
        InvalidArgumentError: if samples are to be drawn without a generator.

    Example:
        >>> probes = torch.randn(4096, 8, generator=torch.Generator().manual_seed(0))
        >>> filters, penalty = torch.eye(8)[:4], gonio.regularizers.SelfOrthogonality(1.0)
        >>> bool(penalty(probes @ filters.T) < 0.01), bool(penalty(probes @ filters[[0, 0, 1, 1]].T) > 1)
        (True, True)

    References:
        [1] Z. Zhang, et al., "Self-Orthogonality Module: a network architecture plug-in for learning
        orthogonal filters", WACV 2020. https://arxiv.org/abs/2001.01275
        [2] M. Charikar, "Similarity estimation techniques from rounding algorithms", STOC 2002, §3.

    Differs:
        The paper sums over pairs and does not centre; :meth:`paper` is its form. The sign of 0 is 0.
    """

    mean_ratio: float = 100.0
    spread_ratio: float = 1.0
    gamma: float = 10.0
    center: bool = True
    standardize: bool = False
    reduction: Literal["mean", "sum"] = "mean"
    samples: int | None = None
    probes: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            min(self.mean_ratio, self.spread_ratio) >= 0 < max(self.mean_ratio, self.spread_ratio) and self.gamma > 0,
            "SelfOrthogonality() needs mean_ratio and spread_ratio >= 0, one of them and gamma > 0",
            f"mean_ratio={self.mean_ratio}, spread_ratio={self.spread_ratio}, gamma={self.gamma}",
            "The paper has 100, 1 and 10.",
        )
        require(
            self.samples is None or self.samples >= 2,
            "SelfOrthogonality() needs samples >= 2",
            f"samples={self.samples}",
            "Leave it out to use all.",
        )
        require(
            self.probes is None or (2 <= self.probes <= MOST_PROBES and self.samples is None),
            f"SelfOrthogonality() needs probes from 2 to {MOST_PROBES}, without samples",
            f"probes={self.probes}, samples={self.samples}",
            "Leave one of them out.",
        )

    @property
    def ignores_bias(self) -> bool:
        """Centred outputs do not change with the bias."""
        return self.center

    @property
    def reads_probes(self) -> int | None:
        """The number of probes."""
        return self.probes

    @classmethod
    def paper(cls, strength: float = 1e-9) -> SelfOrthogonality:
        r"""The published form: :math:`100 (\sum \vartheta_{ij})^2 + \sum \vartheta_{ij}^2`, γ = 10, not centred.

        The square of a sum over k(k − 1) pairs grows as :math:`k^4`: with 64 orthogonal filters the value is about
        2.5e5 for 8 samples and 30 for 512 by sampling noise alone, and after a ReLU, whose outputs are not centred, it
        starts at 4e4 times the loss. At the strength 1 its gradient replaces that of the task. The default is of the
        order at which networks with layers of 32 to 64 filters still train; divide it by :math:`(k/64)^4` for k.
        """
        return cls(strength, mean_ratio=100.0, gamma=10.0, center=False, reduction="sum")

    def debias(self, spread: Tensor | float, samples: int) -> Tensor:
        r"""The mean of :math:`\vartheta_{ij}^2` without the bias of a finite sample.

        An estimate from b independent samples (`samples`; positions of one image are not) has
        :math:`E \hat\vartheta^2 = \vartheta^2 + (1 - \vartheta^2)/b` (b − 1 if centred); this solves for
        :math:`\vartheta^2`. 0 on average for orthogonal filters.

        Example:
            >>> gonio.regularizers.SelfOrthogonality(1.0, center=False).debias(0.01, samples=100)
            tensor(0.)
        """
        free = max(samples - 1 if self.center else samples, 2)
        spread = spread if isinstance(spread, Tensor) else torch.tensor(spread, device="cpu")
        return (spread - 1 / free) / (1 - 1 / free)

    def _evaluate(
        self, outputs: Tensor, groups: int, generator: torch.Generator | None, process_group: ProcessGroup | None
    ) -> Evaluation:
        x = widen(self._subset(outputs if outputs.ndim > 2 else outputs.unsqueeze(2), generator))
        least = torch.finfo(outputs.dtype).tiny
        if self.standardize:
            x = _standardized(x.flatten(2), process_group, center=self.center, least=least)
        pairs = Pairs(self.gamma, self.center, self.mean_ratio, self.reduction, groups, process_group, least)
        if self.spread_ratio != 1 or not ordinary_eager(x):
            _, mean, spread = _terms_of_signs(_soft_signs(x.flatten(2), pairs), pairs)
            spread = self.spread_ratio * spread
            value = mean + spread
            return Evaluation(value, {"mean": mean.detach(), "spread": spread.detach()})
        value, mean, spread, _ = apply(SelfOrthogonalityTerms, x, pairs, _terms_of_signs)
        return Evaluation(value, {"mean": mean, "spread": spread})

    def _subset(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        count = x.numel() // max(1, x.shape[1])
        if self.samples is None or count <= self.samples:
            return x
        if generator is None:
            raise InvalidArgumentError(
                f"SelfOrthogonality(samples={self.samples}) draws samples at random",
                f"{count} samples and no generator",
                "Pass generator=torch.Generator().manual_seed(…); gonio.Penalty has its own.",
            )
        chosen = torch.randperm(count, generator=generator, device=generator.device)[: self.samples]
        # drawn on the CPU, so that a training is the same on every device; a device does not wait for the copy
        chosen, x = chosen.to(x.device, non_blocking=True), x.flatten(2)
        return x[chosen.div(x.shape[2], rounding_mode="floor"), :, chosen.remainder(x.shape[2])].unsqueeze(2)


def _samples(x: Tensor, process_group: ProcessGroup | None) -> Tensor:
    """The number of samples of outputs (N, k, P), 1 at least."""
    return total(x.new_full((), float(x.shape[0] * x.shape[2])), process_group).clamp_min(1)


def _centred(x: Tensor, process_group: ProcessGroup | None) -> Tensor:
    """Outputs (N, k, P) less the mean of their channel."""
    x = x - first_sample(x.detach().transpose(0, 1), process_group).transpose(0, 1)
    return x - total(x.sum((0, 2), keepdim=True), process_group) / _samples(x, process_group)


def _standardized(x: Tensor, process_group: ProcessGroup | None, *, center: bool, least: float) -> Tensor:
    """Outputs (N, k, P) divided by the standard deviation of their channel; 0 where it is below `least`."""
    x = _centred(x, process_group) if center else x
    square = total((x * x).sum((0, 2), keepdim=True), process_group) / _samples(x, process_group)
    flat = square <= max(least**2, torch.finfo(x.dtype).tiny)
    return x * square.masked_fill(flat, 1).rsqrt().masked_fill(flat, 0)


def _soft_signs(x: Tensor, pairs: Pairs) -> Tensor:
    """tanh(γ (y − ȳ)) of outputs (N, k, P) as (groups, k/groups, samples)."""
    signs = torch.tanh(pairs.gamma * (_centred(x, pairs.process_group) if pairs.center else x))
    return signs.movedim(1, 0).flatten(1).unflatten(0, (pairs.groups, -1))


def _terms_of_signs(t: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor, Tensor]:
    """The value, its mean term and its spread term, from soft signs (groups, k/groups, samples)."""
    samples = total(t.new_full((), float(t.shape[-1])), pairs.process_group)
    square = total((t * t).sum(-1, keepdim=True), pairs.process_group)
    dead = square <= ((pairs.gamma * pairs.least) ** 2 * samples).clamp_min(torch.finfo(t.dtype).tiny)
    unit = t * square.masked_fill(dead, 1).rsqrt().masked_fill(dead, 0)
    cosines = total(unit @ unit.mT, pairs.process_group)
    cosines = cosines * (1 - identity_like(cosines))
    alive = (~dead).sum((-2, -1))
    count = (alive * (alive - 1)).clamp_min(1) if pairs.reduction == "mean" else 1
    mean = pairs.mean_ratio * (cosines.sum((-2, -1)) / count).square()
    spread = cosines.square().sum((-2, -1)) / count
    mean, spread = (x.mean() if pairs.reduction == "mean" else x.sum() for x in (mean, spread))
    return mean + spread, mean, spread
