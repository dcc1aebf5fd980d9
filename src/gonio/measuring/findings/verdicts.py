"""The sentence with which a result begins: what was found, and where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from gonio.measuring.exports import counted
from gonio.measuring.findings.rules import Finding

_WORDS = {"error": "error", "warn": "warning", "info": "remark"}


def verdict(findings: Sequence[Finding], paths: Collection[str], noun: str = "layer") -> str:
    """How many findings there are of each level, and in how many layers.

    Args:
        paths: of the layers (or tensors) that have a row.

    Example:
        >>> from gonio.measuring.findings.rules import Finding
        >>> from gonio.measuring.findings.verdicts import verdict
        >>> verdict([], ["a", "b"])
        'No findings in 2 layers.'
        >>> verdict([Finding("G102", "warn", "a", "", "", ""), Finding("G405", "info", "", "", "", "")], ["a", "b"])
        '1 warning and 1 remark in 1 of 2 layers and the model as a whole.'
    """
    if not findings:
        return f"No findings in {counted(len(paths), noun)}."
    levels = Counter(finding.level for finding in findings)
    said = [counted(levels[level], word) for level, word in _WORDS.items() if levels[level]]
    named = {finding.path for finding in findings}
    inside, others = named & set(paths), named - set(paths) - {""}
    places = [f"{len(inside)} of {counted(len(paths), noun)}"] if inside else []
    if others:
        places.append(counted(len(others), "other tensor" if paths else "tensor"))
    if "" in named:
        places.append("the model as a whole")
    return f"{_joined(said)} in {_joined(places)}."


def _joined(parts: Sequence[str]) -> str:
    return " and ".join(", ".join(parts).rsplit(", ", 1)) if len(parts) > 1 else parts[0]
