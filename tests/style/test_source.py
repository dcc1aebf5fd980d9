"""House style of the library's source: what a reviewer would otherwise have to look for."""

from __future__ import annotations

import ast
import re
import statistics
from collections.abc import Callable, Iterator

import pytest

from style.source import ROOT, Source, functions, length, sources

LONGEST_FILE = 400  # about 250 is the aim; above this a file holds more than one concept
LONG_FUNCTION = 30
MEDIAN_FUNCTION = 10

# torch functions that draw numbers and take a generator; Tensor methods end in an underscore.
DRAWS = {"rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson"}
IN_PLACE_DRAWS = {
    "normal_",
    "uniform_",
    "bernoulli_",
    "exponential_",
    "random_",
    "cauchy_",
    "geometric_",
    "log_normal_",
    "trunc_normal_",
}
LIKE_DRAWS = {"rand_like", "randn_like", "randint_like"}  # take no generator at all
SEEDERS = {"manual_seed", "seed", "set_rng_state"}
MODULES = {path.stem for path in (ROOT / "src" / "gonio").glob("*")}


def call_name(node: ast.Call) -> tuple[str, str]:
    """(owner, name) of `owner.name(…)`; the owner of a nested expression is its last attribute."""
    function = node.func
    if isinstance(function, ast.Name):
        return "", function.id
    if not isinstance(function, ast.Attribute):
        return "", ""
    owner = function.value
    return (owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", "?")), function.attr


def global_draws(source: Source) -> Iterator[str]:
    """Calls that would read or seed a global generator."""
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Call):
            continue
        owner, name = call_name(node)
        keywords = {keyword.arg for keyword in node.keywords}
        drawn = (owner == "torch" and name in DRAWS) or name in IN_PLACE_DRAWS
        if drawn and "generator" not in keywords:
            yield f"{source.at(node)}: {owner}.{name} without generator="
        elif owner == "torch" and name in LIKE_DRAWS:
            yield f"{source.at(node)}: torch.{name} takes no generator"
        elif owner in {"random", "numpy", "np"} and name in SEEDERS | DRAWS | {"shuffle", "choice", "random"}:
            yield f"{source.at(node)}: {owner}.{name}"
        elif owner == "torch" and name in SEEDERS:
            yield f"{source.at(node)}: torch.{name}"


def in_function_imports(source: Source) -> Iterator[str]:
    """Imports of the library's own modules inside a function: the usual way of hiding a cycle."""
    for function in functions(source.tree):
        for node in ast.walk(function):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = ["gonio" if node.level else (node.module or "")]
            if any(name.split(".")[0] == "gonio" for name in names):
                yield source.at(node)


def root_imports(source: Source) -> Iterator[str]:
    """`import gonio`, or a name from the root that is no sub-package: the root is above every layer."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import) and any(alias.name == "gonio" for alias in node.names):
            yield source.at(node)
        if isinstance(node, ast.ImportFrom) and node.module == "gonio" and not node.level:
            names = {alias.name for alias in node.names} - MODULES
            if names:
                yield f"{source.at(node)}: {sorted(names)}"


def raises_not_implemented(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Raise):
            names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
            if "NotImplementedError" in names:
                yield source.at(node)


def mutable_defaults(source: Source) -> Iterator[str]:
    for function in functions(source.tree):
        arguments = function.args
        for default in (*arguments.defaults, *(d for d in arguments.kw_defaults if d is not None)):
            if isinstance(default, ast.List | ast.Dict | ast.Set):
                yield source.at(default)


def positional_flags(source: Source) -> Iterator[str]:
    """Public functions with a boolean that a caller can pass without its name; torch's `keepdim` is one."""
    for function in functions(source.tree):
        arguments = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
        defaults = function.args.defaults
        named = dict(zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True))
        flags = [k for k, d in named.items() if isinstance(d, ast.Constant) and isinstance(d.value, bool)]
        if not function.name.startswith("_") and set(flags) - {"keepdim"}:
            yield f"{source.at(function)}: {function.name}"


Search = Callable[[Source], Iterator[str]]


def found(search: Search, *, but: tuple[str, ...] = ()) -> list[str]:
    kept = [source for source in sources() if not source.name.startswith(but)]
    return [hit for source in kept for hit in search(source)]


def test_no_assert() -> None:
    """An assert disappears under -O and its message is no interface."""
    hits = [s.at(n) for s in sources() for n in ast.walk(s.tree) if isinstance(n, ast.Assert)]
    assert not hits, f"raise an error of gonio.errors instead: {hits}"


def test_no_stub() -> None:
    assert not found(raises_not_implemented)


def test_no_self_import_inside_a_function() -> None:
    """The command line is the exception: `--help` must not import torch."""
    assert not found(in_function_imports, but=("src/gonio/cli/",))


def test_no_import_of_the_root() -> None:
    assert not found(root_imports, but=("src/gonio/cli/", "src/gonio/__init__.py"))


def test_the_global_generators_are_not_read() -> None:
    """The runner of studies seeds its own worker processes for user code; it too draws from generators alone."""
    seeding = re.compile(r"src/gonio/compare/\S+: (torch\.(manual_seed|set_rng_state)|(np\.)?random\.seed)$")
    assert not [hit for hit in found(global_draws) if not seeding.match(hit)]


def test_nothing_mutable_is_a_default() -> None:
    assert not found(mutable_defaults)


def test_flags_are_keywords() -> None:
    assert not found(positional_flags, but=("src/gonio/cli/",))  # typer reads options from defaults


def test_future_annotations() -> None:
    """Where functions or classes are defined; a file of re-exports annotates nothing."""
    defining = [s for s in sources() if any(isinstance(n, ast.FunctionDef | ast.ClassDef) for n in s.tree.body)]
    lacking = [s.name for s in defining if "from __future__ import annotations" not in s.text]
    assert not lacking, f"no `from __future__ import annotations` in {lacking}"


def test_functions_are_short() -> None:
    lengths = {s.at(f) + f" {f.name}": length(f) for s in sources() for f in functions(s.tree)}
    percentile = statistics.quantiles(lengths.values(), n=10)[-1]
    longest = sorted(lengths, key=lambda key: -lengths[key])[:10]
    assert percentile <= LONG_FUNCTION, f"90 % are within {percentile} lines; longest: {longest}"
    assert statistics.median(lengths.values()) <= MEDIAN_FUNCTION


def test_files_hold_one_concept() -> None:
    lines = {s.name: s.text.count("\n") for s in sources()}
    long = {name: count for name, count in lines.items() if count > LONGEST_FILE}
    assert not long, f"longer than {LONGEST_FILE} lines: {long}"
    names = {"utils", "helpers", "common", "misc", "util", "helper"}
    assert not [s.name for s in sources() if s.path.stem in names or s.path.parent.name in names]


# --- negative controls ----------------------------------------------------------------------------


def _source(text: str) -> Source:
    return Source(ROOT / "src" / "gonio" / "control.py", text, ast.parse(text))


@pytest.mark.parametrize(
    ("search", "bad", "good"),
    [
        (global_draws, "torch.randn(3)", "torch.randn(3, generator=g)"),
        (global_draws, "x.normal_()", "x.normal_(generator=g)"),
        (global_draws, "nn.init.normal_(w)", "torch.zeros(3)"),
        (global_draws, "torch.rand_like(x)", "torch.zeros_like(x)"),
        (global_draws, "torch.manual_seed(0)", "torch.Generator().manual_seed(0)"),
        (global_draws, "np.random.seed(0)", "np.random.default_rng(0)"),
        (in_function_imports, "def f():\n    from gonio.nn import X", "from gonio.nn import X"),
        (in_function_imports, "def f():\n    from . import x", "def f():\n    import scipy"),
        (root_imports, "from gonio import swap_", "from gonio import nn"),
        (root_imports, "import gonio", "import gonio.nn"),
        (raises_not_implemented, "raise NotImplementedError", "raise ValueError"),
        (mutable_defaults, "def f(*, x=[]): ...", "def f(*, x=()): ..."),
        (positional_flags, "def f(x, y=True): ...", "def f(x, *, y=True): ..."),
    ],
)
def test_the_searches_find_what_they_look_for(search: Search, bad: str, good: str) -> None:
    assert list(search(_source(bad)))
    assert not list(search(_source(good)))


def test_the_docstring_is_not_part_of_the_length() -> None:
    text = 'def f():\n    """One.\n\n    Two.\n    """\n    return 1\n'
    (function,) = functions(ast.parse(text))
    assert length(function) == 2
