"""Matrix views: right rows for every layer kind, exact inverse, clear refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from geometry.examples import REPEATABLE
from gonio.errors import InvalidArgumentError, NotApplicableError
from gonio.geometry import Layout, layout_of, matrix_view, unview
from references.geometry import filter_rows

VIEWS = ("filters", "taps", "last_two")

LAYERS: dict[str, nn.Module] = {
    "Linear": nn.Linear(4, 6),
    "Embedding": nn.Embedding(7, 3),
    "EmbeddingBag": nn.EmbeddingBag(7, 3),
    "Conv1d": nn.Conv1d(4, 6, 3, groups=2),
    "Conv2d": nn.Conv2d(3, 8, (3, 2), dilation=2),
    "Conv2d 1x1": nn.Conv2d(4, 8, 1, groups=4),
    "Conv2d depthwise": nn.Conv2d(6, 6, 3, groups=6),
    "Conv3d": nn.Conv3d(4, 6, (1, 2, 3), groups=2),
    "ConvTranspose1d": nn.ConvTranspose1d(4, 6, 3, groups=2),
    "ConvTranspose2d": nn.ConvTranspose2d(4, 6, (3, 2), groups=2, stride=2),
    "ConvTranspose2d depthwise": nn.ConvTranspose2d(4, 4, 3, groups=4),
    "ConvTranspose3d": nn.ConvTranspose3d(2, 5, (1, 2, 3)),
}
EACH_LAYER = pytest.mark.parametrize("name", LAYERS)


def weight_of(name: str) -> tuple[Tensor, Layout]:
    return LAYERS[name].weight.detach(), layout_of(LAYERS[name])


@EACH_LAYER
def test_rows_are_the_filters(name: str) -> None:
    weight, layout = weight_of(name)
    expected = filter_rows(weight.double().numpy(), transposed=layout.transposed, groups=layout.groups)
    np.testing.assert_array_equal(matrix_view(weight, layout).double().numpy(), np.array(expected))


@pytest.mark.parametrize("name", [name for name in LAYERS if "Embedding" not in name])
def test_a_row_makes_an_output_channel(name: str) -> None:
    """Zeroing the last row silences exactly the last output channel of its group."""
    layer, (weight, layout) = LAYERS[name], weight_of(name)
    matrices = matrix_view(weight, layout).clone()
    matrices[-1, -1] = 0
    changed = unview(matrices, weight.shape, layout)
    x = torch.randn(2, weight.shape[1] if name == "Linear" else layer.in_channels, *[6] * (weight.ndim - 2))
    out = torch.func.functional_call(layer, {"weight": changed, "bias": torch.zeros_like(layer.bias)}, x)
    silent = (out == 0).transpose(0, 1).flatten(1).all(1)
    assert silent.tolist() == [False] * (len(silent) - 1) + [True]


@pytest.mark.parametrize(
    ("module", "name", "blocks"),
    [
        (nn.MultiheadAttention(8, 2), "in_proj_weight", 3),
        (nn.MultiheadAttention(8, 2, kdim=4, vdim=6), "k_proj_weight", 1),
        (nn.LSTM(3, 5), "weight_ih_l0", 4),
        (nn.LSTM(3, 5, proj_size=2), "weight_hr_l0", 1),
        (nn.GRU(3, 5, bidirectional=True), "weight_hh_l0_reverse", 3),
        (nn.RNN(3, 5), "weight_hh_l0", 1),
        (nn.LSTMCell(3, 5), "weight_ih", 4),
        (nn.GRUCell(3, 5), "weight_hh", 3),
        (nn.RNNCell(3, 5), "weight_ih", 1),
    ],
    ids=lambda value: str(value)[:20],
)
def test_stacked_weights_are_separate_matrices(module: nn.Module, name: str, blocks: int) -> None:
    weight, layout = getattr(module, name), layout_of(module, name)
    matrices = matrix_view(weight, layout)
    assert matrices.shape[0] == layout.blocks == blocks
    for block, chunk in zip(matrices, weight.chunk(blocks), strict=True):
        assert torch.equal(block, chunk)
    assert torch.equal(unview(matrices, weight.shape, layout), weight)


def test_the_order_of_taps_and_of_single_kernels() -> None:
    weight = torch.randn(6, 2, 3, 2).contiguous(memory_format=torch.channels_last)
    taps = matrix_view(weight, Layout(groups=2), view="taps")
    assert taps.shape == (2 * 6, 3, 2)
    assert torch.equal(taps[6 + 3], weight[3:, :, 1, 1])  # group 1, position (1, 1)
    assert torch.equal(matrix_view(weight, view="last_two")[2 * 2 + 1], weight[2, 1])


def test_hugging_face_transposed_linear() -> None:
    """It is known by its name, without importing transformers."""
    layer = type("Conv1D", (nn.Module,), {"__module__": "transformers.pytorch_utils"})()
    layer.weight = nn.Parameter(torch.randn(3, 5))
    assert torch.equal(matrix_view(layer.weight, layout_of(layer))[0], layer.weight.T)


@REPEATABLE
@given(
    groups=st.integers(1, 4),
    out=st.integers(1, 4),
    in_=st.integers(1, 4),
    kernel=st.lists(st.integers(1, 3), max_size=3),
    transposed=st.booleans(),
    view=st.sampled_from(VIEWS),
)
def test_round_trip_of_any_shape(
    groups: int, out: int, in_: int, kernel: list[int], transposed: bool, view: str
) -> None:
    shape = (groups * in_, out, *kernel) if transposed else (groups * out, in_, *kernel)
    layout = Layout(transposed=transposed, groups=groups)
    weight = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    matrices = matrix_view(weight, layout, view=view)
    if view == "filters":
        assert matrices.shape == (groups, out, in_ * torch.Size(kernel).numel())
    assert torch.equal(unview(matrices, shape, layout, view=view), weight)


@pytest.mark.parametrize(
    "shape", [(0, 3, 3, 3), (3, 0, 3, 3), (3, 2, 0, 3), (3, 2, 3, 0), (3, 2, 0, 0), (0, 3), (3, 0)]
)
@pytest.mark.parametrize("view", VIEWS)
def test_weights_without_entries_have_views(shape: tuple[int, ...], view: str) -> None:
    weight = torch.zeros(shape)
    matrices = matrix_view(weight, view=view)
    assert matrices.ndim == 3
    assert unview(matrices, shape, view=view).shape == weight.shape


def test_padding_and_stride_are_kept() -> None:
    layout = layout_of(nn.Conv2d(2, 4, 3, stride=(1, 2), padding=1, dilation=2))
    assert (layout.stride, layout.padding, layout.dilation) == ((1, 2), (1, 1), (2, 2))
    assert layout_of(nn.Conv2d(2, 4, 3, padding="same", padding_mode="reflect")).padding == "same"
    assert layout_of(nn.ConvTranspose1d(2, 4, 3, stride=2, output_padding=1)).output_padding == (1,)


@pytest.mark.parametrize(
    ("module", "name"),
    [(nn.BatchNorm2d(3), "weight"), (nn.Linear(2, 3), "bias"), (nn.LSTM(2, 3), "bias_ih_l0"), (nn.PReLU(), "weight")],
    ids=lambda value: str(value)[:12],
)
def test_what_has_no_filters_is_refused(module: nn.Module, name: str) -> None:
    with pytest.raises(NotApplicableError, match=rf"layout_of\(\): cannot be applied to .*{name}.*an explicit Layout"):
        layout_of(module, name)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: matrix_view(torch.zeros(3)), r"at least 2 dimensions; found shape \(3,\)"),
        (lambda: matrix_view(torch.zeros(4, 2), Layout(groups=3)), r"groups=3.* 3 equal parts; found shape \(4, 2\)"),
        (lambda: matrix_view(torch.zeros(4, 2), view="rows"), "one of 'filters', 'taps', 'last_two'; found 'rows'"),
        (lambda: unview(torch.zeros(4, 2), (4, 2)), r"of shape \(1, 4, 2\); found shape \(4, 2\)"),
        (lambda: Layout(groups=0), "groups >= 1 and blocks >= 1; found groups=0"),
    ],
)
def test_refusals(call, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        call()
