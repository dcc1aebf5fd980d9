"""Switchable normalisation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gonio.nn.running import RunningStatistics

__all__ = ["SwitchableNorm2d"]

NAMES = ("instance", "layer", "batch")


class SwitchableNorm2d(RunningStatistics):
    """Normalisation by a learned mixture of instance, layer and batch statistics."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        *,
        use_batch: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_features, self.eps, self.momentum, self.affine, self.use_batch = (
            num_features,
            eps,
            momentum,
            affine,
            use_batch,
        )
        like = {"device": device, "dtype": dtype}
        kinds = 3 if use_batch else 2
        self.weight = nn.Parameter(torch.empty(num_features, **like)) if affine else None
        self.bias = nn.Parameter(torch.empty(num_features, **like)) if affine else None
        self.mean_logits = nn.Parameter(torch.empty(kinds, **like))
        self.var_logits = nn.Parameter(torch.empty(kinds, **like))
        self.register_buffer("running_mean", torch.empty(num_features, device=device) if use_batch else None)
        self.register_buffer("running_var", torch.empty(num_features, device=device) if use_batch else None)
        self.register_buffer("num_batches_tracked", torch.zeros((), dtype=torch.long, device=device))
        self.reset_parameters()

    @torch.no_grad()
    def reset_running_stats(self) -> None:
        """Forget the batches seen."""
        self.num_batches_tracked.zero_()
        if self.use_batch:
            self.running_mean.zero_()
            self.running_var.fill_(1)

    def reset_parameters(self) -> None:
        """Equal mixtures, unit scale, zero shift, no batch seen."""
        self.reset_running_stats()
        nn.init.ones_(self.mean_logits)
        nn.init.ones_(self.var_logits)
        if self.affine:
            nn.init.ones_(self.weight)
            nn.init.zeros_(self.bias)

    @classmethod
    def from_batch_norm(cls, norm: nn.BatchNorm2d, *, use_batch: bool = True) -> SwitchableNorm2d:
        """A switchable norm on the same affine Parameter objects, with the running statistics copied."""
        like = next((t for t in (norm.weight, norm.running_mean) if t is not None), torch.empty(0))
        new = cls(
            norm.num_features,
            norm.eps,
            norm.momentum,
            norm.affine,
            use_batch=use_batch,
            device=like.device,
            dtype=like.dtype,
        )
        for name in ("weight", "bias"):
            new._parameters[name] = norm._parameters[name]
        if use_batch and norm.running_mean is not None:
            with torch.no_grad():
                new.running_mean.copy_(norm.running_mean)
                new.running_var.copy_(norm.running_var)
                new.num_batches_tracked.copy_(norm.num_batches_tracked)
        return new.train(norm.training)

    def mixture(self) -> dict[str, dict[str, float]]:
        """The softmax weights of the mean and of the variance, by kind of statistic."""
        return {
            what: dict(zip(NAMES, logits.detach().float().softmax(0).tolist()))
            for what, logits in (("mean", self.mean_logits), ("var", self.var_logits))
        }

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        positions = tuple(range(2, x.dim()))
        area = wide[0, 0].numel()
        pivot = wide.detach().mean(positions, keepdim=True) if positions else wide.detach()
        c = wide - pivot
        mean_in = c.mean(positions).double() + pivot.flatten(1).double()
        var_in = (wide - mean_in.to(wide.dtype)[(...,) + (None,) * len(positions)]).square().mean(positions).double()
        means, variances, keep = [mean_in], [var_in], [area > 1]
        center, spread = mean_in.mean(1, keepdim=True), None
        means.append(center)
        variances.append(var_in.mean(1, keepdim=True) + (mean_in - center).square().mean(1, keepdim=True))
        keep.append(area * x.shape[1] > 1)
        if self.use_batch:
            if self.training:
                center = mean_in.mean(0, keepdim=True)
                spread = var_in.mean(0, keepdim=True) + (mean_in - center).square().mean(0, keepdim=True)
                self._track({"running_mean": center[0], "running_var": spread[0]})
                keep.append(area * x.shape[0] > 1)
            else:
                center, spread = self.running_mean.double()[None], self.running_var.double()[None]
                keep.append(True)
            means.append(center)
            variances.append(spread)
        a = torch.tensor(keep, device=x.device)
        w = self.mean_logits.double().masked_fill(~a, -torch.inf).softmax(0)
        u = self.var_logits.double().masked_fill(~a, -torch.inf).softmax(0)
        mean = sum(wk * m for wk, m, k in zip(w, means, keep) if k)
        var = sum(uk * v for uk, v, k in zip(u, variances, keep) if k)
        scale = (var + self.eps).rsqrt()
        if self.affine:
            scale = scale * self.weight.double()
        shift = (pivot.flatten(1).double() - mean) * scale
        if self.affine:
            shift = shift + self.bias.double()
        tail = (...,) + (None,) * len(positions)
        return (c * scale.to(wide.dtype)[tail] + shift.to(wide.dtype)[tail]).to(x.dtype)
