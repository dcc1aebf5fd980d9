"""The sentence with which a result begins: what was found, and where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from gonio.errors import listing
from gonio.measuring.findings.rules import RULES, Finding
from gonio.messages import Message, counted, fixed, joined, say

_NAMED = 3  # layers in a headline, at most


def verdict(
    findings: Sequence[Finding], paths: Collection[str], noun: str = "layer", *, tensors: Collection[str] | None = None
) -> Message:
    """How many findings there are of each level, and in how many layers.

    Args:
        paths: of the layers (or tensors) that have a row.
        tensors: the paths of all tensors, where findings may be of files and modules too.

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
    further = set() if tensors is None else others - set(tensors)
    if others - further:
        places.append(counted(len(others - further), "other tensor" if paths else "tensor"))
    if further:
        places.append(counted(len(further), "other place" if paths or others - further else "place"))
    if "" in named:
        places.append(say("the model as a whole"))
    found, where = joined(said, last=" and "), joined(places, last=" and ")
    return say("{found} in {places}.", found=found, places=where)


def first_of(findings: Sequence[Finding]) -> Message:
    """Where the findings are and what the first of them is, as a sentence; findings are worst first.

    Example:
        >>> from gonio.measuring.findings.rules import Finding
        >>> from gonio.measuring.findings.verdicts import first_of
        >>> first_of([Finding("G102", "warn", "conv2", "", "", ""), Finding("G203", "warn", "fc", "", "", "")])
        'In conv2, fc; the first is G102: filters that are exactly 0 beside others that are not.'
    """
    first = say("{code}: {title}", code=findings[0].code, title=fixed(RULES[findings[0].code].text.title))
    paths = list(dict.fromkeys(finding.path for finding in findings if finding.path))
    if not paths:
        return say("The first is {first}.", first=first)
    return say("In {paths}; the first is {first}.", paths=listing(paths, limit=_NAMED), first=first)
