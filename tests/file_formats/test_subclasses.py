"""Tensor subclasses of torchao in files of `torch.save`, read by their parts without the package."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from bank.files.case import normal
from gonio.errors import UnreadableFileError
from gonio.measuring import measure


class Int8Tensor(torch.Tensor):
    """A tensor without a storage: all that it has are its attributes, as torchao's have."""

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], **_: Any) -> Any:
        return Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bfloat16)

    def __init__(self, shape: tuple[int, ...], **parts: Any) -> None:
        self.__dict__.update(parts)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if function is torch.ops.aten.detach.default else NotImplemented


class AnotherTensor(Int8Tensor):
    """One that is not on the list."""


@pytest.fixture
def torchao(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Modules under whose names the classes are pickled; the reader has none of them."""
    for name in ("torchao", "torchao.quantization"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for kind in (Int8Tensor, AnotherTensor):
        monkeypatch.setattr(kind, "__module__", "torchao.quantization")
        monkeypatch.setattr(sys.modules["torchao.quantization"], kind.__name__, kind, raising=False)
    return monkeypatch


def test_a_subclass_in_a_pickle_is_read_by_its_parts(torchao: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Among them 8-bit floats, which torch pickles by another function, and a class of settings, which is left."""
    codes, scale = (30 * normal(32, 64)).to(torch.int8), torch.rand(32, 1) + 0.5
    floats = (30 * normal(16, 64)).to(torch.float8_e4m3fn)
    plain = normal(8, 4)
    state = {
        "a.weight": Int8Tensor((32, 64), qdata=codes, scale=scale, zero_point=torch.ones(32, 1, dtype=torch.int8)),
        "b.weight": Int8Tensor((16, 64), qdata=floats, scale=scale[:16], kind=torch.int4),
        "c.weight": plain,
    }
    torch.save({"state_dict": state}, tmp_path / "model.pt")
    torchao.undo()
    found = measure(tmp_path / "model.pt")
    expected = {
        "a": (codes.double() - 1) * scale.double(),
        "b": floats.double() * scale[:16].double(),
        "c": plain.double(),
    }
    for name, weight in expected.items():
        assert found[name].status == "measured", found[name].reason
        assert found[name].frobenius == pytest.approx(float(weight.norm()), rel=1e-6)


def test_another_subclass_is_refused_and_none_of_its_code_runs(torchao: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch.save({"a.weight": AnotherTensor((4, 4), qdata=torch.ones(4, 4))}, tmp_path / "model.pt")
    torchao.setattr(Int8Tensor, "__init__", lambda *_, **__: pytest.fail("it was called"))
    with pytest.raises(UnreadableFileError, match=r"tensors of the subclass torchao\.quantization\.AnotherTensor"):
        measure(tmp_path / "model.pt")
