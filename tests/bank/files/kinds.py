"""Tensors of kinds and dtypes that are rare: figures, or one reason; in state dicts, in files and in models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bank.files.case import Case, File, normal, stored
from foreign import torchvision

REST = {"rest.weight": normal(8, 6, seed=9), "rest.bias": torch.zeros(8)}
SPARSE, COMPLEX = "filters are not stored whole", "complex: angles between complex filters are not defined here"


def kinds(
    weight: Any, said: str = "", *, expected: Tensor | None = None, where: str = "torch", fresh: bool = True
) -> Callable[[Path], File]:
    """A tensor `w.weight` beside an ordinary layer.

    Args:
        said: the reason why it is not read; else `expected` are its values, or it is what it is.
        where: `torch` for a file of torch, `safetensors`, or `memory`.
    """

    def file(folder: Path) -> File:
        value = weight() if callable(weight) else weight
        state = {"w.weight": value, **REST}
        if where == "torch":
            torch.save(state, folder / "model.pt")
        source: Any = stored(folder, state) if where == "safetensors" else state
        source = folder / "model.pt" if where == "torch" else source
        weights = {"rest.weight": REST["rest.weight"].double()}
        if not said:
            plain = value.dequantize() if value.is_quantized else value
            weights["w.weight"] = (plain if expected is None else expected).double()
        return File(source=source, weights=weights, refused={"w.weight": said} if said else {}, fresh=fresh)

    return file


class Doubling(Tensor):
    """A quantised tensor of another library: it says how to get plain numbers."""

    def dequantize(self) -> Tensor:
        return 2 * self.as_subclass(Tensor)


class Opaque(Tensor):
    def dequantize(self) -> Tensor:
        raise RuntimeError("needs its own kernel")


def torchao(folder: Path) -> File:
    torchvision()
    quantization = pytest.importorskip("torchao.quantization")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32))
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    state: Mapping[str, Any] = model.state_dict()
    return File(source=state, weights={"0.weight": state["0.weight"].dequantize().double()}, fresh=False)


def pickled(folder: Path) -> File:
    """A subclass of a tensor that the reader of torch does not know."""
    torch.save({"w.weight": nn.Parameter(normal(4, 3).as_subclass(Doubling))}, folder / "model.pt")
    return File(source=folder / "model.pt", error=r"an object of \S*(Doubling|_rebuild_from_type)|more than tensors")


def nested() -> Tensor:
    return torch.nested.nested_tensor([normal(3, 4), normal(2, 4)], layout=torch.jagged)


def nan() -> Tensor:
    value = normal(6, 5)
    value[1, 2] = torch.nan
    return value


PT, ST, MEM = "torch.save", "safetensors", "state_dict()"
EMPTY = "a single number"

CASES: dict[str, Case] = {
    **{f"{name}, in a file of torch": Case(PT, kinds(normal(8, 6).to(dtype), expected=normal(8, 6).to(dtype)))
       for name, dtype in {"float64": torch.float64, "float16": torch.float16, "bfloat16": torch.bfloat16}.items()},
    **{f"{name}, in safetensors": Case(ST, kinds(normal(8, 6).to(dtype), where="safetensors"))
       for name, dtype in {"double": torch.float64, "half": torch.float16, "brain float": torch.bfloat16}.items()},
    "complex": Case(PT, kinds(torch.complex(normal(4, 3), normal(4, 3, seed=1)), COMPLEX)),
    "complex in safetensors": Case(ST, kinds(torch.complex(normal(4, 3), normal(4, 3)), COMPLEX, where="safetensors")),
    "complex of double precision": Case(
        PT, kinds(torch.complex(normal(4, 3).double(), normal(4, 3).double()), COMPLEX)),
    "complex of half precision": Case(PT, kinds(
        lambda: torch.complex(normal(4, 3), normal(4, 3)).to(torch.complex32), COMPLEX)),
    "a conjugate view": Case(MEM, kinds(torch.complex(normal(4, 3), normal(4, 3)).conj(), COMPLEX, where="memory")),
    "sparse coordinates": Case(PT, kinds(torch.eye(6).to_sparse(), SPARSE)),
    "sparse rows": Case(PT, kinds(lambda: torch.eye(6).to_sparse_csr(), SPARSE)),
    "sparse columns": Case(PT, kinds(lambda: torch.eye(6).to_sparse_csc(), SPARSE)),
    "sparse blocks": Case(PT, kinds(lambda: torch.eye(6).to_sparse_bsr((2, 2)), SPARSE)),
    "sparse in memory": Case(MEM, kinds(torch.eye(6).to_sparse(), SPARSE, where="memory")),
    "nested": Case(MEM, kinds(nested, "nested", where="memory")),
    "meta": Case(MEM, kinds(torch.ones(4, 3, device="meta"), "on the meta device", where="memory")),
    "quantised as a whole": Case("torch", kinds(
        lambda: torch.quantize_per_tensor(normal(8, 6), 0.05, 0, torch.qint8), fresh=False)),
    "quantised by channels": Case("torch", kinds(
        lambda: torch.quantize_per_channel(normal(8, 6), torch.full((8,), 0.05), torch.zeros(8), 0, torch.qint8),
        fresh=False)),
    "a quantised subclass": Case(
        "torchao's kind", kinds(normal(4, 3).as_subclass(Doubling), expected=2 * normal(4, 3), where="memory")),
    "an opaque subclass": Case(
        "torchao's kind", kinds(normal(4, 3).as_subclass(Opaque), "quantised (Opaque), and cannot be", where="memory")),
    "a subclass in a file": Case("torchao's kind", pickled),
    "torchao": Case("torchao", torchao),
    "uint8": Case(PT, kinds(torch.ones(4, 3, dtype=torch.uint8), "uint8: packed or quantised weights")),
    "int8": Case(ST, kinds(torch.ones(4, 3, dtype=torch.int8), "int8: packed", where="safetensors")),
    "int32": Case(PT, kinds(torch.ones(4, 3, dtype=torch.int32), "int32: packed")),
    "int64": Case(PT, kinds(torch.ones(4, 3, dtype=torch.int64), "int64, not weights")),
    "uint16": Case(PT, kinds(torch.ones(4, 3, dtype=torch.uint16), "uint16: packed or quantised weights")),
    "bool": Case(PT, kinds(torch.ones(4, 3, dtype=torch.bool), "bool, not weights")),
    "a number": Case(PT, kinds(torch.tensor(3.0), EMPTY)),
    "no entries": Case(PT, kinds(torch.ones(0, 5), "empty: shape (0, 5)")),
    "six dimensions": Case(PT, kinds(normal(2, 2, 2, 2, 2, 2), "not called a weight")),
    "a transposed view": Case(PT, kinds(normal(6, 8).mT)),
    "a part of a larger tensor": Case(PT, kinds(normal(20, 9)[2:10, ::2])),
    "channels last": Case(PT, kinds(normal(8, 4, 3, 3).to(memory_format=torch.channels_last))),
    "expanded": Case(PT, kinds(normal(6, 1, 1, 3).expand(6, 4, 3, 3))),
    "expanded in memory": Case(
        MEM, kinds(torch.ones(1).expand(10**5, 10**5), "expanded: 10,000,000,000", where="memory", fresh=False)),
    "NaN": Case(PT, kinds(nan, "NaN", fresh=False)),
    "large numbers": Case(PT, kinds(1e30 * normal(8, 6))),
    "small numbers": Case(PT, kinds(1e-10 * normal(8, 6))),
    "an object beside": Case(MEM, lambda _: File(source={**REST, "extra": object()}, weights={
        "rest.weight": REST["rest.weight"].double()})),
}  # fmt: skip
