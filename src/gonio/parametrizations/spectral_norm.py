"""Spectral normalisation: the largest gain of a layer is a constant, and power iteration follows it."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from gonio.errors import InvalidArgumentError
from gonio.execution import apply, autocast_is_on, is_sharded, ordinary_eager
from gonio.geometry.norms import full_precision, whole, widen
from gonio.geometry.views import Layout
from gonio.parametrizations.kernels import STALE, DividedBySpectralNorm, iterate_, matrix_of
from gonio.parametrizations.mechanism import Parametrized, child_name
from gonio.parametrizations.parametrization import Parametrization
from gonio.parametrizations.spectral_views import ConvolutionView, FilterView, SpectralView

Of = Literal["filters", "conv"]
_UNTICKED = 100  # changes of the weight without a tick, after which a warning is given


class SpectralNorm(Parametrization):
    r"""A weight of spectral norm n (the option `norm`): :math:`W = n \, V / \sigma(V)`.

    `view` chooses the operator whose norm :math:`\sigma` is:

    ``"filters"``
        the matrices with one flattened filter per row; :math:`\sigma` is the largest singular value of all
        groups. For a convolution this is what the literature calls spectral normalisation, and it does *not*
        bound the layer: the operator's norm can be up to :math:`\sqrt{k_h k_w}` times larger.
    ``"conv"``
        the operator on feature maps of any size, with its stride, dilation, groups and zero or circular
        padding, for which :math:`\sigma` is a sound bound: the exact circular norm on a grid of 8r points per
        dimension (r the kernel's reach), times the 2 % per dimension by which a frequency between grid points
        can exceed it. The effective operator norm therefore lies in :math:`[0.96\,n, n]` for a 3×3 kernel, up
        to the convergence of the power iteration. A linear layer and a 1×1 convolution are their matrix in
        either view.

    :math:`\sigma = u^\top V v` with unit vectors that a power iteration improves. The vectors are constants in
    the backward pass, whose gradient goes through :math:`u^\top V v`. **They change only in a tick**: call
    ``tick_(model)`` after each optimizer step, or once ``tick_on_step(optimizer, model)``. Reading the weight,
    evaluation, recomputation under activation checkpointing and logging never change them. They start exact (an
    SVD, or Lanczos steps for large weights). A zero weight stays zero, with the gradient of the identity.

    Invariances: Rescaling the trained tensor by a positive factor.

    Raises:
        InvalidArgumentError: for another view, for n that is not positive and finite, and on attaching with
            ``view="conv"`` to a layer with reflected or replicated padding, whose operator has no such bound.

    Cost:
        two passes over the weight forward (one for :math:`Vv`) and two backward, and two per tick; ``"conv"``
        ticks cost two products of the size of a convolution of an 8r × 8r map, and store one vector per
        frequency (144 · in numbers for 3×3).

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
            # Not a view, such as a column of the SVD: safetensors saves only tensors that fill their storage.
            setattr(self, name, value.clone(memory_format=torch.contiguous_format))
        super().bind(weight, layout)

    def weight_of(self, raw: Tensor) -> Tensor:
        if is_sharded(raw):  # every process stores the vectors of the whole weight
            return _sharded_like(raw, self.weight_of(whole(raw)))
        buffers = self._buffers  # the registry itself: `self.u` is a slow search
        u, v, how = buffers["u"], buffers["v"], self.how
        if how is None or u is None or v is None:  # a template stores no vectors
            how = _view_of(self.view, self.bound_layout, raw)
            start = how.start(how.matrices(raw.detach()))
            return _divided(raw, start["u"], start["v"], start.get("length"), how, self.norm / how.margin)
        state = u, v, buffers["length"], how, self.norm / how.margin
        if not ordinary_eager(raw, u, v):
            return _divided(raw, *state)
        self._watch(raw)
        fast = raw.is_cpu and u.shape[0] == 1 and u.dtype is v.dtype is raw.dtype
        weight: Tensor = apply(DividedBySpectralNorm, raw, state) if fast else _divided(raw, *state)
        return weight

    @torch.no_grad()
    def sigma(self, raw: Tensor) -> Tensor:
        """The norm of the trained tensor that the vectors show now, by which the weight is divided.

        For ``view="conv"`` the circular norm on the grid, without the margin for other grids.
        """
        if self.how is None or self.u is None or self.v is None:
            raise InvalidArgumentError("sigma() reads bound vectors", "a template", "Attach it to a layer.")
        return _sigma(self.how.matrices(widen(whole(raw))), self.u, self.v, self.length)

    def measured(self, weight: Tensor) -> float:
        """The largest gain of a weight, computed without the vectors; for ``view="conv"`` that of the operator.

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
        weight = whole(weight.detach())
        return _view_of(self.view, self.bound_layout, weight).measured(weight)

    def remarks(self, weight: Callable[[], Tensor]) -> tuple[str, ...]:
        """The gain now and the one it is set to: the vectors may be outdated."""
        used = weight()
        if used.is_meta or not used.isfinite().all():
            return ()
        of = "of the convolution" if self.view == "conv" else "of the filters' matrix"
        return (f"its largest gain, {of}, is {self.measured(used):.4g} for a norm of {self.norm:g}",)

    def holds(self, weight: Tensor) -> bool:
        """Whether the largest gain is `norm` within 1 %; with ``view="conv"``, at most 1 % above, and below by
        no more than 1 % and the margin."""
        how = _view_of(self.view, self.bound_layout, weight)
        low, high = 0.99 * self.norm / how.margin, 1.01 * self.norm
        return low <= self.measured(weight) <= high

    def adopt(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        """Take over torch's u and v, if the layer has one matrix and the norm is torch's, 1."""
        u, v, original = (tensors.get(name) for name in ("u", "v", "original"))
        if u is None or v is None or self.u is None or self.v is None or self.norm != 1 or self.view != "filters":
            return None
        if self.bound_layout.matrices > 1:
            problem = "SpectralNorm normalises each group of a layer as a matrix of its own"
            groups = f"a checkpoint of torch's spectral norm of {self.bound_layout.matrices} groups"
            found = f"{groups}, which is one matrix there: loading it would rescale the weight"
            do = "Load the effective weight: plain_state_dict(state_dict), which is rescaled to the norm."
            raise InvalidArgumentError(problem, found, do)
        self.u, self.v = u.detach().clone().view_as(self.u), v.detach().clone().view_as(self.v)
        return original

    def _iterated_(self, raw: Tensor, iterations: int) -> bool:
        """Advance an ordinary eager tensor by the fast form; False where it does not apply."""
        u, v, how = self._buffers["u"], self._buffers["v"], self.how
        if u is None or v is None or not isinstance(how, FilterView) or not raw.is_cpu or u.shape[0] != 1:
            return False
        if not u.dtype is v.dtype is raw.dtype or autocast_is_on(raw):
            return False
        iterate_(matrix_of(raw, how), u.view(-1), v.view(-1), iterations)
        return True

    def _watch(self, raw: Tensor) -> None:
        """Count changes of the weight without a tick, and warn once if they are many."""
        state = self.__dict__  # itself: `nn.Module.__setattr__` is a slow search
        if raw._version == state["_seen"] or not (state["training"] and raw.is_leaf and torch.is_grad_enabled()):
            return
        state["_seen"] = raw._version
        state["_unticked"] += 1
        if state["_unticked"] == _UNTICKED:
            text = (
                f"{self} saw its weight change {_UNTICKED} times without a tick, so its singular vectors are old and "
                f"the norm may be above {self.norm}. Call gonio.parametrizations.tick_on_step(optimizer, model) once, "
                "or tick_(model) after each step."
            )
            warnings.warn(text, stacklevel=2)


def _sharded_like(raw: Any, weight: Tensor) -> Tensor:
    """A weight that is the same in every process, distributed as the DTensor `raw` is; differentiable."""
    everywhere: Any = raw.from_local(weight, raw.device_mesh, run_check=False)
    distributed: Tensor = everywhere.redistribute(placements=raw.placements)
    return distributed


def _view_of(view: Of, layout: Layout, weight: Tensor) -> SpectralView:
    matrix = weight[0, 0].numel() == 1  # without neighbours the map on images is the matrix at each pixel
    kind = FilterView if view == "filters" or matrix else ConvolutionView
    if kind is ConvolutionView and layout.padding_mode not in ("zeros", "circular"):
        found = f"padding_mode={layout.padding_mode!r}, which repeats pixels and can exceed every such bound"
        problem = 'SpectralNorm(view="conv") bounds layers with zero or circular padding'
        raise InvalidArgumentError(problem, found, "Use zero padding, or exclude the layer.")
    return kind.of(layout, weight.shape)


def _divided(raw: Tensor, u: Tensor, v: Tensor, length: Tensor | None, view: SpectralView, norm: float) -> Tensor:
    """`raw` times `norm` over its spectral norm; a zero weight is returned unchanged."""
    sigma = _sigma(view.matrices(raw), u, v, length)
    zero = sigma < torch.finfo(sigma.dtype).tiny ** 0.5
    # A division, whose gradient needs the quotient, which the layer keeps anyway: compiled, a product keeps `raw` too.
    # A sum, where the norm is 0 and 1 is added: a choice of the two would be kept for the gradient.
    return raw / (sigma / norm + zero)


def _sigma(matrices: Tensor, u: Tensor, v: Tensor, length: Tensor | None) -> Tensor:
    """The largest norm that the vectors show for a group; see Note [Stale vectors].

    The vectors are constants, and need not be of unit length (averaged or half-precision buffers are not).
    """
    u, v = (x.detach().to(matrices.dtype) for x in (u, v))
    image = torch.bmm(v, matrices.mT)  # (groups, parts, rows); as in a tick, so that a compiler computes it once
    of_u, of_v, of_image = (_size(x) for x in (u, v, image.detach()))
    stale = (u * image.detach()).sum((1, 2)) / of_u < STALE * of_image
    left, of_left = torch.where(stale[:, None, None], image.detach(), u), torch.where(stale, of_image, of_u)
    length = torch.ones_like(of_v) if length is None else length.detach().to(of_v.dtype)
    left = left / of_left[:, None, None] * (length / of_v)[:, None, None]  # one factor for both would overflow
    norms = (left * image).sum((1, 2))
    return norms.amax(0) if len(norms) > 1 else norms[0]


def _size(x: Tensor) -> Tensor:
    """The norm of each group's vector, above 0."""
    return torch.linalg.vector_norm(x, dim=(1, 2)).clamp_min(torch.finfo(x.dtype).tiny ** 0.5)


# --- ticks: power iterations, once per optimizer step and nowhere else -----------------------------


def tick_(model: nn.Module, *, iterations: int = 1) -> int:
    """Advance the singular vectors of every spectral norm in a model, in place.

    Call it after each optimizer step; :func:`gonio.surgery.tick_on_step` does so. One that several layers share is
    advanced once.
    Nothing else changes: no weight, no other buffer, no random generator. After a large change, such as averaging
    weights, more than one of the `iterations` of the power method is needed. With ``torch.compile``, a call at the
    start of the compiled function, before the model's, becomes a part of its graph and costs less than one outside.

    Returns: The number of parametrizations that were advanced.
    Raises: InvalidArgumentError if `iterations` is below 1.

    Example:
        >>> layer = nn.Linear(8, 8)
        >>> sn = gonio.parametrizations.attach(layer, "weight", gonio.parametrizations.SpectralNorm())
        >>> raw = next(layer.parameters())
        >>> _ = raw.data.copy_(torch.diag(torch.arange(1.0, 9.0)))  # a step much larger than any optimizer's
        >>> sn.holds(layer.weight)
        False
        >>> gonio.parametrizations.tick_(layer, iterations=100), sn.holds(layer.weight)
        (1, True)
    """
    if iterations < 1:
        raise InvalidArgumentError("tick_() needs iterations >= 1", f"{iterations}", "Use 1 per step.")
    stacks: dict[Any, list[tuple[SpectralNorm, Tensor]]] = defaultdict(list)
    found = dict(_spectral_norms(model))
    eager = ordinary_eager(*found.values())
    with torch.no_grad():
        for norm, raw in found.items():
            norm.__dict__["_unticked"] = 0  # itself: `nn.Module.__setattr__` is a slow search
            if not (eager and norm._iterated_(raw, iterations)):
                # Compiled, each is a stack of its own: a view as a key would make each of its fields a guard.
                key = norm if torch.compiler.is_compiling() else (norm.how, raw.device, raw.dtype)
                stacks[key].append((norm, raw))
        for stack in stacks.values():
            with full_precision(stack[0][1]):
                _advance_([norm for norm, _ in stack], [raw for _, raw in stack], iterations)
    return len(found)


def _spectral_norms(model: nn.Module) -> Iterator[tuple[SpectralNorm, Tensor]]:
    """Each bound spectral norm with its raw tensor; a shared one may occur several times."""
    left: list[nn.Module | None] = [model]
    seen = set()
    while left:  # as `model.modules()`, without its nested generators: 10 µs of the 160 µs of a small network's tick
        module = left.pop()
        if module is None or module in seen:
            continue
        seen.add(module)
        left += module._modules.values()
        if not isinstance(module, Parametrized):
            continue
        for name in module.parametrized_names:
            found, raw = module._modules[child_name(name)], module._parameters.get(name)
            if isinstance(found, SpectralNorm) and raw is not None:
                yield found, whole(raw)  # each process stores the vectors of the whole weight


def _advance_(norms: list[SpectralNorm], raws: list[Tensor], iterations: int) -> None:
    """Power iterations of weights of one shape, as one stack."""
    how = norms[0].how
    if how is None:
        return
    matrices = _stacked([how.matrices(widen(raw)) for raw in raws])
    buffers: list[dict[str, Any]] = [norm._buffers for norm in norms]
    state = {name: _stacked([each[name].to(matrices.dtype) for each in buffers]) for name in how.state}
    for _ in range(iterations):
        state = how.step(matrices, state)
    for name, value in state.items():
        parts = value.chunk(len(norms)) if len(norms) > 1 else [value]
        for each, part in zip(buffers, parts, strict=True):
            each[name].copy_(part)


def _stacked(tensors: list[Tensor]) -> Tensor:
    return torch.cat(tensors) if len(tensors) > 1 else tensors[0]
