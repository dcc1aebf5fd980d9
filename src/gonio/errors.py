"""Every exception of the library.

Each class takes the values that went wrong and composes its own message from them, always in the
same order: what was asked, what was found, what to do. Callers catch :class:`GonioError` for all of
them, or the built-in class that a user would expect (`ValueError`, `KeyError`, `ImportError`, …).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

__all__ = [
    "AlreadyAppliedError",
    "GonioError",
    "Interrupted",
    "InvalidArgumentError",
    "MissingExtraError",
    "NoActivationError",
    "NoMatchError",
    "NotApplicableError",
    "PlanChangedError",
    "RecipeError",
    "SecondDerivativeError",
    "StudyError",
    "StudyLockedError",
    "UnknownNameError",
    "UnmatchedRuleError",
    "UnreadableFileError",
    "UnsetStateError",
    "UntrainedParametersError",
]


class GonioError(Exception):
    """Base class of every error that gonio raises on purpose."""


def closest(name: str, known: Iterable[str], *, count: int = 3) -> list[str]:
    """The names most like `name`, best first.

    Example:
        >>> closest("Orthogonalty", ["L2", "Orthogonality", "SRIP"])
        ['Orthogonality']
    """
    folded = {k.casefold(): k for k in known}
    found = difflib.get_close_matches(name.casefold(), folded, n=count, cutoff=0.5)
    return [folded[f] for f in found]


def listing(names: Sequence[str], *, limit: int = 12) -> str:
    """Names as one comma-separated phrase, cut at `limit`.

    Example:
        >>> listing(["a", "b", "c"], limit=2)
        'a, b and 1 more'
    """
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


class InvalidArgumentError(GonioError, ValueError):
    """An argument has a value that the function cannot work with."""

    def __init__(self, asked: str, found: str, do: str) -> None:
        super().__init__(f"{asked}; found {found}. {do}")


class UnknownNameError(GonioError, KeyError):
    """A name is not in the closed list of names of its kind."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        known = sorted(known)
        near = closest(name, known)
        hint = f"Did you mean {listing(near)}?" if near else f"Known: {listing(known, limit=40)}."
        self.message = f"there is no {kind} named {name!r}. {hint}"
        super().__init__(self.message)

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return self.message


class NoMatchError(GonioError, ValueError):
    """A `where` selected no module that the edit can act on."""

    def __init__(self, verb: str, where: str, candidates: Sequence[str], *, refused: Sequence[str] = ()) -> None:
        near = closest(where, candidates)
        if refused:
            found = f"it selects {listing(refused)}, on which {verb} cannot act"
        else:
            found = "it selects no module at all"
        can = (
            f"{verb} can act on: {listing(list(candidates))}"
            if candidates
            else f"{verb} can act on no module of this model"
        )
        hint = f" Did you mean {listing(near)}?" if near else ""
        super().__init__(f"{verb} was asked for where={where}; {found}. {can}.{hint}")


class AlreadyAppliedError(GonioError, ValueError):
    """The same edit already is in force on a module."""

    def __init__(self, verb: str, path: str, found: str) -> None:
        super().__init__(
            f"{verb}: cannot change {path!r}; found {found} there already. "
            f"Undo that edit first, or exclude the module in `where`."
        )


class NotApplicableError(GonioError, ValueError):
    """An operation is not possible on a module or tensor; says on which and why.

    `action` is the verb of the sentence ("replace", "fold"), and `kind` the class of the layer at `path`.
    """

    def __init__(self, asked: str, path: str, why: str, do: str, *, action: str = "", kind: str = "") -> None:
        if action:
            layer = f"layer {path!r}{f' ({kind})' * bool(kind)}" if path else "the model"
            super().__init__(f"{asked}: cannot {action} {layer}: {why}. {do}")
        else:
            super().__init__(f"{asked} was asked for {path!r}; {why}. {do}")


class MissingExtraError(GonioError, ImportError):
    """A part of gonio needs an optional package that is not installed.

    `extra` brings it; None for a package that no extra of gonio brings.
    """

    def __init__(self, what: str, package: str, extra: str | None) -> None:
        brought = package if extra is None else f"'gonio[{extra}]'"
        super().__init__(
            f"{what} needs the package {package!r}, which is not installed. Install it with: pip install {brought}",
            name=package,
        )


class RecipeError(GonioError, ValueError):
    """A recipe says something that it cannot say; carries every problem of the file at once.

    Attributes:
        origin: the file, or the recipe's name.
        problems: one sentence each, beginning with file and line.
    """

    def __init__(self, origin: str, problems: Sequence[str]) -> None:
        self.origin = origin
        self.problems = tuple(problems)
        head = f"{origin} has {len(self.problems)} problems:\n" if len(self.problems) > 1 else ""
        # Not super(): UnmatchedRuleError also is a NoMatchError, whose constructor takes other values.
        GonioError.__init__(self, head + "\n".join(self.problems))

    def __reduce__(self) -> tuple[type[RecipeError], tuple[str, tuple[str, ...]]]:
        return type(self), (self.origin, self.problems)


class ConfigError(GonioError, ValueError):
    """A configuration file says something that it cannot say; carries every problem of the file at once.

    Attributes:
        path: the file.
        problems: one sentence each.
    """

    def __init__(self, path: str, problems: Sequence[str]) -> None:
        self.path, self.problems = path, tuple(problems)
        lines = "\n".join(f"  {problem}" for problem in self.problems)
        super().__init__(f"the configuration {path!r} was to be read; it cannot be used:\n{lines}\nCorrect the file.")

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, tuple[str, ...]]]:
        return type(self), (self.path, self.problems)


class UnmatchedRuleError(RecipeError, NoMatchError):
    """A rule of a recipe takes no module of the model."""


class StudyError(GonioError):
    """A study's folder cannot be used: absent, unreadable, or of a newer version of gonio."""

    def __init__(self, path: str, found: str, do: str) -> None:
        super().__init__(f"the study {path!r} was asked for; {found}. {do}")


class StudyLockedError(StudyError):
    """Another process is running the same study."""

    def __init__(self, path: str, holder: str) -> None:
        found = f"{holder} is running it" if holder else "another process is running it"
        super().__init__(path, found, "Wait until it ends, or use another folder.")


class PlanChangedError(StudyError):
    """A study was planned otherwise than the command that should continue it.

    Attributes:
        changes: (key, the study's value, the command's value) for each key that differs.
    """

    def __init__(self, path: str, changes: Sequence[tuple[str, str, str]]) -> None:
        self.changes = tuple(changes)
        rows = "; ".join(f"{key} is {old} in the study and {new} in the command" for key, old, new in changes)
        do = (
            "Repeat the study's own values to resume it, or name a new folder to start another one. "
            "Only seeds and recipes can be added to a study that exists."
        )
        super().__init__(path, rows, do)


class Interrupted(GonioError):
    """The process was asked to terminate; what was finished is stored, and the same command goes on."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} was interrupted. Every finished run is kept; run the same command again to go on.")


class UnsetStateError(GonioError, RuntimeError):
    """A parametrization was materialised from the meta device and never given values."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"the weight of a layer with {what} was asked for; its state holds whatever the memory held, "
            f"because it was allocated by to_empty() and never set. "
            f"Call reset_parameters() of every module, or load a state dict."
        )


class UntrainedParametersError(GonioError, RuntimeError):
    """An optimizer takes a step that trains a layer without the parameters that an edit added to it."""

    def __init__(self, verb: str, names: Sequence[str]) -> None:
        super().__init__(
            f"optimizer.step(): {listing(names, limit=4)}, which {verb} added, {'are' if len(names) > 1 else 'is'} in "
            f"no optimizer that has taken a step, and would stay untrained. Pass optimizer= to {verb}, or build the "
            f"optimizer after it. If another optimizer has them, let it step first. requires_grad_(False) freezes them."
        )


class NoActivationError(GonioError, RuntimeError):
    """A penalty on layer outputs was asked for, but it has not seen what it would be computed from."""

    def __init__(self, paths: Sequence[str], found: str, do: str) -> None:
        super().__init__(f"penalty() reads the outputs of {listing(list(paths))}; {found}. {do}")


class UnreadableFileError(GonioError, ValueError):
    """A file is damaged, is not what its name says, or holds more than data."""

    def __init__(self, path: str, found: str, do: str) -> None:
        super().__init__(f"the file {path!r} was to be read; {found}. {do}")


class SecondDerivativeError(GonioError, RuntimeError):
    """A second derivative was asked of something that is differentiable once."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(
            f"a second derivative of {what} was asked for; it is once_differentiable, because {why}. "
            f"Keep it out of what is differentiated twice, for example by adding its gradient after the backward."
        )
