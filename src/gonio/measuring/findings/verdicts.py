"""The sentence with which a result begins: what was found, and where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from gonio.measuring.findings.rules import Finding
from gonio.messages import Message, counted, joined, say


def verdict(findings: Sequence[Finding], paths: Collection[str], noun: str = "layer") -> Message:
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
        return say("No findings in {places}.", places=counted(len(paths), noun))
    levels = Counter(finding.level for finding in findings)
    words = {
        "error": counted(levels["error"], "error"),
        "warn": counted(levels["warn"], "warning"),
        "info": counted(levels["info"], "remark"),
    }
    said = [word for level, word in words.items() if levels[level]]
    named = {finding.path for finding in findings}
    inside, others = named & set(paths), named - set(paths) - {""}
    places = []
    if inside:
        places.append(say("{n} of {every}", n=len(inside), every=counted(len(paths), noun)))
    if others:
        places.append(counted(len(others), "other tensor" if paths else "tensor"))
    if "" in named:
        places.append(say("the model as a whole"))
    found, where = joined(said, last=" and "), joined(places, last=" and ")
    return say("{found} in {places}.", found=found, places=where)
