"""Spectral normalisation: the largest gain of a layer is a constant."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from gonio.errors import InvalidArgumentError
from gonio.geometry.precision import widen
from gonio.geometry.views import Layout
from gonio.parametrizations.parametrization import Parametrization
from gonio.parametrizations.spectral_convolution import ConvolutionView
from gonio.parametrizations.spectral_division import divided, gains
from gonio.parametrizations.spectral_views import FilterView, SpectralView

__all__ = ["SpectralNorm"]

Of = Literal["filters", "conv"]
_UNTICKED = 100  # changes of the weight without a tick after which training is warned


class SpectralNorm(Parametrization):
    r"""A weight of spectral norm n: :math:`W = n \, V / \sigma(V)`.

    What :math:`\sigma` is the norm of is chosen by `view`:

    ``"filters"``
        the largest singular value of the matrices with one flattened filter per row, the largest over
        groups. For a convolution this is what the literature calls spectral normalisation, and it does *not*
        bound the layer: the operator's norm can be up to :math:`\sqrt{k_h k_w}` times larger.
    ``"conv"``
        a sound bound of the operator on feature maps of any size, with its stride, dilation, groups and zero
        or circular padding: the exact circular norm on a grid of 8r points per dimension (r the kernel's
        reach), times the 2 % per dimension by which a frequency between grid points can exceed it. The
        effective operator norm therefore lies in :math:`[0.96\,n, n]` for a 3×3 kernel, up to the convergence
        of the power iteration. A linear layer and a 1×1 convolution are their matrix in either view.

    :math:`\sigma = u^\top V v` with unit vectors that a power iteration improves. The vectors are constants in
    the backward pass, whose gradient goes through :math:`u^\top V v`. **They move only in a tick**: call
    ``tick_(model)`` after each optimizer step, or once ``tick_on_step(optimizer, model)``. Reading the weight,
    evaluating, recomputing under activation checkpointing and logging never move them. They start exact (an
    SVD, or Lanczos steps for large weights). A zero weight stays zero, with the gradient of the identity.

    Args:
        view: ``"filters"`` or ``"conv"``.
        norm: n > 0, the largest gain.

    Shape:
        - any weight with a :class:`gonio.geometry.Layout`.

    Invariances:
        Rescaling the trained tensor by a positive factor.

    Raises:
        InvalidArgumentError: for another view, for n that is not positive and finite, and on attaching with
            ``view="conv"`` to a layer with reflected or replicated padding, whose operator has no such bound.

    Cost:
        two passes over the weight forward (one for :math:`Vv`) and two backward, and two per tick; ``"conv"``
        ticks cost two products of the size of a convolution of an 8r × 8r map, and keep one vector per
        frequency (144 · in numbers for 3×3).

    Folding:
        exact: ``detach(layer, "weight", keep="weight")``.

    Example:
        >>> layer = nn.Conv2d(3, 8, 3)
        >>> conv = gonio.parametrizations.SpectralNorm(view="conv")
        >>> _ = gonio.parametrizations.attach(layer, "weight", conv)
        >>> norm = gonio.geometry.conv_spectral_norm(layer.weight, (64, 64))
        >>> bool(0.95 < norm <= 1)
        True

    References:
        T. Miyato et al., "Spectral normalization for generative adversarial networks", ICLR 2018, section 2.1
        and Appendix A. https://arxiv.org/abs/1802.05957
        Differs: the paper, and torch, advance the vectors at each training forward; a grouped layer is one
        matrix there, whose groups then have norms below 1; a zero weight is NaN there.
    """

    options: ClassVar[tuple[str, ...]] = ("view", "norm")

    def __init__(self, *, view: Of = "filters", norm: float = 1.0) -> None:
        super().__init__()
        if view not in get_args(Of):
            raise InvalidArgumentError('SpectralNorm has view="filters" or "conv"', repr(view), "Choose one.")
        if not 0 < norm < float("inf"):
            raise InvalidArgumentError("SpectralNorm needs a finite norm > 0", f"{norm}", "Often it is 1.")
        self.view = view
        self.norm = float(norm)
        self.u: Tensor | None
        self.v: Tensor | None
        self.length: Tensor | None
        for name in ("u", "v", "length", "basis"):
            self.register_buffer(name, None)
        self.how: SpectralView | None = None
        self._seen, self._unticked = -1, 0

    @torch.no_grad()
    def bind(self, weight: Tensor, layout: Layout) -> None:
        wide = widen(weight.detach())
        self.how = _view_of(self.view, layout, wide)
        for name, value in self.how.start(self.how.matrices(wide)).items():
            setattr(self, name, value)
        super().bind(weight, layout)

    def weight_of(self, raw: Tensor) -> Tensor:
        kept = self._buffers  # the registry itself: `self.u` is a slow search
        u, v, how = kept["u"], kept["v"], self.how
        if how is None or u is None or v is None:  # a template has no vectors to keep
            how = _view_of(self.view, self.bound_layout, raw)
            state = how.start(how.matrices(raw.detach()))
            return divided(raw, state["u"], state["v"], state.get("length"), how, self.norm / how.margin)
        self._watch(raw)
        return divided(raw, u, v, kept["length"], how, self.norm / how.margin)

    @torch.no_grad()
    def sigma(self, raw: Tensor) -> Tensor:
        """The norm of the trained tensor as the vectors show it now: what the weight is divided by.

        For ``view="conv"`` the circular norm on the grid, without the margin for other grids.
        """
        if self.how is None or self.u is None or self.v is None:
            raise InvalidArgumentError("sigma() reads bound vectors", "a template", "Attach it to a layer.")
        return gains(self.how.matrices(widen(raw)), self.u, self.v, self.length)[0].amax(0)

    def measured(self, weight: Tensor) -> float:
        """The largest gain of a weight, found anew and not by the vectors; for ``view="conv"`` that of the operator.

        Example:
            >>> layer = nn.Linear(8, 8)
            >>> sn = gonio.parametrizations.attach(layer, "weight", gonio.parametrizations.SpectralNorm())
            >>> round(sn.measured(layer.weight), 3)
            1.0
            >>> raw = next(layer.parameters())
            >>> _ = raw.data.copy_(torch.diag(torch.arange(1.0, 9.0)))  # a change without a tick
            >>> sn.measured(layer.weight) > 1.05
            True
        """
        return _view_of(self.view, self.bound_layout, weight).measured(weight.detach())

    def holds(self, weight: Tensor) -> bool:
        """Whether the largest gain is `norm` within 1 %; with ``view="conv"``, at most 1 % above, and below by
        no more than 1 % and the margin."""
        how = _view_of(self.view, self.bound_layout, weight)
        low, high = 0.99 * self.norm / how.margin, 1.01 * self.norm
        return low <= self.measured(weight) <= high

    def adopt(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        """Take over torch's u and v, if the layer has one matrix and the norm is torch's, 1."""
        u, v, original = (tensors.get(name) for name in ("u", "v", "original"))
        if u is None or v is None or self.u is None or self.v is None or self.norm != 1:
            return None
        if self.view != "filters" or u.numel() != self.u.numel() or v.numel() != self.v.numel():
            return None
        self.u, self.v = u.detach().clone().view_as(self.u), v.detach().clone().view_as(self.v)
        return original

    def ticked(self) -> None:
        """Note that the vectors are fresh."""
        self._unticked = 0

    def _watch(self, raw: Tensor) -> None:
        """Count changes of the weight without a tick, and say so once when they become many."""
        training = self.training and torch.is_grad_enabled() and isinstance(raw, nn.Parameter)
        if not training or torch.compiler.is_compiling() or raw._version == self._seen:
            return
        self._seen = raw._version
        self._unticked += 1
        if self._unticked == _UNTICKED:
            warnings.warn(
                f"{self} saw its weight change {_UNTICKED} times without a tick, so its singular vectors are old "
                f"and the norm may be above {self.norm}. Call gonio.parametrizations.tick_on_step(optimizer, "
                f"model) once, or tick_(model) after each step.",
                stacklevel=2,
            )


def _view_of(view: Of, layout: Layout, weight: Tensor) -> SpectralView:
    matrix = weight[0, 0].numel() == 1  # without neighbours the map on images is the matrix at each pixel
    kind = FilterView if view == "filters" or matrix else ConvolutionView
    if kind is ConvolutionView and layout.padding_mode not in ("zeros", "circular"):
        raise InvalidArgumentError(
            'SpectralNorm(view="conv") bounds layers with zero or circular padding',
            f"padding_mode={layout.padding_mode!r}, which repeats pixels and can exceed every such bound",
            "Use zero padding, or leave the layer out.",
        )
    return kind.of(layout, weight.shape)
