"""How layers of torch store their weights, and how a weight becomes matrices."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, get_args

import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gonio.errors import InvalidArgumentError, NotApplicableError
from gonio.execution import is_sharded, replicated

View = Literal["filters", "taps", "last_two"]
VIEWS = get_args(View)
ATTENTION = {"in_proj_weight": 3, "q_proj_weight": 1, "k_proj_weight": 1, "v_proj_weight": 1}  # blocks of each


@dataclass(frozen=True)
class Layout:
    """How a weight tensor is stored and, for a convolution, how it is applied.

    The default is output filters on dim 0, one group, one matrix.

    Args:
        transposed: output filters are on dim 1 within each group, as in ``ConvTranspose``.
        groups: of a convolution; filters of different groups act on different inputs and form separate matrices.
        blocks: independent matrices stacked on dim 0 (3 for packed attention and GRU, 4 for LSTM).
        stride, padding, dilation, output_padding: as torch's; ``()`` for torch's default in each dimension.
        padding_mode: ``"zeros"``, ``"circular"``, ``"reflect"`` or ``"replicate"``.

    Example:
        >>> gonio.geometry.layout_of(nn.Conv2d(4, 8, 3, groups=2)).groups
        2
    """

    transposed: bool = False
    groups: int = 1
    blocks: int = 1
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] | str = ()
    dilation: tuple[int, ...] = ()
    output_padding: tuple[int, ...] = ()
    padding_mode: str = "zeros"

    def __post_init__(self) -> None:
        if self.groups < 1 or self.blocks < 1:
            raise InvalidArgumentError(
                "Layout needs groups >= 1 and blocks >= 1",
                f"groups={self.groups}, blocks={self.blocks}",
                "Use 1 for a weight that is a single matrix.",
            )

    @property
    def matrices(self) -> int:
        """Number of matrices of the filters view."""
        return self.groups * self.blocks

    def per_axis(self, dims: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Stride and dilation with one number for each of so many kernel dimensions."""
        return self.stride or (1,) * dims, self.dilation or (1,) * dims


PLAIN = Layout()
_OF_GATES = re.compile(r"weight_(ih|hh)(_l\d+(_reverse)?)?")
_OF_PROJECTION = re.compile(r"weight_hr_l\d+(_reverse)?")


def layout_of(module: nn.Module, name: str = "weight") -> Layout:
    """The layout of the tensor `name` of a layer.

    Covers Linear, Embedding, EmbeddingBag, Conv1–3d, ConvTranspose1–3d (all with groups), the packed and the
    separate projections of MultiheadAttention, the weights of RNN, LSTM, GRU and their cells, and the
    transposed linear layer ``Conv1D`` of Hugging Face.

    Raises: NotApplicableError if the tensor is not a weight with filters of one of these layers.

    Example:
        >>> gonio.geometry.layout_of(nn.LSTM(3, 5), "weight_ih_l0").blocks
        4
    """
    is_weight = name == "weight"
    if isinstance(module, nn.MultiheadAttention) and name in ATTENTION:
        return Layout(blocks=ATTENTION[name])
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)) and _OF_GATES.fullmatch(name):
        gates = {nn.LSTM: 4, nn.LSTMCell: 4, nn.GRU: 3, nn.GRUCell: 3}
        return Layout(blocks=next((n for kind, n in gates.items() if isinstance(module, kind)), 1))
    if isinstance(module, nn.LSTM) and _OF_PROJECTION.fullmatch(name):  # its output projection
        return PLAIN
    if is_weight and isinstance(module, (nn.Linear, nn.Embedding, nn.EmbeddingBag)):
        return PLAIN
    if is_weight and isinstance(module, nn.modules.conv._ConvNd):
        return Layout(
            transposed=module.transposed,
            groups=module.groups,
            stride=tuple(module.stride),
            padding=module.padding if isinstance(module.padding, str) else tuple(module.padding),
            dilation=tuple(module.dilation),
            output_padding=tuple(module.output_padding) if module.transposed else (),
            padding_mode=module.padding_mode,
        )
    if is_weight and "transformers.pytorch_utils.Conv1D" in {
        f"{c.__module__}.{c.__qualname__}" for c in type(module).__mro__
    }:
        return Layout(transposed=True)
    raise NotApplicableError(
        "layout_of()",
        f"{type(module).__name__}.{name}",
        "it is not a weight with filters of a known layer",
        "Known: Linear, Embedding, Conv1–3d, ConvTranspose1–3d, MultiheadAttention, RNN, LSTM, GRU; "
        "for other layers pass an explicit Layout.",
    )


def has_filters(module: nn.Module, name: str = "weight") -> bool:
    """Whether the tensor `name` of a layer is a weight with filters, as :func:`layout_of` knows them."""
    try:
        layout_of(module, name)
    except NotApplicableError:
        return False
    return True


def why_not_dense(tensor: Tensor | None) -> str | None:
    """Why the entries of a weight cannot be computed with; None if they can.

    Example:
        >>> from gonio.geometry.views import why_not_dense
        >>> why_not_dense(nn.Linear(2, 2, dtype=torch.complex64).weight)
        'its weight is complex'
    """
    if tensor is None:
        return None
    if is_lazy(tensor):
        return "it is lazy; run one batch first"
    if tensor.numel() == 0:
        return "its weight has no entries"
    if tensor.is_complex():
        return "its weight is complex"
    if tensor.layout is not torch.strided:
        return f"its weight is stored as {str(tensor.layout).removeprefix('torch.')}"
    kind = type(tensor)
    own = kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ and kind is not nn.Parameter
    if own and not is_sharded(tensor) and not kind.__module__.startswith("torch._subclasses"):
        return f"its weight is stored as {kind.__name__}, whose entries cannot be set"
    computed = tensor.is_floating_point() and tensor.dtype.itemsize > 1  # torch computes with no float of 8 bits
    return None if computed else f"its weight is quantised to {str(tensor.dtype)[6:]}"


def matrix_view(weight: Tensor | ArrayLike, layout: Layout = PLAIN, *, view: View = "filters") -> Tensor:
    r"""The matrices of a weight, one filter per row.

    ``"filters"``
        each output filter flattened: ``groups·blocks`` matrices of ``out/groups`` rows and ``in/groups·kernel``
        columns. Orthogonality of filters refers to this view.
    ``"taps"``
        one (out/groups, in/groups) matrix per kernel position and group; groups vary slowest.
    ``"last_two"``
        the last two stored dims, batched over the rest, as in torch's ``parametrizations.orthogonal``. For a
        convolution these are single 2-D kernels, whose orthogonality does not imply that of the filters.

    The result is a view of `weight` if its strides allow, and differentiable.

    Shape: (out, in/groups, *kernel), or (in, out/groups, *kernel) if transposed → (matrices, rows, columns).
    Raises: InvalidArgumentError if the shape does not fit the layout, or the view is unknown.

    Example:
        >>> conv = nn.ConvTranspose2d(4, 6, 3, groups=2)
        >>> gonio.geometry.matrix_view(conv.weight, gonio.geometry.layout_of(conv)).shape
        torch.Size([2, 3, 18])

    See also: :func:`unview`, its exact inverse; :func:`operator_matrix`, the map on feature maps.
    """
    weight = weight if isinstance(weight, Tensor) else torch.as_tensor(weight, device="cpu")
    check_shape(weight.shape, layout)
    if view not in VIEWS:
        raise InvalidArgumentError(
            "view must be one of 'filters', 'taps', 'last_two'", f"{view!r}", "Choose one of them."
        )
    if view == "last_two":
        blocks = layout.blocks if weight.ndim == 2 else 1
        return weight.reshape(prod(weight.shape[:-2]) * blocks, weight.shape[-2] // blocks, weight.shape[-1])
    count = layout.matrices
    if view == "filters" and count == 1 and not layout.transposed:
        return weight.flatten(1).unsqueeze(0)
    if count > 1 and is_sharded(weight) and count % weight.device_mesh.size():  # type: ignore[attr-defined]
        weight = replicated(weight)  # shards that cut through matrices
    filters = weight.unflatten(0, (count, -1))
    filters = filters.transpose(1, 2) if layout.transposed else filters  # (matrices, out, in, *kernel)
    if view == "filters":
        return filters.flatten(2)
    return filters.flatten(3).movedim(-1, 1).flatten(0, 1) if weight.ndim > 2 else filters


def view_shape(shape: Sequence[int], layout: Layout = PLAIN, *, view: View = "filters") -> torch.Size:
    """The shape of :func:`matrix_view` of a weight of this shape: the numbers of matrices, rows and columns."""
    return matrix_view(torch.empty(shape, device="meta"), layout, view=view).shape


def unview(
    matrix: Tensor | ArrayLike, shape: Sequence[int], layout: Layout = PLAIN, *, view: View = "filters"
) -> Tensor:
    """The weight of `shape` whose :func:`matrix_view` is `matrix`; exact, no arithmetic.

    Raises: InvalidArgumentError if `matrix` is not of the form that the view of such a weight has.

    Example:
        >>> weight = torch.randn(4, 6, 3, 3)
        >>> rows = gonio.geometry.matrix_view(weight, view="taps")
        >>> torch.equal(gonio.geometry.unview(rows, weight.shape, view="taps"), weight)
        True
    """
    rows = matrix if isinstance(matrix, Tensor) else torch.as_tensor(matrix, device="cpu")
    shape = torch.Size(shape)
    expected = tuple(view_shape(shape, layout, view=view))
    if tuple(rows.shape) != expected:
        raise InvalidArgumentError(
            f"unview() to a weight of shape {tuple(shape)} needs its {view!r} matrices, of shape {expected}",
            f"shape {tuple(rows.shape)}",
            "Pass the result of matrix_view() with the same layout and view.",
        )
    if view == "last_two":
        return rows.reshape(shape)
    if view == "taps":
        rows = rows.unflatten(0, (layout.matrices, -1)).movedim(1, -1)
    return from_matrices(rows, shape, layout)


def from_matrices(matrices: Tensor, shape: torch.Size, layout: Layout) -> Tensor:
    """:func:`unview` of the filters view, without its checks."""
    stored = (shape[0] // layout.matrices, shape[1])
    rows, cols = reversed(stored) if layout.transposed else stored
    filters = matrices.reshape(layout.matrices, rows, cols, *shape[2:])
    return (filters.transpose(1, 2) if layout.transposed else filters).reshape(shape)


def check_shape(shape: Sequence[int], layout: Layout) -> None:
    """Raise unless a weight of `shape` can have this layout."""
    if len(shape) < 2:
        raise InvalidArgumentError(
            "a matrix view needs a weight with at least 2 dimensions",
            f"shape {tuple(shape)}",
            "Exclude biases and normalisation scales, which have no filters.",
        )
    if shape[0] % layout.matrices:
        raise InvalidArgumentError(
            f"groups={layout.groups}, blocks={layout.blocks} split dim 0 into {layout.matrices} equal parts",
            f"shape {tuple(shape)}",
            "Take the layout from the layer with gonio.geometry.layout_of(module).",
        )
