"""Rules of the source that no linter knows: sizes, imports, random numbers, private interfaces."""

from __future__ import annotations

import ast
import re
import statistics
from collections.abc import Callable, Iterator

import pytest

from style.source import ROOT, Source, functions, length, sources

LONGEST_FILE, SHORTEST_FILE = 600, 40
LONGEST_FUNCTION, LONG_FUNCTION = 60, 25
DRAWS = {"rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson"}
IN_PLACE_DRAWS = {f"{name}_" for name in ("normal", "uniform", "bernoulli", "exponential", "random", "trunc_normal")}
NO_GENERATOR = {"rand_like", "randn_like", "randint_like", "manual_seed", "seed", "set_rng_state"}


def calls(source: Source) -> Iterator[tuple[ast.Call, str, str]]:
    """(call, owner, name) of each `owner.name(…)` and `name(…)`."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            function = node.func
            if isinstance(function, ast.Name):
                yield node, "", function.id
            else:
                owner = function.value
                yield node, owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", "?"), function.attr


def global_draws(source: Source) -> Iterator[str]:
    """Calls that read or seed torch's global generator."""
    for node, owner, name in calls(source):
        drawn = (owner == "torch" and name in DRAWS) or name in IN_PLACE_DRAWS
        if drawn and "generator" not in {keyword.arg for keyword in node.keywords}:
            yield f"{source.at(node)}: {owner}.{name} without generator="
        elif owner in {"torch", "random"} and name in NO_GENERATOR:
            yield f"{source.at(node)}: {owner}.{name}"


def inner_imports(source: Source) -> Iterator[str]:
    """Imports of the library's own modules inside a function, the usual way of hiding a cycle."""
    for function in functions(source.tree):
        for node in ast.walk(function):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = ["gonio" if node.level else (node.module or "")]
            if any(name.split(".")[0] == "gonio" for name in names):
                yield source.at(node)


def root_imports(source: Source) -> Iterator[str]:
    """`import gonio`, or a name from the root that is no package: the root is above every layer."""
    packages = {path.stem for path in (ROOT / "src" / "gonio").glob("*")}
    for node in ast.walk(source.tree):
        names = {alias.name for alias in node.names} if isinstance(node, ast.Import | ast.ImportFrom) else set()
        of_root = isinstance(node, ast.ImportFrom) and node.module == "gonio"
        if (isinstance(node, ast.Import) and "gonio" in names) or (of_root and names - packages):
            yield source.at(node)


def introspection(source: Source) -> Iterator[str]:
    """Stack frames and walks over the garbage collector."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and node.attr in {"_getframe", "get_objects", "get_referrers"}:
            yield source.at(node)


def stubs(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Raise) and "NotImplementedError" in ast.dump(node):
            yield source.at(node)


Search = Callable[[Source], Iterator[str]]


def found(search: Search, *, but: tuple[str, ...] = ()) -> list[str]:
    return [hit for source in sources() if not source.name.startswith(but) for hit in search(source)]


def test_random_numbers_come_from_generators() -> None:
    """Only code that runs user code (studies, models built by name) seeds the global generators."""
    allowed = re.compile(r"src/gonio/(lab/|cli/inputs)\S+: (torch\.(manual_seed|set_rng_state)|random\.seed)$")
    assert not [hit for hit in found(global_draws) if not allowed.match(hit)]


def test_imports_are_at_the_top() -> None:
    """The command line is the exception: `--help` must not import torch."""
    assert not found(inner_imports, but=("src/gonio/cli/", "src/gonio/__main__.py"))


def test_nothing_imports_the_root() -> None:
    assert not found(root_imports, but=("src/gonio/cli/", "src/gonio/__init__.py"))


def test_no_frames_and_no_garbage_collector() -> None:
    assert not found(introspection)


def test_no_stubs() -> None:
    assert not found(stubs)


def test_functions_are_short() -> None:
    lengths = {s.at(f) + f" {f.name}": length(f) for s in sources() for f in functions(s.tree)}
    longest = sorted(lengths.items(), key=lambda item: -item[1])[:5]
    assert statistics.quantiles(lengths.values(), n=10)[-1] <= LONG_FUNCTION
    assert longest[0][1] <= LONGEST_FUNCTION, f"longer than {LONGEST_FUNCTION} lines: {longest}"


def test_a_file_is_a_chapter() -> None:
    lines = {s.name: s.text.count("\n") for s in sources()}
    long = {name: count for name, count in lines.items() if count > LONGEST_FILE}
    assert not long, f"longer than {LONGEST_FILE} lines: {long}"
    short = {n: c for n, c in lines.items() if c < SHORTEST_FILE and not n.endswith(("__init__.py", "__main__.py"))}
    assert not short, f"shorter than {SHORTEST_FILE} lines: {short}"
    vague = {"utils", "helpers", "common", "misc", "util", "helper"}
    assert not [s.name for s in sources() if s.path.stem in vague or s.path.parent.name in vague]


def test_no_two_classes_share_a_name() -> None:
    """But two pairs: a magnitude and an angular function, and a magnitude and a parametrization."""
    places: dict[str, list[str]] = {}
    for source in sources():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(source.at(node))
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert {*twice} <= {"Linear", "Sphere"}, twice


# --- negative controls ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("search", "bad", "good"),
    [
        (global_draws, "torch.randn(3)", "torch.randn(3, generator=g)"),
        (global_draws, "x.normal_()", "x.normal_(generator=g)"),
        (global_draws, "torch.rand_like(x)", "torch.zeros_like(x)"),
        (global_draws, "torch.manual_seed(0)", "torch.Generator().manual_seed(0)"),
        (inner_imports, "def f():\n    from gonio.nn import X", "from gonio.nn import X"),
        (inner_imports, "def f():\n    from . import x", "def f():\n    import scipy"),
        (root_imports, "from gonio import swap_", "from gonio import nn"),
        (root_imports, "import gonio", "import gonio.nn"),
        (introspection, "sys._getframe(1)", "sys.version"),
        (introspection, "gc.get_objects()", "gc.collect()"),
        (stubs, "raise NotImplementedError", "raise ValueError"),
    ],
)
def test_each_search_finds_its_pattern(search: Search, bad: str, good: str) -> None:
    path = ROOT / "src" / "gonio" / "control.py"
    assert list(search(Source(path, bad, ast.parse(bad))))
    assert not list(search(Source(path, good, ast.parse(good))))


AUTHORS = {"2001.01275": "Zhang", "2008.02965": "Liu"}  # Ziming Zhang, Ziquan Liu


@pytest.mark.parametrize("paper", AUTHORS)
def test_a_paper_is_cited_with_its_first_author(paper: str) -> None:
    for path in (ROOT / "src").rglob("*.py"):
        lines = path.read_text(encoding="utf-8").splitlines()
        for number in [number for number, line in enumerate(lines) if paper in line]:
            near = " ".join(lines[max(0, number - 2) : number + 1])
            assert f"Z. {AUTHORS[paper]}" in near, f"{path}:{number + 1}"
