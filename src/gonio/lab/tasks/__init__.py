"""Tasks by name: built-in ones, images on this machine, and the user's own."""

from collections.abc import Callable

from gonio.errors import InvalidArgumentError, UnknownNameError
from gonio.lab.tasks.built_in import bytes_, digits, points
from gonio.lab.tasks.images import fashion_mnist, image_folder, torchvision_dataset
from gonio.lab.tasks.task import Task
from gonio.models.user_code import is_user_code, load_function

__all__ = ["BUILT_IN", "bytes_", "digits", "fashion_mnist", "image_folder", "points", "resolve", "torchvision_dataset"]

BUILT_IN: dict[str, Callable[[], Task]] = {"bytes": bytes_, "digits": digits, "points": points}
_SOURCES: dict[str, Callable[[str], Task]] = {
    "fashion-mnist:FOLDER": fashion_mnist,
    "torchvision:NAME:FOLDER": torchvision_dataset,
    "imagefolder:FOLDER": image_folder,
}


def resolve(spec: str) -> Task:
    """The task with a name.

    Args:
        spec: a built-in name; `torchvision:NAME` or `torchvision:NAME:FOLDER`, a data set of torchvision in
            FOLDER or in `data`; `imagefolder:FOLDER`; `fashion-mnist:FOLDER`; or `file.py:factory`, where the
            factory takes no arguments and returns a :class:`~gonio.lab.Task`.

    Raises:
        UnknownNameError: no such task; gives the closest names.
        InvalidArgumentError: the file, function or data are missing, or the factory returns no task.
        MissingExtraError: a package that the task needs is not installed.

    Example:
        >>> len(gonio.lab.tasks.resolve("digits").train)
        200
    """
    if is_user_code(spec):
        task = load_function(spec)()
        if not isinstance(task, Task):
            raise InvalidArgumentError(
                f"{spec!r} must build a task", f"a {type(task).__name__}", "Return a gonio.lab.Task."
            )
        return task
    source, _, rest = spec.partition(":")
    for form, make in _SOURCES.items():
        if rest and form.startswith(f"{source}:"):
            return make(rest)
    if spec not in BUILT_IN:
        raise UnknownNameError("task", spec, [*BUILT_IN, *_SOURCES, "file.py:factory"])
    return BUILT_IN[spec]()


__dir__ = __all__.copy  # the public names alone
