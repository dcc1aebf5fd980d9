"""Law: Ctrl-C or an error in a verb or in its undo leaves the model before or after, never between.

`GONIO_POINTS` is the number of interruptions of one call (4); `make soak` has 60.
"""

from __future__ import annotations

import ast
import linecache
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from catalog import VERBS, VerbCase, seeded
from gonio.surgery import Edit, UndoError
from laws.snapshot import Snapshot, assert_restored
from laws.test_verbs import model_of

POINTS = int(os.environ.get("GONIO_POINTS", "4"))  # of one call, evenly spread over the lines of gonio that it runs


@cache
def inlined(file: str) -> frozenset[int]:
    """Lines of comprehensions that Python 3.12 and later run in the frame around them.

    What a trace function raises there passes by the blocks around it, so that a lock would stay closed; real exceptions
    and signals do not.
    """
    if sys.version_info < (3, 12):
        return frozenset()
    kinds = (ast.ListComp, ast.SetComp, ast.DictComp)
    found = [node for node in ast.walk(ast.parse(Path(file).read_text(encoding="utf-8"))) if isinstance(node, kinds)]
    return frozenset(line for node in found for line in range(node.lineno, (node.end_lineno or node.lineno) + 1))


@contextmanager
def interrupted(at: int, error: BaseException) -> Iterator[list[int]]:
    """Raise at the line of this number among those that gonio runs; the list gets the number of lines."""
    count = [0]

    def local(frame: Any, event: str, _: Any) -> Any:
        # The end of a block is a line event of its `with`; there no signal is handled, and a lock would stay closed.
        # Nor is one at `try:`, whose event comes before its block and, in Python 3.11, outside of the one around it.
        file, line = frame.f_code.co_filename, frame.f_lineno
        text = linecache.getline(file, line).lstrip()
        if event == "line" and not text.startswith(("with ", "try:")) and line not in inlined(file):
            count[0] += 1
            if count[0] == at:
                raise error
        return local

    def trace(frame: Any, event: str, _: Any) -> Any:
        ours = "/gonio/" in frame.f_code.co_filename and "/errors" not in frame.f_code.co_filename
        return local if ours else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(before)


def lines_of(call: Callable[[], Any]) -> int:
    with interrupted(0, KeyboardInterrupt()) as count:
        call()
    return count[0]


def spread(lines: int) -> list[int]:
    return sorted({1 + (lines - 1) * i // (POINTS - 1) for i in range(POINTS)})


def assert_before_or_after(found: Snapshot, before: Snapshot, after: Snapshot) -> None:
    try:
        assert_restored(before, found)
    except AssertionError as between:
        try:
            assert_restored(after, found)
        except AssertionError:
            raise between from None


def seeded_model(case: VerbCase) -> nn.Module:
    torch.manual_seed(0)
    return model_of(case)


def check_verb(case: VerbCase, error: type[BaseException]) -> None:
    x, whole = case.inputs(), seeded_model(case)
    total = lines_of(lambda: case.apply(whole))
    after = Snapshot.of(whole, x)
    for at in spread(total):
        model = seeded_model(case)
        before, grad = Snapshot.of(model, x), torch.is_grad_enabled()
        with suppress(error), interrupted(at, error("stop")):
            case.apply(model)
        torch.set_grad_enabled(grad)  # torch's no_grad itself may be interrupted
        found = Snapshot.of(model, x)
        if found.classes == before.classes and _equal(found, before) and found.hooks == before.hooks:
            assert_restored(before, found)
        else:
            assert found.classes == after.classes, f"between, at line {at} of {total}"
            assert _equal(found, after), f"between, at line {at} of {total}"
            assert found.hooks == after.hooks


def _equal(one: Snapshot, other: Snapshot) -> bool:
    """Whether two models have equal state, though other objects."""
    keys = [key for key, _ in one.state] == [key for key, _ in other.state]
    return keys and all(torch.equal(a, b) for (_, a), (_, b) in zip(one.state, other.state, strict=True))


def check_undo(case: VerbCase, error: type[BaseException]) -> None:
    """A second call finishes what the first began."""
    x = case.inputs()
    whole = model_of(case)
    edited = case.apply(whole)
    total = lines_of(edited.undo_)
    for at in spread(total):
        model = model_of(case)
        before = Snapshot.of(model, x)
        edited = case.apply(model)
        after = Snapshot.of(model, x)
        with suppress(error), interrupted(at, error("stop")):
            edited.undo_()
        found = Snapshot.of(model, x)
        assert_before_or_after(found, before, after)
        with suppress(UndoError):  # it had been finished
            edited.undo_()
        assert_restored(before, Snapshot.of(model, x))


# A trace function at every line is slow: the usual run takes a verb of each kind, the slow one all.
_QUICK = ("init_", "fold_", "hold_ learned magnitudes", "release_", "swap_ decoupled", "parametrize_ Orthogonal")
_CASES = [pytest.param(c, id=c.name, marks=() if c.name in _QUICK else (pytest.mark.slow,)) for c in VERBS]


@pytest.mark.parametrize("case", _CASES)
def test_an_interrupted_verb(case: VerbCase) -> None:
    check_verb(case, KeyboardInterrupt)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
@pytest.mark.parametrize("case", _CASES)
def test_an_interrupted_undo(case: VerbCase, error: type[BaseException]) -> None:
    check_undo(case, error)


def test_the_law_refuses_an_undo_that_consumes_its_log() -> None:
    class Consuming:
        def __init__(self, edit: Any) -> None:
            self._edit, self.changes = edit, edit.changes

        def undo_(self) -> None:
            inverses = self._edit._inverses
            while inverses:
                inverse = inverses.pop()
                Edit.overwrite_(torch.zeros(1), torch.zeros(1))  # a line of gonio in which to stop
                inverse()

    def doubled(model: nn.Module) -> Any:
        with Edit(model, "doubled_") as edit:
            for index in (0, 2):
                edit.set_data_(model[index].weight, 2 * model[index].weight)
                edit.changed(str(index), "twice")
        return Consuming(edit)

    case = VerbCase(
        name="doubled_",
        model=lambda: nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)),
        inputs=lambda: seeded(2, 4),
        apply=doubled,
    )
    with pytest.raises(AssertionError, match="has other values after undo"):
        check_undo(case, KeyboardInterrupt)
