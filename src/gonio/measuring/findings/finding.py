"""A finding, the rule that reports it, and findings that were suppressed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

LEVELS = ("info", "warn", "error")

Subject = TypeVar("Subject")


@dataclass(frozen=True)
class Finding:
    """One unusual property of a tensor, or of the whole model (path "").

    Attributes:
        code: of the rule; :func:`gonio.measuring.explain` prints the details.
        level: `error` (the model cannot work), `warn` (it probably does not work as intended), `info`.
        found: what was found. `chance`: the value for random weights. `do`: the recommended action.
    """

    code: str
    level: str
    path: str
    found: str
    chance: str
    do: str


@dataclass(frozen=True)
class Rule(Generic[Subject]):
    """One rule.

    Attributes:
        check: what it found in its subject (a tensor, or the setting of a training), in words; None for nothing.
        means: the meaning of the figure, and when it is harmless.
        do: the recommended action.
        source: a reference.
        chance: the value for random weights.
        exact: why the rule has no false alarms, for one that reads facts instead of judging a figure; the rate of
            the others is measured.
    """

    code: str
    level: str
    title: str
    check: Callable[[Subject], str | None]
    means: str
    do: str
    source: str
    chance: str = ""
    exact: str = ""

    def finding(self, subject: Subject, path: str) -> Finding | None:
        """The finding on this subject, if there is one."""
        found = self.check(subject)
        chance = self.chance or self.exact
        return None if found is None else Finding(self.code, self.level, path, found, chance, self.do)


def rule(
    code: str, level: str, title: str, *, means: str, do: str, source: str, chance: str = "", exact: str = ""
) -> Callable[[Callable[[Subject], str | None]], Rule[Subject]]:
    """A decorator that makes a :class:`Rule` of its check."""
    return lambda check: Rule(code, level, title, check, means, do, source, chance, exact)


@dataclass(frozen=True)
class Suppressed:
    """Findings that were suppressed.

    Attributes:
        by: the file or option that suppressed them.
        findings: worst first.
        unmatched: parts of the suppression that matched no finding.
    """

    by: str
    findings: tuple[Finding, ...]
    unmatched: tuple[str, ...] = ()

    @property
    def sentences(self) -> tuple[str, ...]:
        """The number of suppressed findings, and the unmatched parts.

        Example:
            >>> from gonio.measuring import Suppressed
            >>> Suppressed("gonio.toml", (), ("G405", "G101 for head.*")).sentences
            ('Not found, though gonio.toml suppresses it: G405, G101 for head.*.',)
        """
        count = len(self.findings)
        said = [f"{count} finding{'s' if count > 1 else ''} suppressed by {self.by}"] if count else []
        if self.unmatched:
            said.append(f"Not found, though {self.by} suppresses it: {', '.join(self.unmatched)}.")
        return tuple(said)
