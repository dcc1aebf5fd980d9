"""`gonio.certify` on models of timm: a bound that no pair of inputs exceeds, or a refusal that names the layer.

    PYTHONPATH=tests python -m sweeps.timm_sweep certify --count 332 --out tests/sweeps/timm_certified.jsonl

Pairs are all pairs of `INPUTS` random images around a few centres, at distances over four decades: 10,011 of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import gonio
from gonio.errors import NotApplicableError
from gonio.measuring.certificate import Certificate
from gonio.seeding import generator

INPUTS = 142  # 142 · 141 / 2 = 10,011 pairs
_CENTRES, _BATCH, _STEPS = 6, 16, 6


def certified(name: str, build: Callable[[], tuple[nn.Module, Tensor]]) -> dict[str, Any]:
    """The row of one model: its bounds and the largest quotient of all pairs, or why it is refused."""
    model, x = build()
    row = {"model": name, "input": list(x.shape[1:])}
    try:
        found = gonio.certify(model, x, steps=_STEPS)
    except NotApplicableError as refusal:
        return {**row, "steps": {"certify": f"refused: {refusal}"}}
    except Exception as error:  # the outcome of this model; the sweep goes on
        return {**row, "steps": {"certify": f"failed: {type(error).__name__}: {error}"[:400]}}
    seen = largest_quotient(found, tuple(x.shape[1:]))
    figures = {"upper": found.upper, "lower": found.lower, "seen": seen, "pairs": INPUTS * (INPUTS - 1) // 2}
    return {**row, "steps": {"certify": judged(found, seen)}, "figures": figures}


def judged(found: Certificate, seen: float) -> str:
    """Whether the bound is finite, and neither its own lower bound nor the quotient of a pair exceeds it."""
    if not 0 <= found.upper < float("inf"):
        return f"failed: the upper bound is {found.upper}"
    if max(seen, found.lower) > found.upper:
        return f"failed: a quotient of {max(seen, found.lower):.6g} exceeds the bound {found.upper:.6g}"
    return "passed"


@torch.no_grad()
def largest_quotient(found: Certificate, shape: tuple[int, ...]) -> float:
    """‖f(x) − f(y)‖ / ‖x − y‖ over all pairs, of the float64 copy that is certified."""
    random = generator(1)
    centres = torch.randn(_CENTRES, *shape, generator=random, dtype=torch.float64)
    sizes = 10 ** torch.linspace(-3, 1, INPUTS, dtype=torch.float64).view(-1, *[1] * len(shape))
    moves = torch.randn(INPUTS, *shape, generator=random, dtype=torch.float64)
    x = centres[torch.arange(INPUTS) % _CENTRES] + sizes * moves
    y = torch.cat([found.network(part.clone()).flatten(1) for part in x.split(_BATCH)])
    return float((torch.pdist(y) / torch.pdist(x.flatten(1))).max())
