"""ONNX: equal figures in each orientation that operators tell, planted damages, changed bytes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import gonio
from file_formats.cases import STATE, assert_equal_figures, codes, fuzz, rows
from gonio.errors import MissingExtraError, UnreadableFileError

onnx = pytest.importorskip("onnx")
helper, TensorProto = onnx.helper, onnx.TensorProto
NAMES = list(STATE)


def model_of(tensors: list[Any], nodes: list[Any]) -> Any:
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, None)
    made = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    return helper.make_model(helper.make_graph(nodes, "g", [value], [made], tensors))


def proto(name: str, value: Tensor) -> Any:
    return onnx.numpy_helper.from_array(value.contiguous().numpy(), name)


def node(operator: str, name: str, *, at: int = 1, **facts: Any) -> Any:
    inputs = ["x", "x"]
    inputs[at] = name
    return helper.make_node(operator, inputs, [f"out.{name}"], **facts)


def turned(name: str) -> list[Any]:
    """A weight stored for an embedding, of which a `Transpose` makes the matrix of a product."""
    return [
        node("Gather", name, at=0),
        helper.make_node("Transpose", [name], [f"{name}.t"], perm=[1, 0]),
        helper.make_node("Identity", [f"{name}.t"], [f"{name}.i"]),
        node("MatMul", f"{name}.i"),
    ]


WAYS: dict[str, tuple[bool, Callable[[str], list[Any]]]] = {
    "Gemm of the transpose": (False, lambda name: [node("Gemm", name, transB=1)]),
    "Gemm": (True, lambda name: [node("Gemm", name)]),
    "MatMul": (True, lambda name: [node("MatMul", name)]),
    "MatMul from the left": (False, lambda name: [node("MatMul", name, at=0)]),
    "Gather": (False, lambda name: [node("Gather", name, at=0)]),
    "a tied embedding": (False, turned),
}


def save(path: Path, state: dict[str, Tensor], way: str = "Gemm of the transpose") -> Path:
    inputs_first, nodes = WAYS[way]
    tensors = [proto(name, value.T if inputs_first else value) for name, value in state.items()]
    onnx.save(model_of(tensors, [one for name in state for one in nodes(name)]), path)
    return path


@pytest.mark.parametrize("way", WAYS)
def test_equal_weights_have_equal_figures(tmp_path: Path, way: str) -> None:
    source = save(tmp_path / "m.onnx", STATE, way)
    assert_equal_figures(source, STATE, tmp_path / "safe", as_stored=not WAYS[way][0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("raw", [True, False])
def test_dtypes_are_read_as_stored(tmp_path: Path, dtype: torch.dtype, raw: bool) -> None:
    kinds = {torch.float64: "DOUBLE", torch.float16: "FLOAT16", torch.bfloat16: "BFLOAT16"}
    kind = getattr(TensorProto, kinds[dtype])
    state = {name: value.to(dtype) for name, value in STATE.items()}
    tensors = []
    for name, value in state.items():
        if raw:
            data = value.view(torch.uint8).numpy().tobytes()
            tensors.append(helper.make_tensor(name, kind, value.shape, data, raw=True))
        else:
            tensors.append(helper.make_tensor(name, kind, value.shape, value.double().flatten().tolist()))
    onnx.save(model_of(tensors, [node("Gemm", name, transB=1) for name in state]), tmp_path / "m.onnx")
    assert_equal_figures(tmp_path / "m.onnx", state, tmp_path / "safe")


@pytest.mark.parametrize("transposed", [False, True])
def test_groups_of_a_convolution_are_its_attribute(tmp_path: Path, transposed: bool) -> None:
    plain = torch.nn.ConvTranspose2d(8, 6, 3, groups=2) if transposed else torch.nn.Conv2d(8, 6, 3, groups=2)
    operator = "ConvTranspose" if transposed else "Conv"
    weight = plain.weight.detach()
    onnx.save(model_of([proto("weight", weight)], [node(operator, "weight", group=2)]), tmp_path / "m.onnx")
    found, known = gonio.measure(tmp_path / "m.onnx").tensors[0], gonio.measure(plain).tensors[0]
    assert (found.dim, found.norm_mean, found.alignment) == (known.dim, known.norm_mean, known.alignment)


def test_external_data_are_read_from_the_folder(tmp_path: Path) -> None:
    model = onnx.load(save(tmp_path / "m.onnx", STATE))
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    assert_equal_figures(tmp_path / "m.onnx", STATE, tmp_path / "safe")
    assert gonio.check(tmp_path / "m.onnx")[NAMES[0].removesuffix(".weight")].file == "m.data"


def test_what_operators_do_not_tell_is_unknown(tmp_path: Path) -> None:
    nodes = [node("Gemm", NAMES[0]), node("Gemm", NAMES[0], transB=1), node("Add", NAMES[1]),
             node("Gemm", NAMES[2], domain="com.example")]  # fmt: skip
    onnx.save(model_of([proto(name, value) for name, value in STATE.items()], nodes), tmp_path / "m.onnx")
    said = {tensor.name: tensor.reason for tensor in gonio.measure(tmp_path / "m.onnx").tensors}
    assert "no operator tells which dimension holds its outputs (used by Gemm)" in said[NAMES[0]]
    assert "(used by Add)" in said[NAMES[1]]
    assert "(used by Gemm)" in said[NAMES[2]]
    assert gonio.check(tmp_path / "m.onnx").intact


def test_every_tensor_of_a_model_is_accounted_for(tmp_path: Path) -> None:
    value = helper.make_tensor_value_info("b", TensorProto.FLOAT, None)
    inner = helper.make_graph([node("Gemm", "w", transB=1)], "inner", [], [value], [proto("w", STATE[NAMES[0]])])
    sparse = helper.make_sparse_tensor(proto("s", torch.ones(2)), proto("i", torch.tensor([0, 3])), [8])
    nodes = [
        helper.make_node("If", ["x"], ["y"], name="choice", then_branch=inner, else_branch=inner),
        helper.make_node("Constant", [], ["c"], value=proto("", STATE[NAMES[1]])),
        helper.make_node("ConstantOfShape", ["x"], ["f"], name="fill", value=proto("", torch.ones(1))),
        node("MatMul", "c"),
    ]
    model = model_of([helper.make_tensor("t", TensorProto.STRING, [1], [b"text"])], nodes)
    model.graph.sparse_initializer.append(sparse)
    model.graph.initializer.append(helper.make_tensor("q", TensorProto.INT4, [2, 2], [1, 2, 3, 4]))
    onnx.save(model, tmp_path / "m.onnx")
    names = {"choice.then_branch.0.w", "choice.else_branch.0.w", "c", "fill.value", "s", "t", "q"}
    assert {tensor.name for tensor in gonio.measure(tmp_path / "m.onnx").tensors} == names
    found = gonio.check(tmp_path / "m.onnx")
    assert {tensor.name for tensor in found.tensors} == names
    assert (found["q"].reason, found["q"].integers, found["q"].largest) == ("", True, 4)
    assert rows(tmp_path / "m.onnx")["c"]["shape"] == [20, 12]


def test_weights_in_a_branch_are_told_by_the_operators_of_the_branch(tmp_path: Path) -> None:
    """A branch has names of its own, hides those around it, and sees the others."""
    value = helper.make_tensor_value_info("b", TensorProto.FLOAT, None)
    own = helper.make_graph([node("Gemm", "w", transB=1)], "own", [], [value], [proto("w", STATE[NAMES[0]])])
    around = helper.make_graph([node("MatMul", "w"), *turned("e")], "around", [], [value], [])
    nodes = [helper.make_node("If", ["x"], ["y"], name="choice", then_branch=own, else_branch=around)]
    tensors = [proto("w", STATE[NAMES[1]].mT), proto("e", STATE[NAMES[2]])]
    onnx.save(model_of(tensors, nodes), tmp_path / "m.onnx")
    found = {tensor.name: tensor for tensor in gonio.measure(tmp_path / "m.onnx").layers}
    kept = {"choice.then_branch.0.w": NAMES[0], "w": NAMES[1], "e": NAMES[2]}
    assert {name: tensor.shape for name, tensor in found.items()} == {
        name: tuple(STATE[weight].shape) for name, weight in kept.items()
    }


@pytest.mark.parametrize("sign", [1, -1])
def test_an_infinite_constant_of_the_graph_is_no_damage(tmp_path: Path, sign: int) -> None:
    """Where the search for a largest number begins; a weight with an infinite value is damaged, and so is NaN."""
    start = proto("start", torch.tensor(sign * torch.inf))
    weight = proto("w", STATE[NAMES[0]])
    onnx.save(model_of([start, weight], [node("Max", "start"), node("Gemm", "w", transB=1)]), tmp_path / "m.onnx")
    assert "G001" not in codes(tmp_path / "m.onnx")
    assert gonio.check(tmp_path / "m.onnx")["start"].reason == "a single infinite number, a constant of the graph"
    for broken in (torch.tensor(torch.nan), torch.tensor([sign * torch.inf, 1.0])):
        onnx.save(model_of([proto("start", broken), weight], [node("Max", "start")]), tmp_path / "m.onnx")
        assert "G001" in codes(tmp_path / "m.onnx")


def test_the_extra_is_named_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save(tmp_path / "m.onnx", STATE)
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(MissingExtraError, match=r"ONNX models needs the package 'onnx'.*gonio\[onnx\]"):
        gonio.check(source)


def first(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        model = onnx.load(folder / "m.onnx", load_external_data=False)
        change(model.graph.initializer[0])
        (folder / "m.onnx").write_bytes(model.SerializeToString())

    return damage


def fact(key: str, value: str) -> Callable[[Path], None]:
    def change(tensor: Any) -> None:
        for entry in tensor.external_data:
            if entry.key == key:
                entry.value = value

    return first(change)


def linked(folder: Path) -> None:
    outside = folder.parent / "outside.bin"
    outside.write_bytes((folder / "m.data").read_bytes())
    (folder / "m.data").unlink()
    (folder / "m.data").symlink_to(outside)


def test_a_model_and_its_data_in_a_hubs_cache(tmp_path: Path) -> None:
    """Both are links to files of one folder, which is not the one that the model seems to lie in."""
    plain, snapshot, blobs = (tmp_path / name for name in ("plain", "snapshots", "blobs"))
    for folder in (plain, snapshot, blobs):
        folder.mkdir()
    model = model_of([proto("w", torch.ones(8, 8))], [node("Gemm", "w")])
    onnx.save(model, plain / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    for number, name in enumerate(("m.onnx", "m.data")):
        (plain / name).rename(blobs / f"{number}")
        (snapshot / name).symlink_to(f"../blobs/{number}")
    assert gonio.check(snapshot / "m.onnx")["w"].largest == 1
    (blobs / "1").unlink()
    (finding,) = gonio.check(snapshot / "m.onnx").findings
    assert (finding.code, finding.found) == (
        "G702",
        "its file m.data: it is a link to ../blobs/1, where there is nothing",
    )


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "the data are cut off": (lambda f: os.truncate(f / "m.data", 1000), "G704"),
    "the data are missing": (lambda f: (f / "m.data").unlink(), "G702"),
    "data outside of the folder": (fact("location", "../m.data"), "G704"),
    "data under an absolute path": (fact("location", "/etc/passwd"), "G704"),
    "data that a link leads outside": (linked, "G704"),
    "data of the folder itself": (fact("location", "."), "G704"),
    "an offset beyond the end": (fact("offset", "99999999"), "G704"),
    "an offset that is negative": (fact("offset", "-4"), "G704"),
    "an offset in another tensor": (fact("offset", "1000"), "G704"),
    "a length that is too short": (fact("length", "100"), "G704"),
    "bytes after the end": (lambda f: (f / "m.data").write_bytes((f / "m.data").read_bytes() + bytes(1 << 17)), "G705"),
    "a shape that is too large": (first(lambda t: t.dims.append(1 << 40)), "G704"),
    "a negative size": (first(lambda t: t.dims.append(-2)), "G704"),
    "another dtype": (first(lambda t: setattr(t, "data_type", TensorProto.DOUBLE)), "G704"),
    "no dtype": (first(lambda t: setattr(t, "data_type", 0)), "G704"),
    "a name that occurs twice": (first(lambda t: setattr(t, "name", NAMES[1])), "G703"),
    "values inside of another number": (first(lambda t: (t.ClearField("data_location"), setattr(
        t, "raw_data", bytes(7)))), "G704"),
    "numbers of another number": (first(lambda t: (t.ClearField("data_location"), t.float_data.append(1.0))), "G704"),
    "no values": (first(lambda t: t.ClearField("data_location")), "G704"),
    "an empty file": (lambda f: (f / "m.onnx").write_bytes(b""), "refused"),
    "a file of something else": (lambda f: (f / "m.onnx").write_bytes(b"GGUF" * 40), "refused"),
    "a file cut off": (lambda f: os.truncate(f / "m.onnx", 90), "refused"),
    "a value that is not finite": (lambda f: (f / "m.data").write_bytes(
        np.float32(np.nan).tobytes() + (f / "m.data").read_bytes()[4:]), "G001"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGES)
def test_damages_are_named(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    model = onnx.load(save(folder / "m.onnx", STATE))
    onnx.save(model, folder / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    assert codes(folder / "m.onnx") == set()
    damage, code = DAMAGES[kind]
    damage(folder)
    assert code in codes(folder / "m.onnx")
    if code == "refused":
        with pytest.raises(UnreadableFileError, match=r"not an intact file|its content is that of a GGUF file"):
            gonio.measure(folder / "m.onnx")
    else:
        assert len(gonio.measure(folder / "m.onnx").tensors) == len(STATE) - (code == "G703")


@pytest.mark.parametrize("times", [300, pytest.param(2000, marks=pytest.mark.slow)])
def test_changed_bytes_leave_no_other_error(tmp_path: Path, times: int) -> None:
    source = save(tmp_path / "m.onnx", STATE)
    assert fuzz(source, source, times) > 0
