"""Torch files with objects of any class, and modules saved whole: read as data, whatever their classes are."""

from __future__ import annotations

import functools
import sys
import types
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gonio
from gonio.errors import UnreadableFileError
from gonio.measuring.reading import pickles
from gonio.measuring.reading.torch_files import load_torch, state_of_torch


class Kind(Enum):
    FAST = 1


class Net(nn.Module):
    """Buffers of both kinds, shared weights, an own list, and no child."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(3))
        self.head = nn.Linear(8, 12)
        self.head.weight = self.table.weight
        self.scales = nn.ParameterList([torch.ones(3), torch.ones(2)])
        self.register_buffer("kept", torch.ones(2))
        self.register_buffer("passing", torch.ones(2), persistent=False)
        self.register_parameter("absent", None)
        self.rest, self.act = None, nn.functional.relu


@pytest.fixture(name="abroad")
def module_of_others(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module with the classes of a trainer; it can be imported while a file is saved."""
    module = types.ModuleType("abroad")
    made: dict[str, Any] = {"Net": Net, "Metric": object, "Settings": dict, "Names": list}
    for name, base in made.items():
        setattr(module, name, type(name, (base,), {"__module__": "abroad"}))
    monkeypatch.setitem(sys.modules, "abroad", module)
    return module


def gone() -> None:
    """From here on no class of it can be imported."""
    del sys.modules["abroad"]


def test_a_module_that_was_saved_whole_has_the_state_of_its_state_dict(
    abroad: types.ModuleType, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    net = abroad.Net()
    path, expected = tmp_path / "net.pt", net.state_dict()
    torch.save(net, path)
    gone()
    state = load_torch(path)
    assert list(state) == list(expected)
    for name, value in expected.items():
        assert state[name].dtype == value.dtype
        assert torch.equal(state[name], value)
    assert state["head.weight"].data_ptr() == state["table.weight"].data_ptr()
    said = "an object of abroad.Net is read as its parameters and buffers, without its code"
    found, checked = gonio.measure(path), gonio.check(path)
    assert said in found.notes
    assert said in checked.notes
    assert checked.intact
    assert {row.name: row.norm_mean for row in found.layers} == {
        row.name: row.norm_mean for row in gonio.measure(expected).layers
    }


@pytest.mark.parametrize("key", ["model", "state_dict", "ema"])
def test_a_module_in_a_checkpoint_is_its_state(abroad: types.ModuleType, tmp_path: Path, key: str) -> None:
    net = abroad.Net()
    torch.save({key: net, "epoch": 3, "date": "today"}, tmp_path / "a.pt")
    gone()
    found, content = state_of_torch(tmp_path / "a.pt")
    assert (list(found.state), found.place, content["epoch"]) == (list(net.state_dict()), key, 3)
    Net().load_state_dict(found.state)


def test_objects_beside_the_weights_are_named_and_their_classes_are_not_imported(
    abroad: types.ModuleType, tmp_path: Path
) -> None:
    metric = abroad.Metric()
    metric.best, metric.of, metric.own = torch.ones(2), metric, abroad.Metric
    settings = abroad.Settings(rate=0.1, metric=metric, act=nn.functional.gelu)
    settings.note = "an attribute of a subclass of dict"
    content = {
        "state_dict": nn.Linear(6, 4).state_dict(),
        "hyper_parameters": {"settings": settings, "names": abroad.Names([1, 2])},
        "calls": functools.partial(nn.functional.gelu, approximate="tanh"),
    }
    torch.save(content, tmp_path / "a.ckpt")
    gone()
    found = gonio.measure(tmp_path / "a.ckpt")
    assert [row.path for row in found.layers] == ["weight"]
    assert any("abroad.Metric" in note and "objects of" in note for note in found.notes)
    assert gonio.check(tmp_path / "a.ckpt").intact
    read = load_torch(tmp_path / "a.ckpt")["hyper_parameters"]
    assert (read["settings"]["rate"], read["names"]) == (0.1, [1, 2])


def test_a_state_dict_of_another_class_of_mappings_is_read(abroad: types.ModuleType, tmp_path: Path) -> None:
    state = nn.Linear(6, 4).state_dict()
    torch.save({"state_dict": abroad.Settings(state)}, tmp_path / "a.pt")
    gone()
    assert all(torch.equal(load_torch(tmp_path / "a.pt")["state_dict"][name], value) for name, value in state.items())


class _Calls:
    def __init__(self, call: tuple[Callable[..., Any], tuple[Any, ...]]) -> None:
        self._call = call

    def __reduce__(self) -> Any:
        return self._call


@pytest.mark.parametrize(
    ("held", "named"),
    [
        (_Calls((exec, ("raise SystemExit",))), "builtins.exec"),
        (_Calls((getattr, (nn.Linear, "forward"))), "builtins.getattr"),
        (Kind.FAST, r"\S*Kind"),
    ],
)
def test_a_call_in_an_object_is_refused_by_its_name(held: Any, named: str, tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    net.extra = held  # type: ignore[assignment]
    torch.save(net, tmp_path / "a.pt")
    with pytest.raises(UnreadableFileError, match=f"an object of {named}"):
        gonio.measure(tmp_path / "a.pt")


def test_objects_without_a_tensor_are_refused_by_their_class(tmp_path: Path) -> None:
    torch.save({"model": types.SimpleNamespace(), "net": _Empty()}, tmp_path / "a.pt")
    with pytest.raises(UnreadableFileError, match=r"an object of \S*_Empty"):
        gonio.check(tmp_path / "a.pt")


class _Empty:
    pass


def test_modules_that_unfold_to_more_than_any_model_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pickles, "MOST_ENTRIES", 1000)
    net: nn.Module = nn.Linear(1, 1)
    for _ in range(60):  # each holds the one before it twice
        net = nn.Sequential(OrderedDict(a=net, b=net))
    torch.save(net, tmp_path / "a.pt")
    with pytest.raises(UnreadableFileError, match="more than 1000 tensors"):
        gonio.check(tmp_path / "a.pt")
