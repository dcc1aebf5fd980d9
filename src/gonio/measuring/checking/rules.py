"""Rules on checkpoints: problems of files, values of tensors, tensors beside those of other layers, changes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median

from gonio.measuring.checking.places import Problem
from gonio.measuring.checking.scan import TensorCheck
from gonio.measuring.exports import counted
from gonio.measuring.findings.rules import Finding, FindingRule, findings_by, rule, worst_first

FILE_RULES: dict[str, FindingRule[Problem]] = {}
VALUE_RULES: dict[str, FindingRule[TensorCheck]] = {}

FACTOR = 10.0  # of the root mean square from the median of the siblings
DISTANCE = 8.0  # in units of the siblings' spread
LEAST_SPREAD = 0.05  # of log norms: those of fresh layers are equal to a fraction of a per cent
SIBLINGS = 3  # without a tensor itself


def checked(tensors: Sequence[TensorCheck], problems: Iterable[Problem]) -> tuple[Finding, ...]:
    """All findings, errors first; those of files before those of tensors."""
    files = findings_by(FILE_RULES, ((problem, problem.path) for problem in problems))
    return worst_first([*files, *findings_by(VALUE_RULES, ((tensor, tensor.path) for tensor in tensors))])


def with_siblings(tensors: Sequence[TensorCheck]) -> tuple[TensorCheck, ...]:
    """The tensors, each matrix with its distance from the matrices of the same name up to numbers, and of one shape."""
    groups: dict[tuple[str, tuple[int, ...]], list[TensorCheck]] = {}
    for tensor in tensors:
        if len(tensor.shape) > 1 and tensor.norm is not None and not tensor.beside:
            groups.setdefault((re.sub(r"\d+", "#", tensor.name), tensor.shape), []).append(tensor)
    placed = {
        tensor.name: _beside(tensor, [other for other in group if other is not tensor])
        for group in groups.values()
        if len(group) > SIBLINGS
        for tensor in group
    }
    return tuple(placed.get(tensor.name, tensor) for tensor in tensors)


def _beside(tensor: TensorCheck, others: list[TensorCheck]) -> TensorCheck:
    """The tensor with its distance in log norm from the others, in units of their spread.

    The spread is 1.4826 times the median absolute deviation, a standard deviation for normal numbers (P. Rousseeuw,
    C. Croux, 'Alternatives to the median absolute deviation', JASA 88, 1993, section 1).
    """
    logs = [math.log(other.norm) for other in others if other.norm]
    if len(logs) < len(others) or tensor.norm is None:  # a sibling that is 0: nothing to compare with
        return replace(tensor, siblings=len(others))
    middle = median(logs)
    if not tensor.norm:
        return replace(tensor, siblings=len(others), ratio=0.0)
    spread = max(1.4826 * median(abs(log - middle) for log in logs), LEAST_SPREAD)
    away = math.log(tensor.norm) - middle
    return replace(tensor, siblings=len(others), ratio=math.exp(away), distance=abs(away) / spread)


for _code in ("G701", "G702", "G703", "G704", "G705", "G710", "G711"):

    @rule(_code, FILE_RULES)
    def _of_file(problem: Problem, code: str = _code) -> str | None:
        return problem.found if problem.code == code else None


@rule("G001", VALUE_RULES)
def _nonfinite(t: TensorCheck) -> str | None:
    if not t.nonfinite:
        return None
    place = ", ".join(map(str, t.first_nonfinite or ()))
    return f"{t.nonfinite} of {t.entries} values are NaN or infinite, the first at [{place}]"


@rule("G101", VALUE_RULES)
def _zero(t: TensorCheck) -> str | None:
    return "every value is 0" if t.zero and t.rows > 1 and t.ratio != 0 else None


@rule("G102", VALUE_RULES)
def _zero_rows(t: TensorCheck) -> str | None:
    return f"{t.zero_rows} of {t.rows} rows are 0, the first is row {t.row}" if 1 < t.zero_rows < t.rows else None


@rule("G706", VALUE_RULES)
def _constant(t: TensorCheck) -> str | None:
    return f"every value is {t.largest:.3g} or its negative" if t.constant and not t.zero and t.rows > 1 else None


@rule("G707", VALUE_RULES)
def _equal_rows(t: TensorCheck) -> str | None:
    if not t.equal_rows or t.pair is None:
        return None
    return f"{t.equal_rows} of {t.rows} rows equal an earlier one, as row {t.pair[1]} equals row {t.pair[0]}"


@rule("G708", VALUE_RULES)
def _constant_rows(t: TensorCheck) -> str | None:
    if t.zero_rows == 1 and t.rows > 1:
        return f"row {t.row} is 0"
    if not t.constant_rows or t.constant:
        return None
    return f"{counted(t.constant_rows, 'row')} of {t.rows} {'has' if t.constant_rows == 1 else 'have'} one value each"


@rule("G709", VALUE_RULES)
def _stranger(t: TensorCheck) -> str | None:
    if t.ratio is None:
        return None
    others = f"its {t.siblings} siblings of other layers"
    if t.ratio == 0:
        return f"every value is 0, unlike in {others}"
    if (t.distance or 0) < DISTANCE or 1 / FACTOR < t.ratio < FACTOR:
        return None
    return f"its norm is {t.ratio:.3g} times the median of {others}, {t.distance:.3g} times their spread away"


@rule("G712", VALUE_RULES)
def _unchecked(t: TensorCheck) -> str | None:
    return f"its values were not checked: {t.reason}" if t.reason else None
