"""What `--robust` tries on each trained model, fixed in the plan."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ATTACK_SEED", "Threat"]

ATTACK_SEED = 1_000_007


@dataclass(frozen=True, kw_only=True)
class Threat:
    r"""Inputs may move by at most `epsilon` in each number, :math:`\|x' - x\|_\infty \le \epsilon`.

    Attributes:
        epsilon: in the unit of the inputs, before the model standardises them.
        low, high: the range of valid inputs; None: there is none.
        steps: of each PGD run; each moves by 2.5 · epsilon / steps.
        restarts: PGD runs per example, the first from the example itself, the others from random starts.
        examples: of the test split, always the same ones.
        seed: of the baseline on which the transferred examples are made; none of the study's.
    """

    epsilon: float
    low: float | None = None
    high: float | None = None
    steps: int = 20
    restarts: int = 5
    examples: int = 200
    seed: int = ATTACK_SEED
