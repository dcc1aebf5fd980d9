"""The figures of a change by full decompositions in float64, as the papers define them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def figures(before: Tensor, after: Tensor, k: int = 10) -> dict[str, Any]:
    """Of matrices (n, d)."""
    old, new = before.double(), after.double()
    change = new - old
    u0, _, _ = torch.linalg.svd(old, full_matrices=False)
    u1, _, _ = torch.linalg.svd(new, full_matrices=False)
    values = torch.linalg.svdvals(change)
    norms = [x.norm(dim=1) for x in (old, new)]
    cosines = ((old * new).sum(1) / (norms[0] * norms[1])).clamp(-1, 1)
    magnitudes, angles = (norms[1] / norms[0] - 1).abs(), cosines.acos()
    share = values / values.sum()
    held = values.square().cumsum(0) / values.square().sum()
    products = [x @ x.T for x in (old, new)]
    top = (u1.T @ u0).abs().amax(1)[:k]
    principal = torch.linalg.svdvals(u0[:, :k].T @ u1[:, :k]).clamp(-1, 1)
    return {
        "relative": float(change.norm() / old.norm()),
        "norm_ratio": float((norms[1] / norms[0]).median()),
        "angle_mean": float(torch.rad2deg(angles).mean()),
        "magnitude_change": float(magnitudes.mean()),
        "direction_change": float((1 - cosines).mean()),
        "magnitude_direction": float(torch.corrcoef(torch.stack([magnitudes, angles]))[0, 1]),
        "stable_rank": float(values.square().sum() / values.max().square()),
        "effective_rank": float((-share * share.clamp_min(1e-300).log()).sum().exp()),
        "rank_99": int((held >= 0.99).int().argmax()) + 1,
        "gram_change": float((products[1] - products[0]).norm() / products[0].norm()),
        "intruders": int((top < 0.5).sum()),
        "cosines": top,
        "overlap": float(principal.square().mean()),
        "principal": torch.rad2deg(principal.acos()),
    }


def agreement(deltas: list[Tensor]) -> dict[str, Any]:
    flat = torch.stack([delta.double().flatten() for delta in deltas])
    norms = flat.norm(dim=1)
    changed = flat != 0
    signs = [
        [float((a.sign() == b.sign())[x & y].double().mean()) for b, y in zip(flat, changed, strict=True)]
        for a, x in zip(flat, changed, strict=True)
    ]
    return {
        "cosines": (flat @ flat.T / norms[:, None] / norms).tolist(),
        "signs": signs,
        "kept": float(flat.mean(0).norm() / norms.mean()),
    }
