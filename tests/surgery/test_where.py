"""Selectors, and the modules of a model that they select."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gonio.errors import InvalidArgumentError, NoMatchError
from gonio.surgery import Everything, OfType, Path, Predicate, Regex, as_selector, select, sites

LINEAR, CONV = nn.Linear(2, 2), nn.Conv2d(1, 1, 1)


@pytest.mark.parametrize(
    ("where", "path", "module", "expected"),
    [
        (None, "anything", LINEAR, True),
        (nn.Linear, "fc", LINEAR, True),
        (nn.Linear, "fc", CONV, False),
        ((nn.Linear, nn.Conv2d), "c", CONV, True),
        ("layer1.*", "layer1.0.conv", CONV, True),
        ("layer1", "layer1.0", CONV, False),
        ("layer[34].*", "layer4.1", CONV, True),
        ("re:layer[34]", "layer4", CONV, True),
        ("re:layer[34]", "layer4.1", CONV, False),  # the whole path must match
        ("type:Conv2d", "c", CONV, True),
        ("type:_ConvNd", "c", CONV, True),  # base classes count, as with isinstance
        ("type:Conv1d", "c", CONV, False),
        (lambda path, module: path.endswith("c"), "a.c", LINEAR, True),
        (OfType(nn.Linear) & ~Path("head"), "head", LINEAR, False),
        (OfType(nn.Linear) & ~Path("head"), "body", LINEAR, True),
        (Path("a") | Path("b"), "b", LINEAR, True),
        (Path("a") | nn.Linear, "z", LINEAR, True),
        (~(Path("a") | Path("b")), "a", LINEAR, False),
    ],
)
def test_where_selects(where, path, module, expected):
    assert as_selector(where)(path, module) is expected


def test_a_selector_reads_as_it_was_written():
    text = str(as_selector(nn.Conv2d) & ~(Path("conv1") | Regex("stem.*")))
    assert text == "type:Conv2d & ~(conv1 | re:stem.*)"
    assert str(~(Path("a") & Path("b"))) == "~(a & b)"
    assert str(Everything()) == "every module"
    assert "wide" in str(Predicate(wide))


def wide(path, module):
    return True


@pytest.mark.parametrize(
    ("where", "message"),
    [
        *[(where, "where takes a module class, a glob") for where in (3, object(), int, ["a"])],
        ("re:layer[3", r"'layer\[3'.*unterminated character set"),
        ("type:nn.Conv2d", "takes the name of a class"),
    ],
)
def test_a_where_that_is_no_selector_is_refused(where, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        as_selector(where)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("9", r"where=9 selects no module\. Suitable modules: 0"),
        (nn.ReLU, r"it selects only 1 \(no weight\)"),
        ("Linear", r"where='Linear', a glob over paths \(for the class write 'type:Linear'\)"),
    ],
)
def test_nothing_suitable_says_what_there_is(where, message: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with pytest.raises(NoMatchError, match=message):
        select(model, where, verb="demo_", can_act=lambda m: None if isinstance(m, nn.Linear) else "no weight")


def paths(model):
    return [site.path for site in sites(model)]


def test_modules_come_once_in_registration_order():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2)), nn.Tanh())
    assert paths(model) == ["", "0", "1", "1.0", "1.1", "2"] == [name for name, _ in model.named_modules()]


def test_a_tied_module_is_one_site_with_all_its_owners():
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared), "c": nn.ReLU()})
    (site,) = [s for s in sites(model) if s.module is shared]
    assert site.path == "a"
    assert site.aliases == ("b.0",)
    assert [(parent, name) for parent, name in site.owners] == [(model, "a"), (model["b"], "0")]


def test_a_module_inside_a_tied_container_has_one_owner():
    block = nn.Sequential(nn.Linear(2, 2))
    model = nn.Sequential(block, block)
    (site,) = [s for s in sites(model) if isinstance(s.module, nn.Linear)]
    assert site.owners == ((block, "0"),)  # replacing it there replaces it under both names


def test_paths_leave_out_what_wrappers_add_and_nothing_else() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    assert paths(torch.compile(model, backend="eager")) == paths(nn.DataParallel(model)) == ["", "", "0"]
    named = nn.ModuleDict({"module": nn.ModuleDict({"encoder": nn.Linear(2, 2)})})
    assert paths(named) == ["", "module", "module.encoder"]


def test_depth_is_no_problem():
    model = nn.Sequential(nn.Linear(2, 2))
    for _ in range(3000):
        model = nn.Sequential(model)
    assert len(sites(model)) == 3002


def test_a_module_that_contains_itself_ends():
    model = nn.Sequential(nn.Linear(2, 2))
    model.add_module("again", model)
    assert paths(model) == ["", "0"]
