"""ONNX: codes that DequantizeLinear reads are measured as the values that it computes."""

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
