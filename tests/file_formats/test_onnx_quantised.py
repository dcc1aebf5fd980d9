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


@pytest.mark.parametrize("kind", ["INT4", "UINT4"])
@pytest.mark.parametrize("form", ["in numbers", "raw", "external"])
@pytest.mark.parametrize("size", [0, 4])
def test_codes_of_four_bits(kind: str, form: str, size: int, tmp_path: Path) -> None:
    """An odd number of codes: the last byte holds one. The reference is the operator of the package."""
    rows, columns, path = 7, 9, tmp_path / "q.onnx"
    shape = (rows, -(-columns // size)) if size else (rows,)
    low, high = (0, 16) if kind == "UINT4" else (-8, 8)
    dtype, values = getattr(onnx.TensorProto, kind), RNG.integers(low, high, (rows, columns))
    zeros = RNG.integers(low, high, shape)
    held = [helper.make_tensor("q", dtype, values.shape, values.flatten())]
    held += [helper.make_tensor("z", dtype, shape, zeros.flatten())]
    if form != "in numbers":
        held = [numpy_helper.from_array(numpy_helper.to_array(one), one.name) for one in held]
    held.append(numpy_helper.from_array(RNG.uniform(0.01, 0.02, shape).astype(np.float32), "s"))
    facts = {"axis": 1, "block_size": size} if size else {"axis": 0}
    nodes = [helper.make_node("DequantizeLinear", ["q", "s", "z"], ["w"], **facts)]
    nodes.append(helper.make_node("Gemm", ["x", "w"], ["y"], transB=1))
    named = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in ("x", "y", "w")]
    model = helper.make_model(helper.make_graph(nodes, "g", named[:1], named[1:], held))
    expected = reference.ReferenceEvaluator(model).run(["w"], {"x": np.zeros((1, columns), np.float32)})[0]
    where = {"save_as_external_data": True, "size_threshold": 0, "location": "q.data"} if form == "external" else {}
    onnx.save(model, path, **where)
    found = values_of(base_entries(path)["q"], "")
    assert isinstance(found, torch.Tensor)
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-6, atol=0)
    row = gonio.measure(path)["q"]
    assert (row.status, row.shape) == ("measured", (rows, columns))
    assert f"dequantised from {kind.lower()} and its scale" in row.notes
    assert gonio.check(path).intact


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


def stream(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Numbers along the last axis as bytes, bit by bit, the lowest bits first; the last byte is filled up."""
    single = ((numbers[..., None] >> np.arange(bits)) & 1).reshape(*numbers.shape[:-1], -1).astype(np.uint8)
    return np.packbits(single, axis=-1, bitorder="little")


def read(path: Path, name: str = "w") -> torch.Tensor:
    values = values_of(base_entries(path)[name], "")
    assert isinstance(values, torch.Tensor), values
    return values.double()


def packed_product(
    path: Path, bits: int, *, columns: int = 72, size: int = 16, group: np.ndarray | None = None, facts: Any = None
) -> tuple[Path, np.ndarray]:
    rows, blocks = 10, -(-columns // size)
    codes, zero = RNG.integers(0, 2**bits, (rows, blocks, size)), RNG.integers(0, 2**bits, (rows, blocks))
    scales = RNG.uniform(0.5, 1, (rows, blocks)).astype(np.float32)
    tensors = {"w": stream(codes, bits), "w_scales": scales, "w_zeros": stream(zero, bits)}
    at = np.arange(columns) // size
    if group is not None:
        tensors |= {"w_zeros": zero.astype(np.float32), "w_group": group}
        at = np.resize(group.astype(int), columns)
    facts = {"K": columns, "N": rows, "bits": bits, "block_size": size} | (facts or {})
    node = N("MatMulNBits", ["x", *tensors], ["y"], **facts, **RUNTIME)
    values = codes.reshape(rows, -1)[:, :columns] - zero[:, at % blocks]
    return saved(path, [node], tensors), values * scales[:, at % blocks].astype(float)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("size", [16, 40])
def test_codes_of_every_width_are_read(bits: int, size: int, tmp_path: Path) -> None:
    path, expected = packed_product(tmp_path / "q.onnx", bits, size=size)
    torch.testing.assert_close(read(path), torch.tensor(expected), rtol=1e-6, atol=0)
    rows = gonio.measure(path)
    assert rows["w"].frobenius == pytest.approx(float(np.linalg.norm(expected)), rel=1e-6)
    assert {row.reason for row in rows.values() if row.name != "w"} == {"a part of the quantised w"}


@pytest.mark.parametrize("bits", [3, 4])
def test_an_order_of_blocks_is_followed(bits: int, tmp_path: Path) -> None:
    group = RNG.permutation(np.arange(64) // 16).astype(np.int32)
    path, expected = packed_product(tmp_path / "q.onnx", bits, columns=64, group=group)
    torch.testing.assert_close(read(path), torch.tensor(expected), rtol=1e-6, atol=0)
    runtime = pytest.importorskip("onnxruntime")
    if bits == 4:  # the one width for which the runtime reads an order
        session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
        (product,) = session.run(None, {"x": np.eye(64, dtype=np.float32)})
        assert np.abs(product.T - expected).max() < 1e-5 * np.abs(expected).max()


def test_packed_zero_points_beside_an_order_are_not_read(tmp_path: Path) -> None:
    """The runtime takes the middle code for them, and its description does not say so."""
    path, _ = packed_product(tmp_path / "q.onnx", 4, columns=64, group=np.zeros(64, np.int32))
    model = onnx.load(path)
    packed = numpy_helper.from_array(np.zeros((10, 2), np.uint8), "w_zeros")
    model.graph.initializer[2].CopyFrom(packed)
    onnx.save(model, path)
    assert gonio.measure(path)["w"].status == "skipped"


@pytest.mark.parametrize("group", [np.full(64, 4, np.int32), np.full(64, -1, np.int32)])
def test_an_order_with_blocks_that_are_none_is_named(group: np.ndarray, tmp_path: Path) -> None:
    path, _ = packed_product(tmp_path / "q.onnx", 4, columns=64, group=group)
    row = gonio.measure(path)["w"]
    assert (row.status, "g_idx names one of 4 blocks" in row.reason) == ("skipped", True), row.reason


@pytest.mark.parametrize(
    ("facts", "group"),
    [
        ({"bits": 1}, None), ({"bits": 9}, None), ({"bits": -4}, None), ({"block_size": 0}, None), ({"N": 11}, None),
        ({"K": 1 << 60}, None), ({"block_size": 1 << 60}, None), ({"weight_prepacked": 1}, None),
        ({}, np.zeros(5, np.int32)), ({}, np.zeros(64, np.float32)),
    ],
)  # fmt: skip
def test_packed_codes_that_do_not_fit_are_left_out(
    facts: dict[str, int], group: np.ndarray | None, tmp_path: Path
) -> None:
    path, _ = packed_product(tmp_path / "q.onnx", 4, columns=64, group=group, facts=facts)
    assert gonio.measure(path)["w"].status in ("skipped", "no filters")


def table(path: Path, bits: int, axis: int, *, zeros: bool = True, facts: Any = None) -> tuple[Path, np.ndarray]:
    """GatherBlockQuantized of a table of 40 rows and 24 columns; the last block is not full."""
    shape, size = (40, 24), 16
    codes = RNG.integers(0, 2**bits, shape)
    blocks = tuple(-(-n // size) if at == axis % 2 else n for at, n in enumerate(shape))
    scales = RNG.uniform(0.5, 1, blocks).astype(np.float32)
    zero = RNG.integers(0, 2**bits, blocks) if zeros else np.full(blocks, 2 ** (bits - 1))
    tensors = {"w": stream(codes, bits), "w_scales": scales, **({"w_zeros": stream(zero, bits)} if zeros else {})}
    facts = {"bits": bits, "block_size": size, "quantize_axis": axis, "gather_axis": 0} | (facts or {})
    node = N("GatherBlockQuantized", ["w", "x", *list(tensors)[1:]], ["y"], **facts, **RUNTIME)
    spread = [part.repeat(size, axis).take(range(shape[axis]), axis) for part in (zero, scales.astype(float))]
    held = [numpy_helper.from_array(value, name) for name, value in tensors.items()]
    ends = [helper.make_tensor_value_info("x", onnx.TensorProto.INT64, None)]
    ends += [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)]
    sets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph([node], "g", ends[:1], ends[1:], held)
    onnx.save(helper.make_model(graph, opset_imports=sets, ir_version=10), path)
    return path, (codes - spread[0]) * spread[1]


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("zeros", [True, False])
def test_a_table_of_packed_codes_is_read(bits: int, axis: int, zeros: bool, tmp_path: Path) -> None:
    path, expected = table(tmp_path / "q.onnx", bits, axis, zeros=zeros)
    torch.testing.assert_close(read(path), torch.tensor(expected), rtol=1e-6, atol=0)
    row = gonio.measure(path)["w"]
    assert (row.status, row.shape, row.kind) == ("measured", (40, 24), "linear or embedding")
    runtime = pytest.importorskip("onnxruntime")
    if axis:  # the runtime has no blocks along the axis of the rows
        session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
        (rows,) = session.run(None, {"x": np.arange(40)})
        assert np.abs(rows - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("facts", [
    {"bits": 3}, {"bits": 0}, {"block_size": 0}, {"block_size": -16}, {"block_size": 8}, {"quantize_axis": 2},
    {"quantize_axis": 0}, {"block_size": 1 << 60}, {"bits": 8},
])  # fmt: skip
def test_a_table_whose_parts_do_not_fit_is_left_out(facts: dict[str, int], tmp_path: Path) -> None:
    path, _ = table(tmp_path / "q.onnx", 4, 1, facts=facts)
    assert gonio.measure(path)["w"].status == "skipped"


@pytest.mark.parametrize("kind", ["INT4", "UINT4"])
@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize("facts", [{"bits": 4}, {}])
def test_a_table_of_a_type_of_4_bits(kind: str, zeros: bool, facts: dict[str, int], tmp_path: Path) -> None:
    """Without zero points nothing is subtracted, unlike of codes that are packed in bytes."""
    low, shape, blocks, size = -8 if kind == "INT4" else 0, (40, 24), (40, 2), 16
    codes, zero = RNG.integers(low, low + 16, shape), RNG.integers(low, low + 16, blocks) * zeros
    scales, code = RNG.uniform(0.5, 1, blocks).astype(np.float32), getattr(onnx.TensorProto, kind)
    inputs = ["w", "x", "s", *(["z"] if zeros else [])]
    node = N("GatherBlockQuantized", inputs, ["y"], block_size=size, quantize_axis=1, gather_axis=0, **facts, **RUNTIME)
    held = [numpy_helper.from_array(scales, "s"), helper.make_tensor("w", code, shape, codes.ravel().tolist())]
    held += [helper.make_tensor("z", code, blocks, zero.ravel().tolist())] if zeros else []
    ends = [helper.make_tensor_value_info("x", onnx.TensorProto.INT64, [40])]
    ends += [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)]
    sets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph([node], "g", ends[:1], ends[1:], held)
    path = tmp_path / "q.onnx"
    onnx.save(helper.make_model(graph, opset_imports=sets, ir_version=10), path)
    expected = (codes - zero.repeat(size, 1)[:, :24]) * scales.astype(float).repeat(size, 1)[:, :24]
    torch.testing.assert_close(read(path), torch.tensor(expected), rtol=1e-6, atol=0)
    assert gonio.measure(path)["w"].kind == "linear or embedding"
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (rows,) = session.run(None, {"x": np.arange(40)})
    assert np.abs(rows - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("scales", [(6, 20), (1, 1), (6, 1), (1, 20)])
def test_a_table_of_8_bit_floats(scales: tuple[int, int], tmp_path: Path) -> None:
    """A size of 0 stands for one block; scales of one row hold for all."""
    codes = torch.tensor(RNG.normal(size=(6, 20))).to(torch.float8_e4m3fn)
    size, scale = int(scales[1] == 20), RNG.uniform(0.5, 1, scales).astype(np.float32)
    raw = codes.view(torch.uint8).numpy().tobytes()
    node = N("GatherBlockQuantized", ["w", "x", "s"], ["y"], block_size=size, quantize_axis=1, gather_axis=0, **RUNTIME)
    path = saved(tmp_path / "q.onnx", [node], {"s": scale})
    model = onnx.load(path)
    made = helper.make_tensor("w", onnx.TensorProto.FLOAT8E4M3FN, (6, 20), raw, raw=True)
    model.graph.initializer.append(made)
    onnx.save(model, path)
    torch.testing.assert_close(read(path), codes.double() * torch.tensor(scale).double(), rtol=1e-6, atol=0)


def test_a_table_and_a_product_of_the_same_codes(tmp_path: Path) -> None:
    """As the builder of onnxruntime-genai ties the embedding to the last layer: by a Reshape of the codes."""
    path, expected = packed_product(tmp_path / "q.onnx", 4, columns=64)
    model = onnx.load(path)
    model.graph.initializer.append(numpy_helper.from_array(np.array([10, 32]), "flat"))
    model.graph.node.append(N("Reshape", ["w", "flat"], ["codes"]))
    inputs = ["codes", "i", "w_scales", "w_zeros"]
    model.graph.node.append(N("GatherBlockQuantized", inputs, ["z"], block_size=16, bits=4, **RUNTIME))
    onnx.save(model, path)
    torch.testing.assert_close(read(path), torch.tensor(expected), rtol=1e-6, atol=0)


def test_blocks_larger_than_the_axis_take_no_more_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMS, "blocks", (np.int8, (ROWS, 1), {"axis": 1, "block_size": 1 << 40}))
    written(tmp_path / "q.onnx", "blocks")
    assert gonio.measure(tmp_path / "q.onnx")["w_quantized"].status == "measured"
