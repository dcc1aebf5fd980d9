"""What a rule is: what it looks for, why it matters, and how often it errs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["Rule"]

Subject = TypeVar("Subject")


@dataclass(frozen=True)
class Rule(Generic[Subject]):
    """One rule.

    Attributes:
        check: what it found in its subject (a tensor, or the setting of a training), in words; None where all is
            well.
        means: what the figure means and when it is harmless.
        chance: what random weights show.
        do: what to do about it.
        source: where the reason comes from.
        exact: why the rule cannot err, for one that reads facts and judges no figure; its false alarms are not
            measured then.
    """

    code: str
    level: str
    title: str
    check: Callable[[Subject], str | None]
    means: str
    chance: str
    do: str
    source: str
    exact: str = ""
