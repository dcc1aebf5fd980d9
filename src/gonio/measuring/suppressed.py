"""What was suppressed, and what of the suppression had nothing to do."""

from __future__ import annotations

from dataclasses import dataclass

from gonio.measuring.findings import Finding

__all__ = ["Suppressed"]


@dataclass(frozen=True)
class Suppressed:
    """The findings that were left out.

    Attributes:
        by: the file or option that says so.
        findings: worst first.
        unmatched: parts of the suppression that matched no finding.
    """

    by: str
    findings: tuple[Finding, ...]
    unmatched: tuple[str, ...] = ()

    @property
    def sentences(self) -> tuple[str, ...]:
        """How many there are, and what matched nothing.

        Example:
            >>> from gonio.measuring.suppressed import Suppressed
            >>> Suppressed("gonio.toml", (), ("G405", "G101 for head.*")).sentences
            ('Not found, though gonio.toml suppresses it: G405, G101 for head.*.',)
        """
        count = len(self.findings)
        said = [f"{count} finding{'s' if count > 1 else ''} suppressed by {self.by}"] if count else []
        if self.unmatched:
            said.append(f"Not found, though {self.by} suppresses it: {', '.join(self.unmatched)}.")
        return tuple(said)
