"""The pages of the reference, from the docstrings, `reference_pictures` and benchmarks/results.

Each public class has a page, but errors, which are described together; so have the verbs of `gonio` and the functions
of `gonio.init`. Other functions are described on the page of their package. A page has what autodoc writes (signature,
formula, shapes, example), the picture, where objects of the class come from, and what it costs.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from inspect import getdoc, isclass, isfunction, ismodule
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

import gonio
from gonio.pages.picture import svg

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]  # for this folder's modules and `benchmarks`

from benchmarks.results import Ratio, path_of, ratio  # noqa: E402
from reference_pictures import PICTURES  # noqa: E402

# Results are tables, whose exports are methods of a base that is not public.
OF_TABLES = "   :inherited-members: Mapping, BaseException\n"


@dataclass(frozen=True)
class Rows:
    """The rows of a result of `benchmarks` that say what a method costs: of some cases, or of one table."""

    topic: str
    cases: tuple[str, ...] = ()
    table: str = ""

    def found(self) -> list[dict[str, Any]]:
        """The rows, in the order of the file; compiled networks are on the page of benchmarks only."""
        rows = _result(self.topic)["rows"]
        return [row for row in rows if (not self.cases or row["case"] in self.cases)
                and self.table in ("", row["table"]) and not row["table"].endswith("-compiled")]  # fmt: skip

    @property
    def floor(self) -> str:
        """What a ratio of 1 is."""
        return str(_result(self.topic).get("floor") or self.found()[0]["floor"]["name"])


@cache
def _result(topic: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path_of(topic).read_text(encoding="utf-8"))
    return found


def steps(*cases: str) -> Rows:
    return Rows("whole_steps", cases)


# What a method costs, by its public name; one with a picture that is not here was not measured.
COSTS: dict[str, Rows] = {
    "gonio.Tracker": Rows("training_dynamics", ("tracker, every 10th step", "tracker, every step")),
    "gonio.hold_": Rows("training_dynamics", ("hold_, free", "hold_, free, filters", "hold_, fixed")),
    "gonio.measure": Rows("measuring", table="models"),
    "gonio.geometry.SignIndex": Rows("sign_index", table="queries"),
    "gonio.init.orthogonal_": Rows("orthogonal_init", table="whole"),
    "gonio.nn.DecoupledConv2d": steps("decoupled (tanh, cosine)"),
    "gonio.nn.DecoupledLinear": Rows("decoupled_linear"),
    "gonio.nn.SwitchableNorm2d": steps("switchable norm"),
    "gonio.parametrizations.Orthogonal": steps("orthogonal"),
    "gonio.parametrizations.OrthogonalConv": Rows("orthogonal_conv"),
    "gonio.parametrizations.SpectralNorm": steps("spectral norm"),
    "gonio.parametrizations.Sphere": steps("sphere"),
    "gonio.parametrizations.WeightNorm": steps("weight norm"),
    "gonio.parametrizations.WeightStandardization": steps("weight standardisation"),
    "gonio.regularizers.ConvOrthogonality": Rows("conv_orthogonality", table="penalty"),
    "gonio.regularizers.Orthogonality": steps("orthogonality, add_grads_"),
    "gonio.regularizers.SRIP": steps("SRIP, add_grads_"),
    "gonio.regularizers.ScaleShift": steps("scale shift, add_grads_"),
    "gonio.regularizers.SelfOrthogonality": steps("self-orthogonality", "self-orthogonality, samples=512"),
}


# --- the public names ------------------------------------------------------------------------------------


def packages() -> dict[str, Any]:
    """Every public package by its name."""
    found = {f"gonio.{name}": getattr(gonio, name) for name in gonio.__all__ if ismodule(getattr(gonio, name))}
    return {"gonio": gonio, **found, "gonio.nn.angular": gonio.nn.angular, "gonio.nn.magnitude": gonio.nn.magnitude}


def members(package: Any) -> dict[str, Any]:
    """The public names of a package by their full name; what `gonio` itself or `gonio.errors` exports is theirs."""
    theirs = () if package is gonio else gonio.__all__
    theirs = theirs if package in (gonio, gonio.errors) else (*theirs, *gonio.errors.__all__)
    names = [name for name in sorted(package.__all__, key=str.lower) if name not in theirs]
    found = {f"{package.__name__}.{name}": getattr(package, name) for name in names}
    return {name: member for name, member in found.items() if not ismodule(member)}


def has_page(package: Any, member: Any) -> bool:
    """Whether a public name has a page of its own."""
    if isclass(member):
        return not issubclass(member, BaseException)
    return isfunction(member) and package in (gonio, gonio.init)


def is_method(member: Any) -> bool:
    """Whether a class is a layer, function, parametrization, regularizer, schedule or optimizer that can be used."""
    kinds = (gonio.nn.angular.Angular, gonio.nn.magnitude.Magnitude, gonio.parametrizations.Parametrization,
             gonio.regularizers.Regularizer, gonio.regularizers.Schedule, nn.Module, torch.optim.Optimizer)  # fmt: skip
    bases = {base for package in packages().values() for one in members(package).values() if isclass(one)
             for base in one.__mro__[1:]}  # fmt: skip
    return isclass(member) and issubclass(member, kinds) and member not in bases and "models" not in member.__module__


def first_line(member: Any) -> str:
    """The first sentence of a docstring; that of its class for a constant, the choices of a type of strings."""
    if get_args(member) and all(isinstance(choice, str) for choice in get_args(member)):
        return "one of " + ", ".join(f"`{choice!r}`" for choice in get_args(member))
    text = re.sub(r":math:`([^`]+)`", r"$\1$", (getdoc(member) or "").partition("\n\n")[0])
    return re.sub(r":\w+:`[~!]?\.?([^`<]+)(?: <[^>]+>)?`", r"`\1`", " ".join(text.split())).replace("|", "\\|")


# --- parts of a page -------------------------------------------------------------------------------------


def picture(name: str) -> str:
    """The figure of a method as SVG in the colours of the page; empty without one."""
    if name not in PICTURES:
        return ""
    drawn = PICTURES[name]()
    shown = re.sub(r"\n+", "\n", str(svg(drawn, width=640, css="figure", legend=True)))
    figure = f'<figure class="gonio">{shown}\n<figcaption>{drawn.title}</figcaption></figure>'
    return f"## Picture\n\n```{{raw}} html\n{figure}\n```\n"


def cost(name: str) -> str:
    """Time and memory of a method as ratios to the step, or the operation, without it."""
    if name not in COSTS:
        return "## Cost\n\nNot measured.\n" if name in PICTURES else ""
    rows = COSTS[name]
    lines = [f"| {cells} |" for row in rows.found() for cells in _cells(row)]
    text = (
        f"Ratios to {rows.floor}. Time is the median of interleaved rounds (quartiles), memory what is newly allocated "
        "at the peak of one call. [How it was measured, and compiled networks](../benchmarks.md)."
    )
    head = ["| case | form | time | peak memory |", "|---|---|--:|--:|"]
    return "\n".join(["## Cost", "", text, "", *head, *lines, ""])


NETWORKS = ("ResNet-18", "digits-network", "transformer")  # whose names are those of tables


def _cells(row: dict[str, Any]) -> Iterable[str]:
    """The cells of each form of gonio in a row."""
    case = f"{row['table']}, {row['case']}" if row["table"] in NETWORKS else row["case"]
    for one in (each for each in row["candidates"] if each["name"].startswith("gonio")):
        form = one["name"].removeprefix("gonio").removeprefix(", ") or "usual"
        floor = row["floor"]["peak_mib"]
        memory = f"×{one['peak_mib'] / floor:.2f}" if floor else f"{one['peak_mib']:.1f} MiB"
        yield f"{case}, {row['mode']} | {form} | ×{ratio(Ratio(**one['wall']))} | {memory}"


def origins(member: Any) -> list[str]:
    """Public functions whose result is of a class, classes with such a part, and classes that are derived from it."""
    found = []
    for package in packages().values():
        for other, one in members(package).items():
            derived = isclass(one) and member in one.__mro__
            if one is not member and (derived or any(_names(member, *result) for result in _results(one))):
                found.append(other)
    return found


def _results(one: Any) -> Iterable[tuple[str, str]]:
    """What a function returns, or the fields, methods and properties of a class hold: types as written, and module."""
    functions = [one] if isfunction(one) else []
    for base in one.__mro__ if isclass(one) else ():
        if base.__module__.startswith("gonio"):
            yield from ((str(text), base.__module__) for text in vars(base).get("__annotations__", {}).values())
            for value in vars(base).values():
                kept = (getattr(value, name, None) for name in ("fget", "func", "__func__"))
                functions += [each for each in (value, *kept) if isfunction(each)]
    yield from ((str(each.__annotations__.get("return", "")), each.__module__) for each in functions)


def _names(member: Any, text: str, module: str) -> bool:
    """Whether a type that is written in a module names a class, and not another one of its name."""
    known = vars(sys.modules[module]).get(member.__name__, member)
    return known is member and re.search(rf"(?<![\w.]){member.__name__}(?!\w)", text) is not None


# --- pages -----------------------------------------------------------------------------------------------


def page_of(package: Any, name: str, member: Any) -> str:
    """The page of one public name."""
    options = OF_TABLES if package in (gonio, gonio.measuring) else ""
    directive = f".. autoclass:: {name}\n   :members:\n{options}" if isclass(member) else f".. autofunction:: {name}\n"
    parts = [
        "---",
        "orphan: true  # in no sidebar: the index and the package link to it",
        "---",
        "",
        f"# {name.removeprefix('gonio.')}",
        "",
        "```{eval-rst}",
        directive + "```",
        "",
        picture(name),
    ]
    found = origins(member) if isclass(member) else []
    if found:
        links = ", ".join(f"{{py:obj}}`~{other}`" for other in found)
        parts += ["## Where it is found", "", f"Returned by, part of, or base of: {links}.", ""]
    return "\n".join([*parts, cost(name), f"Package: [{package.__name__}]({package.__name__}.md).", ""])


def package_page(package: Any) -> str:
    """What a package is, its names with one line each, and what has no page of its own."""
    own = {name: member for name, member in members(package).items() if has_page(package, member)}
    here = {name.rpartition(".")[2] for name in members(package).keys() - own.keys()}
    hidden = [name for name in package.__all__ if name not in here]
    directive = f".. automodule:: {package.__name__}\n   :members:\n   :exclude-members: {', '.join(hidden)}\n"
    text = f"# {package.__name__}\n\n```{{eval-rst}}\n{directive}```\n"
    if own:
        text += "\n".join(["", "## Pages", "", *_rows(own), ""])
    return text


def _rows(found: dict[str, Any]) -> list[str]:
    rows = [
        f"| {{py:obj}}`{name.rpartition('.')[2]} <{name}>` | {first_line(member)} |" for name, member in found.items()
    ]
    return ["| name | what it is |", "|---|---|", *rows]


def index() -> str:
    """Every public name with one line, by package."""
    lines = ["# API reference", ""]
    for name, package in sorted(packages().items()):
        shown = {one: member for one, member in members(package).items() if not one.endswith(".__version__")}
        lines += [f"## [{name}]({name}.md)", "", first_line(package), "", *_rows(shown), ""]
    return "\n".join([*lines, "```{toctree}", ":hidden:", "", *sorted(packages()), "```", ""])


def pages() -> dict[str, str]:
    """Every page of the folder by its name."""
    found = {"index": index()} | {name: package_page(package) for name, package in packages().items()}
    return found | {name: page_of(package, name, member) for package in packages().values()
                    for name, member in members(package).items() if has_page(package, member)}  # fmt: skip
