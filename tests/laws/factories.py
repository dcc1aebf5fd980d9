"""The calls in the library's source that make tensors, for the laws on what torch would choose for them."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from pathlib import Path

import gonio

SOURCE = Path(gonio.__file__).parent
LIBRARY = (
    "editing", "geometry", "init", "measuring", "optim", "parametrizations", "penalty", "regularizers", "surgery"
)  # fmt: skip


def calls_of_torch(names: Collection[str]) -> Iterator[tuple[str, dict[str | None, ast.expr]]]:
    """Where a function of torch with one of these names is called, or bound by `partial`, and its keywords.

    The keyword None stands for `**options`, which may hold any.
    """
    for path in (path for package in LIBRARY for path in sorted((SOURCE / package).rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            bound = isinstance(node.func, ast.Name) and node.func.id == "partial" and bool(node.args)
            made = node.args[0] if bound else node.func
            if not (isinstance(made, ast.Attribute) and made.attr in names):
                continue
            if isinstance(made.value, ast.Name) and made.value.id == "torch":
                where = f"{path.relative_to(SOURCE)}:{node.lineno}: torch.{made.attr}"
                yield where, {word.arg: word.value for word in node.keywords}
