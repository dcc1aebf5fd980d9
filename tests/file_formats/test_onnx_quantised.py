"""ONNX: codes that DequantizeLinear or an operator on integers reads are measured as the values it computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gonio
from gonio.measuring.changes.sources import base_entries, values_of

onnx = pytest.importorskip("onnx")
reference = pytest.importorskip("onnx.reference")
helper, numpy_helper = onnx.helper, onnx.numpy_helper
ROWS, COLUMNS = 12, 32
RNG = np.random.default_rng(0)


def codes_of(dtype: Any) -> np.ndarray:
    low = 0 if np.dtype(dtype).kind == "u" else -100
    return RNG.integers(low, 100, (ROWS, COLUMNS)).astype(dtype)


# As onnxruntime.quantization 1.31 writes them (QDQ): codes, shape of scales, attributes.
FORMS: dict[str, tuple[Any, tuple[int, ...], dict[str, int]]] = {
    "one scale": (np.int8, (), {}),
    "one scale in a vector": (np.int8, (1,), {"axis": 0}),
    "unsigned": (np.uint8, (), {}),
    "16 bits": (np.int16, (), {}),
    "a scale for a row": (np.int8, (ROWS,), {"axis": 0}),
    "a scale for a column": (np.int8, (COLUMNS,), {}),
    "the last axis": (np.int8, (COLUMNS,), {"axis": -1}),
    "blocks": (np.int8, (ROWS, 4), {"axis": 1, "block_size": 8}),
    "blocks with a rest": (np.int16, (ROWS, 3), {"axis": 1, "block_size": 11}),
}


def written(path: Path, form: str, *, zeros: bool = True, fixed: bool = True) -> Any:
    """A product whose matrix is dequantised; its scale is an input of the graph unless it is `fixed`."""
    dtype, shape, facts = FORMS[form]
    scale = RNG.uniform(0.01, 0.02, shape).astype(np.float32)
    tensors = {"w_quantized": codes_of(dtype), "w_scale": scale}
    if zeros:
        tensors["w_zero_point"] = RNG.integers(0, 5, shape).astype(dtype)
    inputs = [*tensors]
    if not fixed:
        del tensors["w_scale"]
    nodes = [
        helper.make_node("DequantizeLinear", inputs, ["w"], **facts),
        helper.make_node("Gemm", ["x", "w"], ["y"], transB=1),
    ]
    values = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in ("x", "y", "w", "w_scale")]
    held = [numpy_helper.from_array(np.asarray(value), name) for name, value in tensors.items()]
    graph = helper.make_graph(nodes, "g", [values[0], *([] if fixed else values[3:])], [values[1], values[2]], held)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])
    onnx.save(model, path)
    return model


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("zeros", [True, False])
def test_values_are_those_of_the_operator(form: str, zeros: bool, tmp_path: Path) -> None:
    if "blocks" in form and not zeros:
        pytest.skip("the reference of ONNX takes blocks only with zero points")
    model = written(tmp_path / "q.onnx", form, zeros=zeros)
    x = np.zeros((1, COLUMNS), np.float32)
    expected = torch.tensor(reference.ReferenceEvaluator(model).run(["w"], {"x": x})[0]).double()
    values = values_of(base_entries(tmp_path / "q.onnx")["w_quantized"], "")
    assert isinstance(values, torch.Tensor)
    torch.testing.assert_close(values.double(), expected, rtol=1e-6, atol=0)
    row = gonio.measure(tmp_path / "q.onnx")["w_quantized"]
    assert (row.status, row.shape, row.kind) == ("measured", (ROWS, COLUMNS), "linear or embedding")
    assert row.frobenius == pytest.approx(float(expected.norm()), rel=1e-6)
    assert f"dequantised from {np.dtype(FORMS[form][0])} and its scale" in row.notes
    checked = gonio.check(tmp_path / "q.onnx")
    assert checked.intact
    assert checked["w_quantized"].norm == pytest.approx(float(expected.norm()), rel=1e-6)


def test_codes_without_a_scale_in_the_file_are_left_out(tmp_path: Path) -> None:
    written(tmp_path / "q.onnx", "a scale for a row", fixed=False)
    row = gonio.measure(tmp_path / "q.onnx")["w_quantized"]
    assert (row.status, row.reason[:5]) == ("skipped", "int8:")


@pytest.mark.parametrize(("form", "shape"), [("a scale for a row", (5,)), ("blocks", (ROWS, 5)), ("one scale", (2, 2))])
def test_scales_that_do_not_fit_are_not_used(
    form: str, shape: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FORMS, form, (FORMS[form][0], shape, FORMS[form][2]))
    written(tmp_path / "q.onnx", form)
    assert gonio.measure(tmp_path / "q.onnx")["w_quantized"].status == "skipped"


# --- operators on integers -------------------------------------------------------------------------------------------

N = helper.make_node
RUNTIME = {"domain": "com.microsoft"}
AFTER = [  # a product of integers, whose scale follows it, as onnxruntime's dynamic quantisation writes it
    N("DynamicQuantizeLinear", ["x"], ["xq", "xs", "xz"]),
    N("Mul", ["xs", "w_scale"], ["both"]),
    N("Cast", ["product"], ["cast"], to=1),
    N("Mul", ["cast", "both"], ["y"]),
]
# The operators, the shape of the codes, the axis of a vector of scales, and the axes of the weight in torch's order.
OPERATORS: dict[str, tuple[list[Any], tuple[int, ...], int, tuple[int, ...]]] = {
    "QLinearConv": (
        [N("QLinearConv", ["x", "xs", "xz", "w", "w_scale", "w_zero", "ys", "yz"], ["y"])],
        (8, 3, 3, 3), 0, (0, 1, 2, 3),
    ),
    "QLinearMatMul": (
        [N("QLinearMatMul", ["x", "xs", "xz", "w", "w_scale", "w_zero", "ys", "yz"], ["y"])], (12, 8), 1, (1, 0)
    ),
    "QLinearMatMul, the weight first": (
        [N("QLinearMatMul", ["w", "w_scale", "w_zero", "x", "xs", "xz", "ys", "yz"], ["y"])], (8, 12), 0, (0, 1)
    ),
    "QGemm": (
        [N("QGemm", ["x", "xs", "xz", "w", "w_scale", "w_zero", "", "ys", "yz"], ["y"], transB=1, **RUNTIME)],
        (8, 12), 0, (0, 1),
    ),
    "QGemm, inputs first": (
        [N("QGemm", ["x", "xs", "xz", "w", "w_scale", "w_zero", "", "ys", "yz"], ["y"], **RUNTIME)], (12, 8), 1, (1, 0)
    ),
    "MatMulInteger": ([N("MatMulInteger", ["xq", "w", "xz", "w_zero"], ["product"]), *AFTER], (12, 8), 1, (1, 0)),
    "ConvInteger": (
        [N("ConvInteger", ["xq", "w", "xz", "w_zero"], ["product"]), *AFTER], (8, 3, 3, 3), 0, (0, 1, 2, 3)
    ),
    "DynamicQuantizeMatMul": (
        [N("DynamicQuantizeMatMul", ["x", "w", "w_scale", "w_zero"], ["y"], **RUNTIME)], (12, 8), 1, (1, 0)
    ),
    "MatMulIntegerToFloat": (
        [N("MatMulIntegerToFloat", ["xq", "w", "xs", "w_scale", "xz", "w_zero"], ["y"], **RUNTIME)], (12, 8), 1, (1, 0)
    ),
}  # fmt: skip


def saved(path: Path, nodes: list[Any], tensors: dict[str, np.ndarray]) -> Path:
    values = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in ("x", "y")]
    held = [numpy_helper.from_array(value, name) for name, value in tensors.items()]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], held)
    sets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=sets, ir_version=10), path)
    return path


def operator(path: Path, name: str, *, vector: bool, scale: bool = True) -> tuple[Path, np.ndarray]:
    """A model with one operator, and its weight in float64, in torch's order."""
    nodes, shape, axis, order = OPERATORS[name]
    codes = RNG.integers(-100, 100, shape).astype(np.int8)
    size = (shape[axis],) if vector else ()
    tensors = {
        "w": codes,
        "w_scale": RNG.uniform(0.01, 0.02, size).astype(np.float32),
        "w_zero": RNG.integers(0, 5, size).astype(np.int8),
    }
    if len(nodes) == 1:  # else they are computed in the graph
        tensors |= {f"{one}s": np.full((), 0.5, np.float32) for one in "xy"}
        tensors |= {f"{one}z": np.zeros((), np.int8) for one in "xy"}
    spread = [-1 if at == axis else 1 for at in range(len(shape))] if vector else [1] * len(shape)
    zero, factor = (tensors[key].astype(float).reshape(spread) for key in ("w_zero", "w_scale"))
    values = (codes.astype(float) - zero) * factor
    if not scale:
        del tensors["w_scale"]
    return saved(path, nodes, tensors), values.transpose(order)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("vector", [True, False])
def test_operators_on_integers_name_their_scales(name: str, vector: bool, tmp_path: Path) -> None:
    path, expected = operator(tmp_path / "q.onnx", name, vector=vector)
    values = values_of(base_entries(path)["w"], "")
    assert isinstance(values, torch.Tensor)
    torch.testing.assert_close(values.double(), torch.tensor(expected), rtol=1e-6, atol=0)
    measured = gonio.measure(path)
    assert (measured["w"].status, measured["w"].shape) == ("measured", expected.shape)
    assert not [row.name for row in measured.values() if row.status == "skipped"]


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_whose_scale_is_computed_leaves_the_codes_out(name: str, tmp_path: Path) -> None:
    path, _ = operator(tmp_path / "q.onnx", name, vector=True, scale=False)
    row = gonio.measure(path)["w"]
    assert (row.status, row.reason[:5]) == ("skipped", "int8:")


def test_a_scale_that_is_not_of_this_product_is_not_used(tmp_path: Path) -> None:
    """The result is multiplied by a tensor of the file alone, which may hold the scale of the inputs too."""
    nodes = [
        N("DynamicQuantizeLinear", ["x"], ["xq", "xs", "xz"]),
        N("MatMulInteger", ["xq", "w", "xz"], ["product"]),
        N("Cast", ["product"], ["cast"], to=1),
        N("Mul", ["cast", "w_scale"], ["y"]),
    ]
    tensors = {"w": np.ones((12, 8), np.int8), "w_scale": np.ones(8, np.float32)}
    assert gonio.measure(saved(tmp_path / "q.onnx", nodes, tensors))["w"].status == "skipped"


@pytest.mark.parametrize(("bits", "zeros"), [(2, "packed"), (4, ""), (4, "packed"), (4, "floats"), (8, "packed")])
def test_packed_bits_are_those_of_onnxruntime(bits: int, zeros: str, tmp_path: Path) -> None:
    """MatMulNBits; 72 inputs in blocks of 32, of which the last is filled up. The runtime multiplies the identity."""
    runtime = pytest.importorskip("onnxruntime")
    rows, columns, size = 24, 72, 32
    codes = RNG.integers(0, 2**bits, (rows, 3, size))
    places = bits * np.arange(8 // bits)

    def in_bytes(numbers: np.ndarray) -> np.ndarray:
        filled = np.pad(numbers, [(0, 0)] * (numbers.ndim - 1) + [(0, -numbers.shape[-1] % (8 // bits))])
        grouped = filled.reshape(*numbers.shape[:-1], -1, 8 // bits)
        return (grouped << places).sum(-1).astype(np.uint8)

    scales = RNG.uniform(0.5, 1, (rows, 3)).astype(np.float32)
    zero = RNG.integers(0, 2**bits, (rows, 3)) if zeros == "packed" else np.full((rows, 3), 2 ** (bits - 1))
    zero = zero + 0.25 if zeros == "floats" else zero
    tensors = {"w": in_bytes(codes), "w_scales": scales}
    if zeros:
        tensors["w_zeros"] = in_bytes(zero) if zeros == "packed" else zero.astype(np.float32)
    facts = {"K": columns, "N": rows, "bits": bits, "block_size": size}
    node = N("MatMulNBits", ["x", *tensors], ["y"], **facts, **RUNTIME)
    path = saved(tmp_path / "q.onnx", [node], tensors)
    expected = ((codes - zero[..., None]) * scales[..., None].astype(float)).reshape(rows, -1)[:, :columns]
    values = values_of(base_entries(path)["w"], "")
    assert isinstance(values, torch.Tensor)
    torch.testing.assert_close(values.double(), torch.tensor(expected), rtol=1e-6, atol=0)
    assert gonio.measure(path)["w"].shape == (rows, columns)
    if bits > 2:  # the runtime's own kernels for 2 bits are not on every processor
        session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
        (product,) = session.run(None, {"x": np.eye(columns, dtype=np.float32)})
        assert np.abs(product.T - expected).max() < 1e-4 * np.abs(expected).max()
