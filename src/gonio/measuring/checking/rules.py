"""Rules on checkpoints: problems of files, values of tensors, tensors beside those of other layers, changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import sqrt

from gonio.errors import listing
from gonio.escaping import plain
from gonio.measuring.checking.places import Problem
from gonio.measuring.checking.scan import TensorCheck
from gonio.measuring.findings.rules import (
    Finding,
    FindingRule,
    equal_filters,
    findings_by,
    named,
    nonfinite_values,
    rule,
    worst_first,
    zero_filters,
)
from gonio.measuring.findings.siblings import AmongSiblings, copies, places
from gonio.measuring.reading.entry import (
    NOTES,
    PACKED,
    USUAL_PADDING,
    dtype_name,
    fills_up,
    has_bias,
    holds_variances,
    infer,
    negative_variances,
    stores_inputs_first,
)
from gonio.measuring.reading.order import is_matrix
from gonio.measuring.reading.source import padding_rows, tables_in
from gonio.messages import counted, say

_CODES = frozenset(map(dtype_name, PACKED))  # what packed weights are stored in
_FEWEST_ENTRIES = 64  # of a tensor that is not equal to another one by chance
_OUTWEIGHS = 1e4  # the largest entry of a matrix, in units of the root mean square of the others
_HUGE = 100.0  # an entry, at least: beside weights that have decayed to nothing any other outweighs them
FILE_RULES: dict[str, FindingRule[Problem]] = {}
VALUE_RULES: dict[str, FindingRule[TensorCheck]] = {}


def checked(tensors: Sequence[TensorCheck], problems: Iterable[Problem]) -> tuple[Finding, ...]:
    """All findings, errors first; those of files before those of tensors."""
    problems = list(problems)
    # a tensor that was not read for one of them is not told twice
    named = {name for problem in problems for name in (problem.path, *problem.tensors)}
    told = [(tensor, tensor.path) for tensor in tensors if not (tensor.reason and tensor.name in named)]
    return worst_first([*of_files(problems), *findings_by(VALUE_RULES, told)])


def of_files(problems: Iterable[Problem]) -> list[Finding]:
    """The findings of what is wrong with files."""
    return findings_by(FILE_RULES, ((problem, problem.path) for problem in problems))


def among_others(
    tensors: Sequence[TensorCheck], *, padding: tuple[int, ...] = USUAL_PADDING
) -> tuple[TensorCheck, ...]:
    """The tensors of one file, each with its distance from its siblings, and with what its rows are.

    Args:
        padding: the rows that may be the padding of embeddings.
    """
    own = [t for t in tensors if not t.beside]
    known = places((t.name, t.shape, t.norm) for t in own if t.norm is not None)
    # codes and scales of packed weights have no norm: of them it is told only that all are 0
    codes = places((t.name, t.shape, float(not t.zero)) for t in own if t.dtype in _CODES and not t.reason)
    known |= {name: place for name, place in codes.items() if place.ratio == 0}
    shapes = {t.name: t.shape for t in own}
    inputs_first = stores_inputs_first(shapes) if any(t.equal_rows or t.zero_rows for t in own) else False

    def is_layer(t: TensorCheck) -> bool:
        layout = infer(t.name, shapes, inputs_first=inputs_first).layout
        if len(t.shape) > 2 and t.shape[1] == 1 and t.equal_rows == t.rows - 1:  # one kernel in every channel: a blur
            return False
        told = len(t.shape) > 2 or has_bias(t.name, shapes) or t.name in known
        return told and layout is not None and not layout.transposed

    tables = tables_in(shapes)

    def with_rows(t: TensorCheck) -> TensorCheck:
        if t.beside or t.adapter or not (t.equal_rows or t.zero_rows):
            return t
        return replace(t, layer=is_layer(t), padding=padding_rows(t.shape, padding, tables))

    placed = (replace(t, **vars(known[t.name])) if t.name in known and not t.beside else t for t in tensors)
    return tuple(map(with_rows, placed))


_OF_FILES = ("G701", "G702", "G703", "G704", "G705", "G710", "G711", "G713", "G714", "G715", "G716", "G717", "G718")
for _code in (*_OF_FILES, "G719", "G720"):

    @rule(_code, FILE_RULES)
    def _of_file(problem: Problem, code: str = _code) -> str | None:
        return problem.found if problem.code == code else None


def copied_layers(tensors: Sequence[TensorCheck], addresses: Mapping[str, int]) -> list[Problem]:
    """The layers whose matrices equal those of another, bit by bit.

    Args:
        addresses: of tensors in memory. Those at one address are shared, and no copies.
    """
    shared = {address for address, count in Counter(addresses.values()).items() if count > 1}
    own = {
        t.name: t
        for t in tensors
        if t.entries >= _FEWEST_ENTRIES and t.fingerprint and not (t.beside or t.adapter or t.constant or t.mask)
        if (not t.integers or t.dtype in _CODES) and addresses.get(t.name) not in shared
    }
    shapes = {name: t.shape for name, t in own.items()}
    found = copies(shapes, {name: f"{t.dtype} {t.fingerprint}" for name, t in own.items()})
    return [Problem("G716", layer, _equal(other, names)) for (layer, other), names in found.items()]


def _equal(other: str, names: list[str]) -> str:
    if len(names) == 1:
        return say("{name} equals the same tensor of {other} to the last bit", name=plain(names[0]), other=plain(other))
    return say(
        "{n} tensors equal those of {other} to the last bit: {names}",
        n=len(names), other=plain(other), names=listing([plain(name) for name in names]),
    )  # fmt: skip


@rule("G001", VALUE_RULES, harmless=lambda t: t.beside and not t.state and not t.shape)
def _nonfinite(t: TensorCheck) -> str | None:
    """A single number of neither model nor optimizer is a trainer's, such as a best score that is infinite at first."""
    return nonfinite_values(t.nonfinite, t.entries, t.first_nonfinite)


@rule("G101", VALUE_RULES)
def _zero(t: TensorCheck) -> str | None:
    if not (t.zero and is_matrix(t.shape)) or t.ratio == 0 or t.state or (t.integers and t.dtype not in _CODES):
        return None
    return say("every value is 0")


@rule(
    "G102",
    VALUE_RULES,
    harmless=lambda t: bool(t.padding) and not t.layer and fills_up(t.zero_rows, t.rows, t.zero_indices),
)
def _zero_rows(t: TensorCheck) -> str | None:
    if not 0 < t.zero_rows < t.rows or t.adapter or t.state or t.beside or _padded(t):
        return None
    return zero_filters(t.zero_rows, t.rows, t.zero_indices, t.entries // t.rows)


def _padded(t: TensorCheck) -> bool:
    """Whether its one row of zeros may be the padding of an embedding."""
    return t.zero_rows == 1 and t.zero_indices[0] in t.padding


@rule("G105", VALUE_RULES)
def _negative_variances(t: TensorCheck) -> str | None:
    return negative_variances(t.negative) if t.negative else None


@rule("G107", VALUE_RULES)
def _no_variance(t: TensorCheck) -> str | None:
    return NOTES["no variance"] if t.zero and holds_variances(t.name) else None


@rule("G203", VALUE_RULES, harmless=lambda t: not t.layer)
def _equal_rows(t: TensorCheck) -> str | None:
    if t.adapter or t.state:
        return None
    return equal_filters(t.equal_pairs, t.equal_rows, t.rows, (t.rows, t.entries // max(t.rows, 1)))


@rule("G706", VALUE_RULES)
def _constant(t: TensorCheck) -> str | None:
    if not t.constant or t.zero or t.nonfinite or not is_matrix(t.shape) or t.integers or t.state:
        return None
    return say("every value is {largest:.3g} or its negative", largest=t.largest)


@rule("G708", VALUE_RULES)
def _constant_rows(t: TensorCheck) -> str | None:
    if t.adapter or t.state:
        return None
    if _padded(t) and t.rows > 1:
        return say("row {row} is 0", row=t.zero_indices[0])
    if not t.constant_rows or t.constant:
        return None
    return say(
        "{rows} of {rows_2} {have} one value each: {named}",
        rows=counted(t.constant_rows, "row"),
        rows_2=t.rows,
        have="has" if t.constant_rows == 1 else "have",
        named=named([str(row) for row in t.constant_indices], t.constant_rows),
    )


@rule("G721", VALUE_RULES)
def _one_entry(t: TensorCheck) -> str | None:
    if not _has_outlier(t):
        return None
    return say(
        "its largest entry, {largest:.3g}, is more than {factor:,.0f} times the root mean square of the others",
        largest=t.largest,
        factor=_OUTWEIGHS,
    )


def _has_outlier(t: TensorCheck) -> bool:
    if t.beside or t.norm is None or not is_matrix(t.shape) or t.entries < _FEWEST_ENTRIES:
        return False
    if not t.largest or t.largest <= _HUGE:
        return False
    others = sqrt(max((t.norm / t.largest) ** 2 - 1, 0.0) / (t.entries - 1))  # in units of the largest; no overflow
    return _OUTWEIGHS * others < 1


@rule("G709", VALUE_RULES)
def _stranger(t: TensorCheck) -> str | None:
    if (t.zero and holds_variances(t.name)) or _has_outlier(t):  # G107 and G721 say it
        return None
    return AmongSiblings(t.siblings, t.ratio, t.distance).found


@rule("G712", VALUE_RULES)
def _unchecked(t: TensorCheck) -> str | None:
    return say("its values were not checked: {reason}", reason=t.reason) if t.reason else None
