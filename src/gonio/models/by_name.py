"""From a model's name to a factory of models: built-in, of timm, torchvision or transformers, or the user's own.

All have random weights; nothing is downloaded. Functions in Python files that the user names as `file.py:function` are
the only user code that is run.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from gonio.errors import InvalidArgumentError, UnknownNameError, closest, listing, with_article
from gonio.measuring.reading.hub import how_to_fetch
from gonio.messages import joined, say
from gonio.models.built_in import BUILT_IN
from gonio.surgery.configured import Configured, configured, load_library, model_class

Found = tuple[Callable[..., nn.Module], Mapping[str, str]]
"""A function that builds models, and its names for `num_classes` and `in_channels`."""


@dataclass(frozen=True)
class ModelFactory:
    """Builds fresh, randomly initialised models of one kind."""

    spec: str  # the name it was resolved from
    function: Callable[..., nn.Module]  # builds one model
    keywords: Mapping[str, str]  # the names of `num_classes` and `in_channels` among the parameters of `function`

    def __call__(self, *, num_classes: int | None = None, in_channels: int | None = None) -> nn.Module:
        """A new model. Sizes for which `function` has no parameter are ignored."""
        sizes = {"num_classes": num_classes, "in_channels": in_channels}
        given = {self.keywords[k]: v for k, v in sizes.items() if v is not None and k in self.keywords}
        model: Any = self.function(**given)
        if not isinstance(model, nn.Module):
            name, kind = self.spec.rpartition(":")[2], type(model).__name__
            found = f"that {name}() returned {with_article(kind)}"
            raise InvalidArgumentError(
                say("{spec!r} must build a model", spec=self.spec), found, "Return a torch.nn.Module."
            )
        return model


def resolve(spec: str) -> ModelFactory:
    """The factory of the model with this name; models have random weights, and nothing is downloaded.

    Args:
        spec: `timm:NAME`, `torchvision:NAME`, `transformers:NAME`, a built-in name, or `file.py:factory`, the
            only form that runs code of the user. The NAME of `transformers:` is a model class (`BertModel`), a
            model type (`bert`), or the path of a `config.json` or of its folder.

    Raises:
        UnknownNameError: for an unknown name; the message has the closest names.
        MissingExtraError: if the library is not installed.
        NotApplicableError: if it is installed but cannot be imported with this torch.
        InvalidArgumentError: if a file, or the function in it, is missing.
        UnreadableFileError: if a `config.json` is damaged.

    Example:
        >>> gonio.models.resolve("digits-cnn")(num_classes=3).fc2.out_features
        3
    """
    source, colon, name = spec.partition(":")
    if is_user_code(spec):
        function = load_function(spec)
    elif spec in BUILT_IN:
        function = BUILT_IN[spec]
    elif colon and source in LIBRARIES:
        return ModelFactory(spec, *LIBRARIES[source](spec, name))
    elif Path(spec).is_file():
        raise InvalidArgumentError(
            "a model is built by a function: a built-in name, timm:NAME or FILE.py:FUNCTION",
            say("the file {spec!r}", spec=spec),
            "Name the function that builds the model.",
        )
    else:
        known = [*BUILT_IN, *(f"{source}:NAME" for source in LIBRARIES)]
        raise UnknownNameError("model", spec, known, do=_elsewhere(spec))
    parameters = inspect.signature(function).parameters
    return ModelFactory(spec, function, {name: name for name in ("num_classes", "in_channels") if name in parameters})


# --- libraries ----------------------------------------------------------------------------------------


def _elsewhere(name: str) -> str:
    """What a name that is not built in may stand for: a model of an installed library, or one on a hub."""
    file, colon, function = name.rpartition(":")
    if colon and function.isidentifier() and not closest(file, LIBRARIES):
        return say(
            "For a function of your own write FILE.py:FUNCTION, e.g. {file}.py:{name}.", file=file, name=function
        )
    if "/" in name or name in {path.name for path in _models_of("transformers") if path.is_dir()}:
        kind = say(" For random weights write transformers:{name}.", name=name) if "/" not in name else ""
        return joined([how_to_fetch(name), kind], "")
    holding = [library for library in ("timm", "torchvision") if name.isidentifier() and _defines(library, name)]
    return f"Did you mean {' or '.join(f'{library}:{name}' for library in holding)}?" if holding else ""


def folders_of(package: str) -> list[Path]:
    """The folders of an installed package, which is not imported: that may take seconds, or run code."""
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # a module that runs without one
        spec = None
    return [Path(folder) for folder in ((spec and spec.submodule_search_locations) or ())]


def _models_of(package: str) -> Iterator[Path]:
    """What lies in the folder of models of an installed package."""
    for folder in folders_of(package):
        with suppress(OSError):
            yield from (folder / "models").iterdir()


def _defines(package: str, name: str) -> bool:
    """Whether one of its files of models has a function of this name."""
    wanted = f"def {name}(".encode()
    return any(wanted in path.read_bytes() for path in _models_of(package) if path.suffix == ".py")


def from_timm(spec: str, name: str) -> Found:
    """The model of timm with this name."""
    timm = load_library("timm", spec)
    if not timm.is_model(name):
        raise UnknownNameError("timm model", name, timm.list_models())
    function = functools.partial(timm.create_model, name, pretrained=False)
    return function, {"num_classes": "num_classes", "in_channels": "in_chans"}


def from_torchvision(spec: str, name: str) -> Found:
    """The model of torchvision with this name."""
    models = load_library("torchvision", spec).models
    if name not in models.list_models():
        raise UnknownNameError("torchvision model", name, models.list_models())
    parts = inspect.signature(models.get_model_builder(name)).parameters.keys() & {"weights", "weights_backbone"}
    return functools.partial(models.get_model, name, **dict.fromkeys(parts)), {"num_classes": "num_classes"}


def from_transformers(spec: str, name: str) -> tuple[Configured, dict[str, str]]:
    """The model of a class (`BertModel`) or type (`bert`) in the library's default sizes, or of a `config.json`."""
    library = load_library("transformers", spec)
    if name and (name.endswith(".json") or "/" in name or Path(name).is_dir()):
        return _sized(*configured(library, spec, Path(name)))
    model = model_class(library, spec, name)
    return _sized(Configured(spec, model, model.config_class), model)


def _sized(found: Configured, model: Any) -> tuple[Configured, dict[str, str]]:
    keywords = {}
    if "Classification" in model.__name__:
        keywords["num_classes"] = "num_labels"
    if hasattr(found.configuration(), "num_channels"):
        keywords["in_channels"] = "num_channels"
    return found, keywords


LIBRARIES: Mapping[str, Callable[[str, str], Found]] = {
    "timm": from_timm,
    "torchvision": from_torchvision,
    "transformers": from_transformers,
}


# --- the user's own Python ------------------------------------------------------------------------------


def is_user_code(spec: str) -> bool:
    """Whether `spec` names a Python file (`file.py:factory`) rather than a built-in.

    Example:
        >>> from gonio.models.by_name import is_user_code
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
        raise InvalidArgumentError(
            say("{spec!r} must name a Python file", spec=spec), str(path), "Give a file that ends in .py."
        )
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_name] = module
    with _neighbours(path):
        module_spec.loader.exec_module(module)
    function = _function(spec, path, name, module)

    @functools.wraps(function)
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
        raise UnknownNameError(say("function in {path}", path=path), name, public)
    function: Any = getattr(module, name)
    if not callable(function):
        found, do = with_article(type(function).__name__), "Name a function that builds it."
        raise InvalidArgumentError(say("{spec!r} must name a function", spec=spec), found, do)
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
        raise InvalidArgumentError(
            problem, say("another module of that name, {found}", found=found), "Rename the file."
        )
    return _function(spec, path, name, module)


def code_digest(spec: str) -> str | None:
    """SHA-256 of the file that `spec` names, with the modules beside it that it imports; None for a built-in name."""
    if not is_user_code(spec):
        return None
    path, _ = _split(spec)
    sha = hashlib.sha256(path.read_bytes())
    for module in sorted(_imported(path, {path.resolve()})):
        sha.update(f"{module.name} ".encode() + module.read_bytes())
    return sha.hexdigest()


def code_digests(*specs: str) -> Mapping[str, str]:
    """The digest of each name that is a file of the user's."""
    return {spec: digest for spec in specs if (digest := code_digest(spec)) is not None}


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
    """The file and the name in it; an error without one of them has the names that the file defines."""
    text, _, name = spec.rpartition(":")
    if not text:
        problem, names = f"{spec!r} must name a function or class in the file", _defined(Path(spec))
        only = names[0] if len(names) == 1 else "NAME"
        do = f"Write {spec}:{only}{f'; it has {listing(names)}' if len(names) > 1 else ''}."
        raise InvalidArgumentError(problem, "no name after it", do)
    path = Path(text)
    if not path.is_file():
        found = f"no file {str(path.absolute())!r}"
        raise InvalidArgumentError(say("{spec!r} names a Python file", spec=spec), found, "Check the path.")
    return path, name
