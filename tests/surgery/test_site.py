from __future__ import annotations

import torch
from torch import nn

from gonio.surgery import sites


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


def test_paths_leave_out_what_wrappers_add():
    model = nn.Sequential(nn.Linear(2, 2))
    assert paths(torch.compile(model, backend="eager")) == ["", "", "0"]
    assert paths(nn.DataParallel(model)) == ["", "", "0"]


def test_a_child_called_module_keeps_its_name():
    model = nn.ModuleDict({"module": nn.ModuleDict({"encoder": nn.Linear(2, 2)})})
    assert paths(model) == ["", "module", "module.encoder"]


def test_depth_is_no_problem():
    model = nn.Sequential(nn.Linear(2, 2))
    for _ in range(3000):
        model = nn.Sequential(model)
    assert len(sites(model)) == 3002


def test_a_module_that_contains_itself_ends():
    model = nn.Sequential(nn.Linear(2, 2))
    model.add_module("again", model)
    assert paths(model) == ["", "0"]
