"""From a task's name on the command line to its data."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gonio.compare.task import Task
from gonio.compare.tasks.digits import digits
from gonio.errors import InvalidArgumentError, UnknownNameError
from gonio.models.user_code import is_user_code, load_function

__all__ = ["BUILT_IN", "resolve"]

BUILT_IN: Mapping[str, Callable[[], Task]] = {"digits": digits}


def resolve(spec: str) -> Task:
    """The task behind a name.

    Args:
        spec: a built-in name, or `file.py:factory`, where the factory takes nothing and returns a
            :class:`~gonio.compare.Task`.

    Raises:
        UnknownNameError: no such task; gives the closest names.
        InvalidArgumentError: the file or function is missing, or builds something else.

    Example:
        >>> len(gonio.compare.tasks.resolve("digits").train)
        200
    """
    if not is_user_code(spec):
        if spec not in BUILT_IN:
            raise UnknownNameError("task", spec, [*BUILT_IN, "file.py:factory"])
        return BUILT_IN[spec]()
    task = load_function(spec)()
    if not isinstance(task, Task):
        raise InvalidArgumentError(
            f"{spec!r} must build a task", f"a {type(task).__name__}", "Return a gonio.compare.Task."
        )
    return task
