"""Switchable normalisation."""

from __future__ import annotations

import math
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from gonio.errors import InvalidArgumentError
from gonio.execution import ProcessGroup, inside_backward, ordinary_eager, several_ranks, total
from gonio.geometry.norms import whole, widest
from gonio.nn import kernels
from gonio.nn.conversion import RunningStatistics, check_plain, share_
from gonio.nn.switchable_function import Pair, Settings, switchable_norm

KINDS = ("instance", "layer", "batch")


class SwitchableNorm(RunningStatistics):
    """Abstract base of the switchable norms; they differ in the shape of the input."""

    ranks: ClassVar[tuple[int, ...]]  # dimensions that an input may have
    takes: ClassVar[tuple[type[nn.Module], ...]]  # the layers that `from_batch_norm` takes

    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        use_batch: bool = True,
        synchronize: bool = True,
        process_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.num_features, self.eps, self.momentum, self.affine = num_features, eps, momentum, affine
        self.track_running_stats, self.use_batch, self.synchronize = track_running_stats, use_batch, synchronize
        self.process_group = process_group
        for name in ("weight", "bias"):
            new = nn.Parameter(torch.empty(num_features, device=device, dtype=dtype)) if affine else None
            self.register_parameter(name, new)
        kinds = len(KINDS) if use_batch else len(KINDS) - 1
        self.mean_logits = nn.Parameter(torch.empty(kinds, device=device, dtype=dtype))
        self.var_logits = nn.Parameter(torch.empty(kinds, device=device, dtype=dtype))
        wide = dtype if dtype == torch.float64 else torch.float32
        keeps = use_batch and track_running_stats
        for name in ("running_mean", "running_var"):
            self.register_buffer(name, torch.empty(num_features, device=device, dtype=wide) if keeps else None)
        count = torch.zeros((), device=device, dtype=torch.long) if keeps else None
        self.register_buffer("num_batches_tracked", count)
        self.reset_parameters()

    @torch.no_grad()
    def reset_running_stats(self) -> None:
        """Reset the running statistics: mean 0, variance 1."""
        if self.running_mean is not None and self.running_var is not None:
            self.running_mean.zero_()
            self.running_var.fill_(1)
            self.num_batches_tracked.zero_()

    def reset_parameters(self) -> None:
        """Reset to equal mixtures, scale 1, shift 0 and no running statistics."""
        self.reset_running_stats()
        nn.init.ones_(self.mean_logits)
        nn.init.ones_(self.var_logits)
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @classmethod
    def from_batch_norm(
        cls,
        norm: nn.modules.batchnorm._BatchNorm,
        *,
        use_batch: bool = True,
        synchronize: bool = True,
        process_group: ProcessGroup | None = None,
    ) -> Self:
        """A switchable norm on the same scale and shift, with a copy of the running statistics.

        The mixture starts equal, so the output is another one than the batch norm's; it is frozen if scale and
        shift are. The process group is by default that of an `nn.SyncBatchNorm`. Other norms become batch norms first:
        :func:`gonio.nn.to_batch_norm`.
        """
        check_plain(norm, *cls.takes, verb="from_batch_norm")
        same = (norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
        like = next((t for t in (norm.weight, norm.running_mean) if t is not None), torch.empty(0))
        group = process_group or getattr(norm, "process_group", None)
        options = {"use_batch": use_batch, "synchronize": synchronize}
        new = cls(*same, like.device, like.dtype, **options, process_group=group)
        share_(new, norm)
        if norm.affine and not any(parameter.requires_grad for parameter in norm.parameters()):
            new.requires_grad_(False)  # frozen stays frozen, the mixture too
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            old, buffer = norm._buffers.get(name), new._buffers.get(name)
            if old is not None and buffer is not None:
                new._buffers[name] = old.detach().clone().to(buffer.dtype)
        return new

    def mixture(self) -> dict[str, dict[str, float]]:
        """The share of each statistic in the mean and in the variance; each sums to 1."""
        return {
            what: dict(zip(KINDS, whole(logits.detach()).double().softmax(0).tolist(), strict=False))
            for what, logits in (("mean", self.mean_logits), ("var", self.var_logits))
        }

    def is_batch_only(self) -> bool:
        """Whether, in evaluation, the layer is a batch norm: fixed statistics alone, to rounding in float64."""
        shares = self.mixture().values()
        return self.running_mean is not None and all(share["batch"] > 1 - 1e-15 for share in shares)

    # read by `gonio.surgery.facts`
    layer_facts: ClassVar[dict[str, object]] = {
        "removes_scale": True,
        "removes_shift": False,
        "mixture": mixture,
        "joins": lambda norm: norm.use_batch and norm.synchronize,
        "why_not_affine": lambda norm: None if norm.is_batch_only() else "its mixture is not batch statistics alone",
    }

    def extra_repr(self) -> str:
        parts = f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, affine={self.affine}"
        return parts if self.use_batch else f"{parts}, use_batch=False"

    def forward(self, x: Tensor) -> Tensor:
        self._check(x)
        positions = x if x.dim() > 2 else x.unsqueeze(-1)
        fixed = self.running_mean is not None and not self.training
        join = self.training and self.use_batch and self.synchronize and several_ranks(self.process_group)
        defined = self._defined(positions, fixed=fixed, join=join)
        # with one position, the number of samples of all processes tells whether batch statistics are defined
        single = join and math.prod(positions.shape[2:]) <= 1
        function = kernels.switchable_norm_closed if ordinary_eager(x) else switchable_norm
        logits, affine = (self.mean_logits, self.var_logits), (self.weight, self.bias)
        running = self._running(widest(x), fixed=fixed)
        settings = Settings(self.eps, join, defined, single, self.process_group)
        out, batch, count = function(positions, logits, affine, running, settings)
        # a checkpointed forward is computed again in backward, and counts once
        if batch is not None and self.running_mean is not None and defined[2] and not inside_backward():
            alone = single and isinstance(count, Tensor)  # then one sample is a single value, which is no statistic
            self._track_(batch, torch.as_tensor(count - 1).clamp_min(0) if alone else count)
        return out if x.dim() > 2 else out.squeeze(-1)

    @torch.no_grad()
    def _track_(self, batch: Pair, count: Tensor | int) -> None:
        """Move the running statistics towards those of a batch, and not for `count` 0 samples."""
        if isinstance(count, int) and count == 0:
            return
        seen = count > 0
        batches = self.num_batches_tracked.add_(seen)
        for buffer, value in zip((self.running_mean, self.running_var), batch, strict=True):
            if buffer is not None:
                value = value.to(buffer.dtype)
                value = torch.where(seen, value, buffer) if isinstance(seen, Tensor) else value
                share = batches.clamp_min(1).to(buffer.dtype).reciprocal() if self.momentum is None else self.momentum
                buffer.lerp_(value, share)

    def _check(self, x: Tensor) -> None:
        if x.dim() not in self.ranks or x.shape[1] != self.num_features:
            shapes = " or ".join(f"{rank} dimensions" for rank in self.ranks)
            problem = f"{type(self).__name__}: the input must have {shapes} and {self.num_features} channels"
            raise InvalidArgumentError(problem, f"shape {tuple(x.shape)}", "Check the layer before it.")

    def _defined(self, x: Tensor, *, fixed: bool, join: bool) -> tuple[bool, bool, bool]:
        """Which statistics are over more than one value; the others would erase the input."""
        area = math.prod(x.shape[2:])
        own = x.shape[0]
        batch = self.use_batch and (fixed or area > 1 or join or own != 1)
        defined = (area > 1, area * self.num_features > 1, batch)
        one = join and area * self.num_features == 1  # of each sample
        if not any(defined) or (one and int(total(x.new_full((), float(own)), self.process_group)) == 1):
            problem = f"{type(self).__name__}: cannot normalise a single value"
            do = "Use a larger batch (drop_last=True drops a last batch of 1), evaluation mode, or no norm here."
            raise InvalidArgumentError(problem, f"shape {tuple(x.shape)} in training", do)
        return defined

    def _running(self, kind: torch.dtype, *, fixed: bool) -> Tensor | None:
        """Batch statistics that are given, (2, 1, C): the running ones, or anything if they have no weight."""
        if fixed and self.running_mean is not None and self.running_var is not None:
            # A copy, also in the same dtype: it is saved for backward, and a later forward moves the buffers.
            return torch.stack([self.running_mean, self.running_var]).to(kind)[:, None]
        return None if self.use_batch else self.mean_logits.new_zeros(2, 1, self.num_features, dtype=kind)


class SwitchableNorm1d(SwitchableNorm):
    r"""Normalisation by a learned mixture of instance, layer and batch statistics; see :class:`SwitchableNorm2d`.

    .. math::
        y = \gamma\, \frac{x - \sum_k w_k \mu_k}{\sqrt{\sum_k w'_k \sigma_k^2 + \epsilon}} + \beta

    Shape: (N, C) or (N, C, L).

    Example:
        >>> norm = gonio.nn.SwitchableNorm1d(3)
        >>> x = torch.arange(4 * 3.0).reshape(4, 3)
        >>> torch.allclose(norm(7 * x + 100), norm(x), atol=1e-4)
        True
    """

    ranks = (2, 3)
    takes = (nn.BatchNorm1d, nn.SyncBatchNorm)


class SwitchableNorm2d(SwitchableNorm):
    r"""Normalisation of images by a learned mixture of instance, layer and batch statistics.

    .. math::
        y = \gamma\, \frac{x - \sum_k w_k \mu_k}{\sqrt{\sum_k w'_k \sigma_k^2 + \varepsilon}} + \beta,
        \qquad k \in \{\text{instance}, \text{layer}, \text{batch}\},

    where :math:`w` and :math:`w'` are the softmax of three numbers each, learned per layer (`mean_logits`,
    `var_logits`; equal at first). :math:`\mu_k` and the biased :math:`\sigma_k^2` are taken over (H, W),
    (C, H, W) and (N, H, W). With one weight at 1 it is instance, layer or batch normalisation. In
    evaluation the batch statistics are the running ones; after averaging weights (SWA, EMA) estimate them with
    :func:`gonio.calibrate_`, because `torch.optim.swa_utils.update_bn` acts on torch's own batch norms alone.

    A statistic over a single value would erase the input, so it is left out and the other weights are
    scaled up: instance statistics of 1×1 maps, batch statistics of a single such sample.

    Args:
        num_features: channels C.
        eps: :math:`\varepsilon`, added to the mixed variance.
        momentum: weight of the new batch in the running statistics, as in torch; None averages all batches.
        affine: learn :math:`\gamma` and :math:`\beta`.
        track_running_stats: if False, evaluation uses the statistics of its batch.
        use_batch: if False, mix instance and layer statistics alone: no state, no coupling of samples.
        synchronize: take batch statistics over all processes of a data-parallel training, weighted by the
            samples of each; a process may have none.
        process_group: the processes that share a batch, as in `nn.SyncBatchNorm`, if they are not all (pipeline or
            model parallel training). A layer with a group cannot be copied or pickled; its state dict can.

    Shape: (N, C, H, W).

    Invariances: Rescaling and shifting the whole input (by a factor far above :math:`\sqrt\varepsilon`) in training.

    Raises: InvalidArgumentError for an input of another shape, or if every statistic is of a single value.

    Example:
        >>> norm = gonio.nn.SwitchableNorm2d(3)
        >>> x = torch.linspace(-1, 1, 96).reshape(2, 3, 4, 4)
        >>> torch.allclose(norm(1e5 + 100 * x), norm(x), atol=1e-3)
        True
        >>> with torch.no_grad():  # one weight at 1: instance normalisation
        ...     _ = norm.mean_logits.copy_(torch.tensor([100.0, 0.0, 0.0]))
        ...     _ = norm.var_logits.copy_(norm.mean_logits)
        >>> torch.allclose(norm(x), F.instance_norm(x), atol=1e-6)
        True
        >>> norm.mixture()["mean"]["instance"]
        1.0

    Cost: as many passes over the input as batch normalisation, and the input alone is kept for backward.

    Folding: impossible, unless the mixture is batch statistics alone (`is_batch_only`).

    References: P. Luo et al., "Differentiable Learning-to-Normalize via Switchable Normalization", ICLR 2019.
        https://arxiv.org/abs/1806.10779

    Differs: from the official code. Instance variances are biased, which the layer and batch variances
    that are computed from them require. Statistics are centred and in float32 or wider, so a mean of 1e5
    costs no digits. The running variance starts at 1. `momentum` is the weight of the new batch (official
    0.9 and 0.997 are 0.1 and 0.003 here). The running variance is biased, unlike that of torch's batch norm.
    """

    ranks = (4,)
    takes = (nn.BatchNorm2d, nn.SyncBatchNorm)


class SwitchableNorm3d(SwitchableNorm):
    r"""Normalisation by a learned mixture of instance, layer and batch statistics; see :class:`SwitchableNorm2d`.

    .. math::
        y = \gamma\, \frac{x - \sum_k w_k \mu_k}{\sqrt{\sum_k w'_k \sigma_k^2 + \epsilon}} + \beta

    Shape: (N, C, D, H, W).

    Example:
        >>> norm = gonio.nn.SwitchableNorm3d(3)
        >>> x = torch.arange(2 * 3 * 2 * 2 * 2.0).reshape(2, 3, 2, 2, 2)
        >>> torch.allclose(norm(7 * x + 100), norm(x), atol=1e-4)
        True
    """

    ranks = (5,)
    takes = (nn.BatchNorm3d, nn.SyncBatchNorm)
