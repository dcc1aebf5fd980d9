"""What each verb makes of a file of the bank: the outcome in words, or an AssertionError where it is wrong."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

import gonio
from bank.files.case import File, tensors_of
from gonio.errors import GonioError
from gonio.measuring import Measurements, TensorMeasurement, difference, measure
from gonio.measuring.changes.sources import NotCompared, base_entries, tuned, values_of
from gonio.measuring.reading.source import contents_of

ABOVE_INFO = ("warn", "error")


def outcomes(file: File) -> dict[str, str]:
    """The outcome of every verb."""
    made = {"measure": _measure(file), "difference": _difference(file), "check": _check(file)}
    return made if file.folded is None else {**made, "fold": _fold(file)}


def _refused(file: File, error: GonioError) -> str:
    assert file.error, f"refused: {error}"
    assert re.search(file.error, str(error)), str(error)
    return f"refused: {error}"


def _said(right: int, refused: list[str]) -> str:
    words = [f"right: {right} weight{'s' if right != 1 else ''}"] if right or not refused else []
    return "; ".join([*words, *(f"not read: {reason}" for reason in dict.fromkeys(refused))])


# --- measure ---------------------------------------------------------------------------------------------------------


def _measure(file: File) -> str:
    try:
        found = measure(file.source)
        if file.base is not None and (file.error or contents_of(file.source).adapters):
            measure(file.source, base=dict(file.base))
    except GonioError as error:
        return _refused(file, error)
    assert not file.error, "not refused"
    held = base_entries(file.source) if file.base is None else tuned(base_entries(dict(file.base)), file.source).entries
    for name, expected in file.weights.items():
        assert name in held or file.base is not None, f"{name} has no row"
        values = values_of(held[name], "") if name in held else file.base[name]  # an adapter leaves the rest as it is
        assert isinstance(values, Tensor), f"{name}: {values}"
        assert tuple(values.shape) == tuple(expected.shape), (name, values.shape, expected.shape)
        off = _deviation(values, expected)
        assert off <= file.exact, f"{name} deviates by {off:.3g}"
    shapes = {name: value.shape for name, value in (file.base or {}).items()}
    reasons = [_reason(name, said, found, held, shapes.get(name)) for name, said in file.refused.items()]
    _check_rows(file, found)
    return _said(len(file.weights), reasons)


def _deviation(values: Tensor, expected: Tensor) -> float:
    return float((values.double() - expected).norm() / expected.norm().clamp_min(1e-30))


def _reason(name: str, said: str, found: Measurements, held: Any, shape: torch.Size | None) -> str:
    row = next((row for row in found.values() if name in (row.name, row.path)), None)
    if row is not None and row.status != "measured":
        reason: Tensor | NotCompared | str = row.reason
    else:
        reason = values_of(held[name], "") if name in held else "only before"  # of a base, not known to be unchanged
    reason = reason.reason if isinstance(reason, NotCompared) else reason
    if isinstance(reason, Tensor) and shape is not None and reason.shape != shape:
        reason = f"of the shape {tuple(reason.shape)}"
    assert isinstance(reason, str), f"{name} was read"
    assert said in reason, f"{name}: {reason}"
    return reason


def _check_rows(file: File, found: Measurements) -> None:
    """Every tensor is accounted for, nothing else is measured, figures and layouts are right, fresh ones are quiet."""
    rows = {row.name: row for row in found.values()}
    for row in rows.values():
        assert row.status == "measured" or row.reason, f"{row.name} has no figures and no reason"
    entries = contents_of(file.source).entries
    missing = _unmatched(file, found, {entry.name for entry in entries})
    assert not missing, f"not accounted for: {missing}"
    adapters = {entry.name for entry in entries if entry.role == "adapter"}
    for row in found.layers:
        if file.base is None and row.name not in adapters and not row.nonfinite:
            assert row.name in file.weights, f"{row.name} {row.shape} is measured and is no weight"
            norm = float(file.weights[row.name].norm())
            assert row.frobenius is not None
            assert abs(row.frobenius - norm) <= 2 * file.exact * norm + 1e-30, (
                f"{row.name}: norm {row.frobenius}, {norm}"
            )
    if file.live is not None:
        _check_layouts(measure(file.live), rows)
    if file.fresh:
        loud = [f"{f.code} {f.path}: {f.found}" for f in found.findings if f.level in ABOVE_INFO]
        assert not loud, loud


def _unmatched(file: File, found: Measurements, rows: set[str]) -> list[str]:
    """The tensors without a row. A weight of several tensors has the row of its first one, under its own name."""
    told = ("not read: ", "the state of an optimizer, not weights: ")
    unread = "; ".join(note for note in found.notes if note.startswith(told))
    key = next((m[1] for note in found.notes if (m := re.match(r"read from '(.+)' of the checkpoint", note))), "")
    names = {place: place.removeprefix(f"{key}.") for place in tensors_of(file.source)}
    beside = {p for p, name in names.items() if key and p == name and (p.split(".")[0] in unread or " more" in unread)}
    left = {p: re.sub(r"(_orig_mod|_fsdp_wrapped_module)\.", "", n) for p, n in names.items() if p not in beside}
    left = {p: re.sub(r"\._packed_params\._packed_params\.0$", ".weight", n) for p, n in left.items()}
    left = {p: re.sub(r"\._packed_params\._packed_params\.1$", ".bias", n) for p, n in left.items()}
    known = {one for n in left.values() for one in (n, n.removeprefix("module."))}
    lost = [p for p, n in left.items() if not {n, n.removeprefix("module.")} & rows]
    return lost if len(lost) > len(rows - known) else []


def _check_layouts(live: Measurements, rows: dict[str, TensorMeasurement]) -> None:
    """Each tensor has the matrices of the layer in memory, or no figures."""
    for own in live.layers:
        row = rows.get(own.name)
        if (
            row is None
            or row.status != "measured"
            or any("unknown" in note or "depthwise" in note for note in row.notes)
        ):
            continue
        assert (row.groups, row.filters, row.dim) == (own.groups, own.filters, own.dim), f"layout of {own.name}"
        assert row.frobenius is not None
        assert own.frobenius is not None
        assert abs(row.frobenius - own.frobenius) <= 1e-5 * own.frobenius, f"{own.name}: norm {own.frobenius} in memory"


# --- the other verbs -------------------------------------------------------------------------------------------------


def _difference(file: File) -> str:
    """From twice the weights, or from the base of adapters: the change that the tool makes, or a reason."""
    before = {k: 2 * v for k, v in file.weights.items()} if file.base is None else dict(file.base)
    before |= {} if file.base is not None else {name: torch.ones(2, 2) for name in file.refused if name not in before}
    before = before or {"no.weight": torch.ones(2, 2)}
    try:
        found = difference(before, file.source)
    except GonioError as error:
        if not file.weights and not file.error and "no name in common" in str(error):  # nothing to compare
            return "refused: no weight to compare"
        return _refused(file, error)
    rows = {name: row for row in found.values() for name in (f"module.{row.name}", row.name)}
    for name, expected in file.weights.items():
        start = before[name].double()
        row, moved = rows[name], float((expected - start).norm())
        if moved <= file.exact * float(start.norm()):
            assert row.status == "equal" or (row.change_norm or 0.0) <= 2 * file.exact * float(start.norm()), name
        else:
            assert row.status == "compared", (name, row.status, row.reason)
            assert row.change_norm is not None
            wrong = abs(row.change_norm - moved)
            assert wrong <= 1e-3 * moved + file.exact * float(start.norm()), (name, row.change_norm, moved)
    reasons = []
    for name in file.refused:
        if name in rows:
            assert rows[name].status == "not compared", (name, rows[name].status)
            assert rows[name].reason, name
            reasons.append(rows[name].reason)
    return _said(len(file.weights), reasons)


def _check(file: File) -> str:
    try:
        found = gonio.check(file.source)
    except GonioError as error:
        return _refused(file, error)
    named = [row.name for row in found.tensors]
    for place in tensors_of(file.source):
        assert any(place == one or place.endswith(f".{one}") for one in named), f"check does not name {place}"
    if file.fresh:
        loud = [f"{f.code} {f.path}: {f.found}" for f in found.findings if f.level in ABOVE_INFO]
        assert not loud, loud
    unread = [row.reason for row in found.tensors if row.reason]
    return _said_of_check(len(found.tensors), unread)


def _said_of_check(count: int, unread: list[str]) -> str:
    said = f"right: {count} tensor{'s' if count != 1 else ''}"
    return "; ".join([said, *(f"not read: {reason}" for reason in dict.fromkeys(unread))])


def _fold(file: File) -> str:
    model = file.folded
    assert model is not None
    said = str(gonio.fold_(model))
    state = model.state_dict()
    if re.search("stays?: a hook of torch.nn.utils", said):
        assert not set(file.weights) & set(state)
        return "left: a hook of torch.nn.utils computes its weight"
    for name, expected in file.weights.items():
        assert name in state, f"fold_ left {list(state)}"
        assert _deviation(state[name], expected) <= file.exact, f"fold_: {name}"
    return f"right: {len(file.weights)} weight{'s' if len(file.weights) != 1 else ''}"
