"""What the REPL and a notebook show of public objects: one line, and a table in which foreign names are escaped."""

from __future__ import annotations

import re
from collections.abc import Callable
from inspect import isclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import gonio
from gonio import nn as gnn
from gonio import parametrizations as P
from gonio import regularizers as R
from gonio.errors import InvalidArgumentError
from gonio.escaping import html_table

NAME = "<script>"


def network() -> nn.Module:
    return nn.ModuleDict({NAME: nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4))})


def held() -> Any:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return gonio.hold_(model, optimizer, where=nn.Conv2d, norm="filters", step="fixed")


def plan() -> Any:
    return gonio.Recipe.load("switchable-norm").plan(network())


SHOWN: dict[str, tuple[Callable[[], Any], str]] = {
    "Edited": (lambda: gonio.swap_(network(), gnn.to_group_norm), "<Edited by swap_: 1 module>"),
    "Held": (held, "<Held by hold_: 1 module>"),
    "Penalty": (lambda: gonio.Penalty(network(), [(None, R.L2(1e-4))]), "<Penalty: 1 term, step 0>"),
    "Recipe": (lambda: gonio.Recipe.load("switchable-norm"), "<Recipe switchable-norm: 1 swap rules>"),
    "Plan": (plan, "<Plan of switchable-norm: 1 steps, 1 untouched modules>"),
    "Applied": (
        lambda: gonio.Recipe.load("switchable-norm").apply_(network()),
        "<Applied switchable-norm: 1 changes, 0 penalty terms>",
    ),
    "Results": (
        gonio.lab.showing.example,
        "<Results of example: 24 runs, 0 missing; orthogonal-init: no useful effect; decoupled-tanh: helps>",
    ),
}


@pytest.mark.parametrize(("made", "line"), SHOWN.values(), ids=SHOWN)
def test_what_is_shown(made: Callable[[], Any], line: str) -> None:
    shown = made()
    assert repr(shown) == line
    page = shown._repr_html_()
    assert "<table>" in page
    assert NAME not in page


def test_objects_without_a_table() -> None:
    claim = gonio.lab.claims.load_claim("gain-tanh")
    assert repr(claim) == f"<Claim gain-tanh: {claim.claim}>"
    found = gonio.geometry.near_duplicates(torch.eye(3))
    assert repr(found).startswith("<NearDuplicates: 0 pairs with |cosine| >= 0.95 among 3 vectors")


def test_no_public_object_shows_its_address(tmp_path: Path) -> None:
    """But three: `Edit`, which a verb has while it acts, and the abstract `Selector` and `Schedule`."""
    packages = [gonio, *MODULES]
    public = {name: getattr(package, name) for package in packages for name in package.__all__}
    plainly = {name for name, one in public.items() if isclass(one) and one.__repr__ is object.__repr__}
    assert plainly == {"Edit", "Schedule", "Selector"}
    model = nn.Sequential(nn.Linear(4, 3))
    assert repr(gonio.lab.Run({"name": "<b>"}, seed=3, folder=tmp_path)) == "<Run of <b> with seed 3>"
    study = gonio.lab.Study.create(tmp_path / "s", gonio.lab.make_plan(["orthogonal-init"], seeds=2))
    assert repr(study) == f"<Study {tmp_path / 's'}: baseline, orthogonal-init>"
    assert re.fullmatch(
        r"<Certificate: constant from [\d.]+ to [\d.]+, 1 rows>", repr(gonio.certify(model, example=torch.eye(4)))
    )
    groups = gonio.param_groups(model, weight_decay=1e-4)
    assert repr(groups) == "<ParamGroups: weight decay 0.0001 on 1 tensor, not on 1>"
    assert not hasattr(groups, "_repr_html_"), "a notebook shows the line, not the weights"


def test_a_large_change_is_explained_for_a_fine_tuned_model_and_for_an_adapter() -> None:
    do = gonio.measuring.explain("G502").partition("What to do: ")[2].splitlines()[0]
    assert do.startswith("Check the learning rate; of an adapter also its scale")


def test_lengths_and_truth() -> None:
    """An empty result is a result."""
    empty = gonio.geometry.near_duplicates(torch.eye(3))
    assert len(empty) == 0
    assert empty
    assert len(gonio.geometry.near_duplicates(torch.ones(2, 3))) == 1
    edited = gonio.swap_(network(), gnn.to_group_norm)
    assert len(edited) == len(edited.changes) == 1
    assert len(plan()) == 1


def test_a_recipe_prints_as_its_document() -> None:
    recipe = gonio.Recipe.load("decoupled-tanh")
    assert gonio.Recipe.from_yaml(str(recipe)) == recipe


def test_a_table_escapes_its_cells() -> None:
    page = html_table("<t>", ["<h>"], [["<c>", None]], ["<n>"])
    assert all(f"&lt;{letter}&gt;" in page for letter in "thcn")
    assert page.count("<th>") == 1
    assert page.count("<td>") == 2


MODULES = [value for name in gonio.__all__ if isinstance(value := getattr(gonio, name), ModuleType)]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_completion_shows_public_names_only(module: ModuleType) -> None:
    assert dir(module) == sorted(module.__all__)


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda m: gonio.swap_(m, "GroupNorm"), r"found 'GroupNorm'. Pass a function, such as gonio.nn.to_group_norm"),
        (lambda m: gonio.parametrize_(m, "spectral"), r"found 'spectral'. Pass e.g. SpectralNorm\(\)"),
        (lambda m: gonio.parametrize_(m, P.WeightNorm), r"found the class WeightNorm. Pass WeightNorm\(\)"),
        (lambda m: gonio.Penalty(m, [(None, R.SRIP)]), r"Pass an object with a strength, such as SRIP\(1e-4\)"),
        (lambda m: gonio.Penalty(m, [(None, "L2")]), r"instead of 'L2', such as Orthogonality\(1e-4\)"),
        (lambda m: gonio.Penalty(m, [3]), r"found 3. E.g. \[\(None, L2\(1e-4\)\)\]"),
    ],
)
def test_misuse_says_what_to_pass(misuse: Callable[[nn.Module], Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        misuse(network())
