"""Exceptions of the library.

Each class composes its message from the values passed to it, in the order: problem, what was found, what to
do. All are subclasses of :class:`GonioError`, and most also of the built-in class that fits (`ValueError`,
`KeyError`, `ImportError`, …).
"""

from __future__ import annotations

import copyreg
import difflib
import importlib
import random
import traceback
import warnings
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from pathlib import Path
from types import ModuleType
from typing import Any

from gonio.messages import Message, counted, fixed, joined, say

__all__ = [
    "AlreadyAppliedError",
    "ClaimError",
    "ConfigError",
    "GonioError",
    "GonioWarning",
    "Interrupted",
    "InvalidArgumentError",
    "MissingExtraError",
    "NoActivationError",
    "NoMatchError",
    "NormNotHeldError",
    "NotApplicableError",
    "PendingRecipeError",
    "PlanChangedError",
    "RecipeError",
    "RefusedFileError",
    "SecondDerivativeError",
    "StudyError",
    "StudyLockedError",
    "UndoError",
    "UnknownNameError",
    "UnmatchedRuleError",
    "UnreadableFileError",
    "UnsetStateError",
    "UnsoundStateError",
    "UntrainedParametersError",
]
__dir__ = __all__.copy  # the public names alone


_FEW = 3  # modules that an error names one by one


class GonioError(Exception):
    """Base class of all exceptions of gonio."""

    def __reduce__(self) -> tuple[Any, ...]:
        reduced: Any = super().__reduce__()
        kind, arguments, *state = reduced  # the arguments are the message, not those of the constructor
        return copyreg.__newobj__, (kind, *arguments), *state  # type: ignore[attr-defined]


class GonioWarning(UserWarning):
    """Category of all warnings of gonio: something that was set up had no effect, or an input is damaged."""


def closest(name: str, known: Iterable[str], *, count: int = 3) -> list[str]:
    """The known names most similar to `name`, best first.

    Example:
        >>> closest("Orthogonalty", ["L2", "Orthogonality", "SRIP"])
        ['Orthogonality']
    """
    folded = {k.casefold(): k for k in known}
    found = difflib.get_close_matches(name.casefold(), folded, n=count, cutoff=0.5)
    return [folded[f] for f in found]


def listing(names: Sequence[str], *, limit: int = 12) -> Message:
    """Names as one comma-separated phrase, cut at `limit`.

    Example:
        >>> listing(["a", "b", "c"], limit=2)
        'a, b and 1 more'
    """
    shown = joined(names[:limit])
    return shown if len(names) <= limit else say("{shown} and {more} more", shown=shown, more=len(names) - limit)


def first_line(error: BaseException, longest: int = 200, *, kind: bool = False) -> str:
    r"""The first line of what an exception says, shortened; its type where it says nothing, and before it on request.

    Example:
        >>> from gonio.errors import first_line
        >>> first_line(ValueError("no\nmore")), first_line(RuntimeError()), first_line(ValueError("no"), kind=True)
        ('no', 'RuntimeError', 'ValueError: no')
    """
    name, said = type(error).__name__, str(error).strip().partition("\n")[0]
    said = said if len(said) <= longest else f"{said[: longest - 1]}…"
    return f"{name}: {said}" if kind and said else said or name


def with_place(error: BaseException, longest: int = 2000) -> str:
    """What an exception says, with its type before it and the line that raised it behind it.

    Example:
        >>> from gonio.errors import with_place
        >>> try:
        ...     {}["key"]
        ... except KeyError as error:
        ...     with_place(error).partition(" (")[0]
        "KeyError: 'key'"
    """
    kind, plain = type(error), type(error).__module__ == "builtins" or isinstance(error, GonioError)
    name = kind.__name__ if plain else f"{kind.__module__}.{kind.__qualname__}"
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{f'{name}: {error}'[:longest]} ({Path(where.filename).name}:{where.lineno})"


def cause_of(error: BaseException) -> str:
    """What is wrong, for a reader who knows the file: of an unreadable one without its name and what to do.

    Example:
        >>> from gonio.errors import cause_of
        >>> cause_of(UnreadableFileError("a.npz", "it is empty", "Save it again.")), cause_of(ValueError("no"))
        ('it is empty', 'no')
    """
    return error.found if isinstance(error, UnreadableFileError) else first_line(error, 300)


def with_article(name: str) -> Message:
    """A name with its article, by the sound of its first letter: capitals are spelled.

    Example:
        >>> with_article("int"), with_article("Linear"), with_article("LSTM"), with_article("GRU")
        ('an int', 'a Linear', 'an LSTM', 'a GRU')
    """
    spelled = name[:2].isupper() and len(name) > 1
    if name[:1] in ("AEFHILMNORSX" if spelled else "aeiouAEIOU"):
        return say("an {name}", name=name)
    return say("a {name}", name=name)


class InvalidArgumentError(GonioError, ValueError):
    """An argument has an invalid value."""

    def __init__(self, asked: str, found: str, do: str) -> None:
        super().__init__(say("{asked}; found {found}. {do}", asked=fixed(asked), found=fixed(found), do=fixed(do)))


class ClaimError(InvalidArgumentError):
    """A claim file is invalid, or what it asks for cannot be built."""


class UnknownNameError(GonioError, KeyError):
    """A name is not among the known names of its kind."""

    def __init__(self, kind: str, name: str, known: Iterable[str], *, do: str = "") -> None:
        known = sorted(known)
        near = closest(name, known)
        hint = do and fixed(do)
        if not hint and near:
            hint = say("Did you mean {near}?", near=listing(near))
        hint = hint or say("Known: {known}.", known=listing(known, limit=40))
        self.message = say("there is no {kind} named {name!r}. {hint}", kind=fixed(kind), name=name, hint=hint)
        super().__init__(self.message)

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return self.message


class NoMatchError(GonioError, ValueError):
    """A `where` selects no module to which the verb can be applied; `where` is None where it is left out.

    `refused` has the reason of each selected module by its path, `""` for the model itself.
    """

    def __init__(
        self, verb: str, where: str | None, candidates: Sequence[str], *, refused: Mapping[str, str] | None = None
    ) -> None:
        told: dict[str, str] = {"verb": verb, "refused": _grouped(refused or {})}
        if where is None and not candidates:  # every module was asked for, and none is suitable
            none = say("{verb}: no module of the model is suitable.", **told)
            super().__init__(say("{verb}: no module is suitable; found {refused}.", **told) if refused else none)
            return
        can = say("The model has no suitable module.")
        if candidates:
            can = say("Suitable modules: {names}.", names=listing(list(candidates)))
        if near := closest(where or "", candidates):
            can = joined([can, say("Did you mean {near}?", near=listing(near))], " ")
        told |= {"where": str(where), "can": can}
        none = say("{verb}: where={where} selects no module. {can}", **told)
        only = say("{verb}: where={where} matches no suitable module; it selects only {refused}. {can}", **told)
        super().__init__(only if refused else none)


def _grouped(reasons: Mapping[str, str]) -> Message:
    """Each reason once, with the modules that it is of: their paths, or the first one and their number."""
    groups: dict[str, list[str]] = {}
    for path, why in reasons.items():
        groups.setdefault(why, []).append(path or say("the model"))
    told = []
    for why, paths in groups.items():
        if len(paths) <= _FEW:
            told.append(say("{paths} ({why})", paths=joined(paths, last=" and "), why=fixed(why)))
        else:
            count = counted(len(paths), "module")
            told.append(say("{count} ({why}; the first is {path})", count=count, why=fixed(why), path=paths[0]))
    return listing(told, limit=8)


class AlreadyAppliedError(GonioError, ValueError):
    """The same edit is already in effect on a module."""

    def __init__(self, verb: str, path: str, found: str) -> None:
        super().__init__(
            say(
                "{verb}: cannot be applied twice to {path!r}; found {found} there already. "
                "Undo that edit first, or exclude the module in `where`.",
                verb=verb,
                path=path,
                found=fixed(found),
            )
        )


class NotApplicableError(GonioError, ValueError):
    """A verb or method cannot be applied to a module, a tensor or the model (`path` is empty).

    `action` is the verb of the sentence ("replace", "fold"), and `kind` the class of the layer at `path`. Without
    `asked`, `path` is the name of what cannot be built or loaded.
    """

    def __init__(self, asked: str, path: str, why: str, do: str, *, action: str = "", kind: str = "") -> None:
        of = f" ({kind})" if kind else ""
        target = say("the model")
        if path:
            target = say("layer {path!r}{of}", path=path, of=of) if action else Message(f"{path!r}{of}")
        told = {"asked": fixed(asked), "target": target, "why": fixed(why), "do": fixed(do)}
        if not asked:
            super().__init__(say("cannot {action} {path!r}: {why}. {do}", action=fixed(action), path=path, **told))
        elif action:
            super().__init__(say("{asked}: cannot {action} {target}: {why}. {do}", action=fixed(action), **told))
        else:
            super().__init__(say("{asked}: cannot be applied to {target}; {why}. {do}", **told))


LEAST, MOST = 1e-19, 1e19  # between them float32 has the square of a number


def check_range(owner: str, **values: float | None) -> None:
    """Refuse finite numbers but 0 whose squares float32 does not have: sums, roots and gradients would not be finite.

    What else a value must be, such as finite or above 0, is for the owner to check.

    Example:
        >>> from gonio.errors import check_range
        >>> check_range("Sphere", radius=1e300)
        Traceback (most recent call last):
        gonio.errors.InvalidArgumentError: Sphere(radius=) is between 1e-19 and 1e+19 in magnitude, so that float32 ...
    """
    for name, value in values.items():
        if value is None or value != value or value in (0, inf, -inf) or LEAST <= abs(value) <= MOST:
            continue
        found = f"{value}" if abs(value) < 1e300 or isinstance(value, float) else "a number of over 300 digits"
        problem = f"{owner}({name}=) is between {LEAST:g} and {MOST:g} in magnitude, so that float32 has its square"
        raise InvalidArgumentError(problem, found, "Pass a value of the usual size.")


class MissingExtraError(GonioError, ImportError):
    """An optional package is not installed.

    `extra` is the extra of gonio that installs it; None if there is no such extra.
    """

    def __init__(self, what: str, package: str, extra: str | None) -> None:
        command = f"pip install {package}"
        if extra is not None:  # double quotes, because Windows' own shell takes single ones for a part of the name
            clone = f'pip install -e ".[{extra}]"'
            command = say("{command} (in a clone: {clone})", command=f'pip install "gonio[{extra}]"', clone=clone)
        super().__init__(
            say(
                "{what} needs the package {package!r}, which is not installed. Install it with: {command}",
                what=fixed(what),
                package=package,
                command=command,
            ),
            name=package,
        )


def import_extra(module: str, what: str, *, package: str, extra: str | None) -> ModuleType:
    """Import a module of an optional package, or say that `what` needs the package and which extra installs it."""
    try:
        return imported(module)
    except ModuleNotFoundError as error:
        raise MissingExtraError(what, package, extra) from error


def imported(module: str) -> ModuleType:
    """Import a module in the middle of a program: what it draws from Python's generator meanwhile is put back.

    rich draws a number when it is imported, and a training that draws its batches or augmentations from this generator
    would be another one.

    Example:
        >>> before = random.getstate()
        >>> imported("gonio.measuring").__name__, random.getstate() == before
        ('gonio.measuring', True)
    """
    before = random.getstate()
    try:
        return importlib.import_module(module)
    finally:
        random.setstate(before)


def warn_renamed(old: str, new: str, *, since: str) -> None:
    """Say at the line that called the caller that a public name has a successor (docs/releasing.md, Deprecation).

    Example:
        >>> with warnings.catch_warnings(record=True) as said:
        ...     warnings.simplefilter("always")
        ...     warn_renamed("gonio.old_", "gonio.new_", since="0.3")
        >>> print(said[0].message)
        gonio.old_ is deprecated since gonio 0.3 and goes in the next minor version; use gonio.new_
    """
    message = f"{old} is deprecated since gonio {since} and goes in the next minor version; use {new}"
    warnings.warn(message, DeprecationWarning, stacklevel=3)


def _indented(problem: str) -> Message:
    return say("  {problem}", problem=fixed(problem))


def _first(problems: Sequence[str], count: int = 50) -> list[str]:
    """The first problems for a message, and how many more there are."""
    more = len(problems) - count
    return [*problems[:count], *([f"and {more} more"] if more > 0 else [])]


class RecipeError(GonioError, ValueError):
    """A recipe is invalid; the message lists all problems.

    Attributes:
        origin: the file, or the recipe's name.
        problems: one sentence each, beginning with file and line.
    """

    def __init__(self, origin: str, problems: Sequence[str]) -> None:
        self.origin = origin
        self.problems = tuple(problems)
        head = f"{origin} has {len(self.problems)} problems:\n" if len(self.problems) > 1 else ""
        lines = _first(self.problems)
        # Not super(): UnmatchedRuleError is also a NoMatchError, whose constructor has other parameters.
        GonioError.__init__(self, head + "\n".join(lines))


class ConfigError(GonioError, ValueError):
    """A configuration file is invalid; the message lists all problems.

    Attributes:
        path: the file.
        problems: one sentence each.
    """

    def __init__(self, path: str, problems: Sequence[str]) -> None:
        self.path, self.problems = path, tuple(problems)
        super().__init__(
            say(
                "the configuration file {path!r} is invalid:\n{lines}\nCorrect the file.",
                path=path,
                lines=joined([*map(_indented, _first(self.problems))], "\n"),
            )
        )


class UnmatchedRuleError(RecipeError, NoMatchError):
    """A rule of a recipe selects no module of the model."""


class StudyError(GonioError):
    """The folder of a study cannot be used: absent, unreadable, or written by a newer version of gonio."""

    def __init__(self, path: str, found: str, do: str) -> None:
        super().__init__(
            say("study {path!r}: cannot be used; {found}. {do}", path=path, found=fixed(found), do=fixed(do))
        )


class StudyLockedError(StudyError):
    """Another process is running the same study."""

    def __init__(self, path: str, holder: str) -> None:
        found = say("{holder} is running it", holder=holder) if holder else say("another process is running it")
        super().__init__(path, found, "Wait until that process ends, or use another folder.")


class PlanChangedError(StudyError):
    """A command that resumes a study has other settings than the study's plan.

    Attributes:
        changes: (key, value in the study, value in the command) for each key that differs.
    """

    def __init__(self, path: str, changes: Sequence[tuple[str, str, str]]) -> None:
        self.changes = tuple(changes)
        rows = "; ".join(f"{key} is {old} in the study and {new} in the command" for key, old, new in changes)
        do = (
            "Use the values of the study to resume it, or a new folder to start another study. "
            "Only seeds and recipes can be added to an existing study."
        )
        super().__init__(path, rows, do)


class Interrupted(GonioError):
    """The process received SIGTERM; finished runs are stored, and the same command resumes."""

    def __init__(self, what: str) -> None:
        super().__init__(
            say("{what} was interrupted. Finished runs are stored. Rerun the same command to resume.", what=fixed(what))
        )


class UnsetStateError(GonioError, RuntimeError):
    """A parametrization was materialised from the meta device and has no values."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}: cannot compute the weight; its state was allocated by to_empty() and is uninitialised. "
            f"Call reset_parameters() of every module, or load a state dict."
        )


class UntrainedParametersError(GonioError, RuntimeError):
    """An optimizer step would leave out parameters that an edit added to a layer in training."""

    def __init__(self, verb: str, names: Sequence[str]) -> None:
        super().__init__(
            f"optimizer.step(): {listing(names, limit=4)}, which {verb} added, {'are' if len(names) > 1 else 'is'} in "
            f"no optimizer that has taken a step, and would stay untrained. Pass optimizer= to {verb}, or build the "
            f"optimizer after it. If another optimizer has them, let it step first. requires_grad_(False) freezes them."
        )


class NormNotHeldError(GonioError, RuntimeError):
    """A weight that `hold_` holds has another norm: something else than an observed step changed it."""

    def __init__(self, weight: str, found: str, do: str) -> None:
        super().__init__(f"hold_: the norm of {weight} is not held; {found}. {do}.")


class PendingRecipeError(GonioError, RuntimeError):
    """An optimizer trains a model whose recipe names an optimizer or a hold and has not got it."""

    def __init__(self, recipe: str, found: str) -> None:
        super().__init__(
            f"optimizer.step(): the recipe {recipe!r} acts on the optimizer's steps; found {found}, which was not "
            f"handed over to it. Call applied.hold_(optimizer) first, or use the one of applied.make_optimizer()."
        )


class NoActivationError(GonioError, RuntimeError):
    """A penalty on layer outputs has no outputs to be computed from."""

    def __init__(self, paths: Sequence[str], found: str, do: str) -> None:
        super().__init__(f"penalty(): cannot read the outputs of {listing(list(paths))}; {found}. {do}")


class UnreadableFileError(GonioError, ValueError):
    """A file is damaged, of another format than its name says, or contains more than data.

    Attributes:
        found: what is wrong with it, without its name and what to do.
    """

    def __init__(self, path: str, found: str, do: str) -> None:
        self.found = found
        super().__init__(
            say("file {path!r}: cannot be read; {found}. {do}", path=path, found=fixed(found), do=fixed(do))
        )


class RefusedFileError(UnreadableFileError):
    """The system does not let a file be read, which says nothing of its content."""


class UnsoundStateError(GonioError, ValueError):
    """A state dict that is about to be saved has findings."""

    def __init__(self, found: str) -> None:
        super().__init__(
            f"check_before_save: the state dict was not saved; {found}. "
            f"Restore the last good state, or pass action='warn'."
        )


class SecondDerivativeError(GonioError, RuntimeError):
    """A second derivative of a function that is differentiable only once."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(
            f"the second derivative of {what} is not available, because {why}. "
            f"Exclude it from functions that are differentiated twice, for example add its gradient after backward()."
        )


class UndoError(GonioError, RuntimeError):
    """An edit cannot be undone: it was undone already, or the model was changed since."""

    def __init__(self, verb: str, found: str) -> None:
        super().__init__(f"undo_: cannot undo {verb}; {found}. Undo the latest change first, each edit once.")
