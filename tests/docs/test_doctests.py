"""Every example of a docstring in the library runs and prints what it says."""

from __future__ import annotations

import doctest
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import gonio
from gonio.errors import MissingExtraError

SOURCE = Path(gonio.__file__).parent
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
NAMES = {"torch": torch, "nn": nn, "F": functional, "gonio": gonio}


def modules() -> Iterator[str]:
    for path in sorted(SOURCE.rglob("*.py")):
        if ">>> " in path.read_text(encoding="utf-8"):
            parts = path.relative_to(SOURCE.parent).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def examples(name: str) -> list[doctest.DocTest]:
    """The docstrings of a module that hold examples; each runs in a copy of the module's names."""
    try:
        module = importlib.import_module(name)
    except MissingExtraError as error:
        pytest.skip(str(error))
    found = doctest.DocTestFinder().find(module, name, extraglobs=NAMES)
    return [test for test in found if test.examples]


def failures(test: doctest.DocTest) -> str:
    report: list[str] = []
    runner = doctest.DocTestRunner(verbose=False, optionflags=FLAGS)  # by default as pytest's -v
    runner.run(test, out=report.append, clear_globs=False)
    return "".join(report)


@pytest.mark.parametrize("name", list(modules()))
def test_examples_of(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # an example may write a file
    found = examples(name)
    assert found, f"{name} holds >>> outside of its docstrings"
    failed = []
    for test in found:
        torch.manual_seed(0)
        failed.append(failures(test))
    assert not any(failed), "\n".join(failed)


def test_a_wrong_example_is_found() -> None:
    test = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "control", None, 0)
    assert "Expected:\n    3\nGot:\n    2" in failures(test)
