"""Rules on checkpoints: problems of files, values of tensors, tensors beside those of other layers, changes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace

from gonio.measuring.checking.places import Problem
from gonio.measuring.checking.scan import TensorCheck
from gonio.measuring.findings.rules import (
    Finding,
    FindingRule,
    findings_by,
    nonfinite_values,
    rule,
    worst_first,
)
from gonio.measuring.findings.siblings import AmongSiblings, places
from gonio.messages import counted, say

FILE_RULES: dict[str, FindingRule[Problem]] = {}
VALUE_RULES: dict[str, FindingRule[TensorCheck]] = {}


def checked(tensors: Sequence[TensorCheck], problems: Iterable[Problem]) -> tuple[Finding, ...]:
    """All findings, errors first; those of files before those of tensors."""
    return worst_first([*of_files(problems), *findings_by(VALUE_RULES, ((tensor, tensor.path) for tensor in tensors))])


def of_files(problems: Iterable[Problem]) -> list[Finding]:
    """The findings of what is wrong with files."""
    return findings_by(FILE_RULES, ((problem, problem.path) for problem in problems))


def with_siblings(tensors: Sequence[TensorCheck]) -> tuple[TensorCheck, ...]:
    """The tensors, each matrix with its distance from the matrices of the same name up to numbers, and of one shape."""
    known = places((t.name, t.shape, t.norm) for t in tensors if t.norm is not None and not t.beside)
    return tuple(replace(t, **asdict(known[t.name])) if t.name in known and not t.beside else t for t in tensors)


for _code in ("G701", "G702", "G703", "G704", "G705", "G710", "G711"):

    @rule(_code, FILE_RULES)
    def _of_file(problem: Problem, code: str = _code) -> str | None:
        return problem.found if problem.code == code else None


@rule("G001", VALUE_RULES)
def _nonfinite(t: TensorCheck) -> str | None:
    return nonfinite_values(t.nonfinite, t.entries, t.first_nonfinite)


@rule("G101", VALUE_RULES)
def _zero(t: TensorCheck) -> str | None:
    return say("every value is 0") if t.zero and t.rows > 1 and t.ratio != 0 else None


@rule("G102", VALUE_RULES)
def _zero_rows(t: TensorCheck) -> str | None:
    return (
        say("{zero_rows} of {rows} rows are 0, the first is row {row}", zero_rows=t.zero_rows, rows=t.rows, row=t.row)
        if 1 < t.zero_rows < t.rows
        else None
    )


@rule("G706", VALUE_RULES)
def _constant(t: TensorCheck) -> str | None:
    return (
        say("every value is {largest:.3g} or its negative", largest=t.largest)
        if t.constant and not t.zero and t.rows > 1
        else None
    )


@rule("G707", VALUE_RULES)
def _equal_rows(t: TensorCheck) -> str | None:
    if not t.equal_rows or t.pair is None:
        return None
    return say(
        "{equal_rows} of {rows} rows equal an earlier one, as row {pair} equals row {pair_2}",
        equal_rows=t.equal_rows,
        rows=t.rows,
        pair=t.pair[1],
        pair_2=t.pair[0],
    )


@rule("G708", VALUE_RULES)
def _constant_rows(t: TensorCheck) -> str | None:
    if t.zero_rows == 1 and t.rows > 1:
        return say("row {row} is 0", row=t.row)
    if not t.constant_rows or t.constant:
        return None
    return say(
        "{rows} of {rows_2} {have} one value each",
        rows=counted(t.constant_rows, "row"),
        rows_2=t.rows,
        have="has" if t.constant_rows == 1 else "have",
    )


@rule("G709", VALUE_RULES)
def _stranger(t: TensorCheck) -> str | None:
    return AmongSiblings(t.siblings, t.ratio, t.distance).found


@rule("G712", VALUE_RULES)
def _unchecked(t: TensorCheck) -> str | None:
    return say("its values were not checked: {reason}", reason=t.reason) if t.reason else None
