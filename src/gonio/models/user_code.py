"""Functions in Python files that the user names as `file.py:function`: the only user code that is run."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any

from gonio.errors import InvalidArgumentError, UnknownNameError, listing


def is_user_code(spec: str) -> bool:
    """Whether `spec` names a Python file (`file.py:factory`) rather than a built-in.

    Example:
        >>> from gonio.models.user_code import is_user_code
        >>> is_user_code("nets/mine.py:make"), is_user_code("digits-cnn")
        (True, False)
    """
    path, _, _ = spec.rpartition(":")
    return (path or spec).endswith(".py")


def load_function(spec: str) -> Callable[..., Any]:
    """The callable that `path/file.py:name` refers to. Executes the file.

    Modules beside the file can be imported while it is executed and while the function runs.
    """
    path, name = _split(spec)
    # The digest makes the name unique, and registration lets classes of the file be pickled.
    module_name = f"gonio_user_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
    module_spec = importlib.util.spec_from_file_location(module_name, path)
    if module_spec is None or module_spec.loader is None:
        raise InvalidArgumentError(f"{spec!r} must name a Python file", str(path), "Give a file that ends in .py.")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_name] = module
    with _neighbours(path):
        module_spec.loader.exec_module(module)
    function = _function(spec, path, name, module)

    @wraps(function)
    def beside(*arguments: Any, **named: Any) -> Any:
        with _neighbours(path):
            return function(*arguments, **named)

    return beside


@contextmanager
def _neighbours(path: Path) -> Iterator[None]:
    """The folder of the file on the path of imports, for the block."""
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with suppress(ValueError):  # the user's code has changed the path
            sys.path.remove(folder)


def _function(spec: str, path: Path, name: str, module: Any) -> Callable[..., Any]:
    public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    if not hasattr(module, name):
        raise UnknownNameError(f"function in {path}", name, public)
    function: Any = getattr(module, name)
    if not callable(function):
        found, do = f"a {type(function).__name__}", "Name a function that builds it."
        raise InvalidArgumentError(f"{spec!r} must name a function", found, do)
    return function


def load_script(spec: str) -> Callable[..., Any]:
    """The function that `path/file.py:name` refers to, from the module that `python path/file.py` would import.

    The folder of the file is put first on the path and the module has the name of the file, so that
    neighbouring modules can be imported, and its functions can be unpickled in processes that it starts.
    """
    path, name = _split(spec)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module = importlib.import_module(path.stem)
    found = getattr(module, "__file__", None)
    if found is None or Path(found).resolve() != path.resolve():
        problem = f"{spec!r} is imported as {path.stem!r}"
        raise InvalidArgumentError(problem, f"another module of that name, {found}", "Rename the file.")
    return _function(spec, path, name, module)


def accepted(function: Callable[..., Any], names: tuple[str, ...]) -> tuple[str, ...]:
    """The names that are explicit parameters of `function`.

    Example:
        >>> from gonio.models.user_code import accepted
        >>> accepted(lambda num_classes=10: None, ("num_classes", "in_channels"))
        ('num_classes',)
    """
    parameters = inspect.signature(function).parameters
    return tuple(name for name in names if name in parameters)


def code_digest(spec: str) -> str | None:
    """SHA-256 of the file that `spec` names, with the modules beside it that it imports; None for a built-in name."""
    if not is_user_code(spec):
        return None
    path, _ = _split(spec)
    sha = hashlib.sha256(path.read_bytes())
    for module in sorted(_imported(path, {path.resolve()})):
        sha.update(f"{module.name} ".encode() + module.read_bytes())
    return sha.hexdigest()


def _imported(path: Path, known: set[Path]) -> set[Path]:
    """The files in the folder of a file that it imports, directly or through each other."""
    names: set[str] = set()
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # its execution says so
        return set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    folder = path.resolve().parent
    files = [folder / f"{name}.py" for name in names]
    for package in (folder / name for name in names if (folder / name / "__init__.py").is_file()):
        files += package.rglob("*.py")
    found = {file for file in files if file.is_file()} - known
    known |= found
    return found.union(*(_imported(file, known) for file in found))


def _defined(path: Path) -> list[str]:
    """The public functions and classes of a file, which is not run."""
    try:
        body = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return []
    return [n.name for n in body if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and not n.name.startswith("_")]


def _split(spec: str) -> tuple[Path, str]:
    text, _, name = spec.rpartition(":")
    if not text:
        problem, names = f"{spec!r} must name a function or class in the file", _defined(Path(spec))
        do = f"Write {spec}:{names[0] if names else 'NAME'}{f'; it has {listing(names)}' if len(names) > 1 else ''}."
        raise InvalidArgumentError(problem, "no name after it", do)
    path = Path(text)
    if not path.is_file():
        found = f"no file {str(path.absolute())!r}"
        raise InvalidArgumentError(f"{spec!r} names a Python file", found, "Check the path.")
    return path, name
