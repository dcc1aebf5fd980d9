"""`where` in recipes: what every verb takes as text, and the two words `stem` and `classifier`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from gonio.errors import GonioError, NotApplicableError
from gonio.geometry.views import layout_of
from gonio.recipes.document import Location, Problems
from gonio.surgery import Selector, as_selector, sites
from gonio.surgery.graph import trace

__all__ = ["ENDS", "Ends", "Paths", "check_where", "selector"]

ENDS = ("stem", "classifier")
_LONGEST = 500


@dataclass(frozen=True)
class Paths(Selector):
    """Selects modules by their exact paths; says itself as the rule that it came from."""

    paths: frozenset[str]
    said: str

    def __call__(self, path: str, module: nn.Module) -> bool:
        return path in self.paths

    def __str__(self) -> str:
        return self.said


@dataclass(frozen=True)
class Ends:
    """The first and the last layer of a model that have a weight matrix.

    In the order of execution where `torch.fx` can trace the model, otherwise in the order of
    registration, and `assumed` says so.

    Attributes:
        stem: path of the first; None if the model has no weight matrix.
        classifier: path of the last.
        assumed: why the order is only assumed; empty if it is known.
    """

    stem: str | None
    classifier: str | None
    assumed: str = ""

    @classmethod
    def of(cls, model: nn.Module) -> Ends:
        """Find them.

        Example:
            >>> from gonio.recipes.where import Ends
            >>> Ends.of(nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))
            Ends(stem='1', classifier='3', assumed='')
        """
        paths = {id(site.module): site.path for site in sites(model)}
        traced = trace(model)
        order = [paths[id(module)] for _, module, _ in traced.calls() if has_weight_matrix(module)]
        if order:
            return cls(order[0], order[-1])
        order = [site.path for site in sites(model) if has_weight_matrix(site.module)]
        assumed = f"stem and classifier by order of registration: {traced.reason}" if traced.reason else ""
        return cls(order[0], order[-1], assumed) if order else cls(None, None)


def has_weight_matrix(module: nn.Module, tensor: str = "weight") -> bool:
    """Whether the module's tensor is a stack of filters (linear, convolution, embedding, …)."""
    try:
        layout_of(module, tensor)
    except NotApplicableError:
        return False
    return True


def check_where(where: Any, at: Location, problems: Problems) -> bool:
    """Whether a `where` can be understood, before there is a model."""
    if where is None or where in ENDS:
        return True
    if not isinstance(where, str) or not where.strip() or len(where) > _LONGEST:
        problems.add(
            at, f"must be text such as 'layer1.*', 'type:Conv2d', 're:…' or 'stem', or null; found {_cut(where)}"
        )
        return False
    try:
        as_selector(where)
    except GonioError as error:
        problems.add(at, str(error))
        return False
    if where.startswith("re:") and _explodes(where[3:]):
        problems.add(at, f"the pattern {where[3:]!r} repeats a repetition, which can take for ever; write it without")
        return False
    return True


def selector(where: str | None, ends: Ends) -> Selector:
    """The selector of a `where` for the model that `ends` was read from."""
    if where in ENDS:
        path = ends.stem if where == "stem" else ends.classifier
        return Paths(frozenset(() if path is None else (path,)), str(where))
    return as_selector(where)


def _cut(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


def _explodes(pattern: str) -> bool:
    """Whether an unbounded repetition contains another, as in `(a+)+`, which backtracks exponentially."""
    holds = [False]  # per open group: whether it contains an unbounded repetition
    closed = False  # whether the thing just read was a group that does
    position = 0
    while position < len(pattern):
        character = pattern[position]
        repeats = character in "*+" or (character == "{" and "," in pattern[position:].split("}")[0])
        if repeats and closed:
            return True
        closed = False
        if character == "\\":
            position += 1
        elif character == "[":
            position = _end_of_set(pattern, position)
        elif character == "(":
            holds.append(False)
        elif character == ")" and len(holds) > 1:
            closed = holds.pop()
            holds[-1] |= closed
        elif repeats:
            holds[-1] = True
        position += 1
    return False


def _end_of_set(pattern: str, start: int) -> int:
    """Index of the bracket that closes a character set; a bracket right at its start belongs to it."""
    position = start + (2 if pattern[start + 1 : start + 2] == "^" else 1)
    if pattern[position : position + 1] == "]":
        position += 1
    while position < len(pattern) and pattern[position] != "]":
        position += 2 if pattern[position] == "\\" else 1
    return position
