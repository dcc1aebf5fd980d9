"""Spectral normalisation: the largest gain of a layer is a constant, and power iteration follows it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Self, get_args

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from gonio.editing.edit import Edit, Edited
from gonio.editing.memory import version_of
from gonio.editing.steps import expect_steps_, watch
from gonio.editing.where import sites
from gonio.errors import InvalidArgumentError, NoMatchError
from gonio.execution import apply, count_uncounted_steps, cut_like, is_sharded, ordinary_eager
from gonio.geometry.norms import WIDE, full_precision, normalize, whole, widen
from gonio.geometry.views import Layout
from gonio.messages import say
from gonio.parametrizations.kernels import STALE, DividedBySpectralNorm, top_vectors
from gonio.parametrizations.mechanism import Parametrized, child_name, parametrization_of
from gonio.parametrizations.parametrization import Parametrization, describe, positive
from gonio.parametrizations.spectral_views import ConvolutionView, FilterView, SpectralView

Of = Literal["filters", "conv"]
STALE_VERSION = -1  # of a weight to which the vectors do not belong

# Note [When the vectors advance]
# Every change of a tensor in place raises torch's version counter (gonio raises it after steps that do not: those of
# fused optimizers, and those on lists of shards). In training mode the first read of the weight after a change of the
# trained Parameter advances the vectors, once, and so does `eval()`; every other read, such as a second forward of one
# step or the recomputation of a checkpointed forward, finds them current. A weight that changes in evaluation mode, as
# that of an averaged copy, gets vectors that are computed for it alone and are not stored. A compiler sees no versions:
# compiled, every forward in training mode advances the vectors, as a part of the graph. Under FSDP 2 the version is
# that of the sharded Parameter. Vectors that others wrote, as `torch.distributed.checkpoint` does in place, are looked
# at first: they may belong to the weight.


class SpectralNorm(Parametrization):
    r"""A weight of spectral norm n (the option `norm`), :math:`W = n \, V / \sigma(V)`, or of at most c (`at_most`).

    With `at_most` only what exceeds c is scaled: :math:`W = V \min(1, c / \sigma(V))`. A weight within the bound is
    V itself, with the gradient of the identity.

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
        to the convergence of the power iteration; under `at_most` an operator norm above 0.96 c may count as
        above c. A linear layer and a 1×1 convolution are their matrix in either view.

    :math:`\sigma = u^\top V v` with unit vectors that start exact (an SVD, or Lanczos steps for large weights) and are
    improved by subspace iteration, for ``"conv"`` by power iteration. They are constants in the backward pass, whose
    gradient goes through :math:`u^\top V v`. In training mode they advance once for each change of the trained tensor,
    when the weight is next read; nothing has to be called. A second forward of one step, accumulation, recomputation
    under activation checkpointing and steps that a gradient scaler skips find them unchanged. In evaluation mode
    nothing changes them: a weight that has changed since, such as an average of weights, is divided by its own norm. A
    zero weight stays zero, with the gradient of the identity.

    Changes that torch does not count, through ``.data``, and replicas of ``nn.DataParallel`` need a call of
    :func:`tick_`.

    Invariances: Rescaling the trained tensor by a positive factor; with `at_most`, where both norms are above it.

    Raises:
        InvalidArgumentError: for another view, for n or c not positive and finite, for both given, and on attaching
            with ``view="conv"`` to a layer with reflected or replicated padding, whose operator has no such bound.

    Cost:
        two passes over the weight forward (one for :math:`Vv`) and two backward; per change of the weight its smaller
        Gram matrix up to a side of 64, else products with 32 vectors, of which 8 are stored. With ``"conv"`` a change
        costs two products of the size of a convolution of an 8r × 8r map, and one vector per frequency is stored
        (144 · in numbers for 3×3).

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
        Differs: the paper, and torch, advance the vectors at each training forward, also in one that is repeated; a
        grouped layer is one matrix there, whose groups then have norms below 1; a zero weight is NaN there.
    """

    options: ClassVar[tuple[str, ...]] = ("view", "norm", "at_most")

    def __init__(self, *, view: Of = "filters", norm: float = 1.0, at_most: float | None = None) -> None:
        super().__init__()
        if view not in get_args(Of):
            raise InvalidArgumentError('SpectralNorm has view="filters" or "conv"', repr(view), "Choose one.")
        self.norm = positive("SpectralNorm", "norm", norm, "Often it is 1.")
        self.at_most = None if at_most is None else positive("SpectralNorm", "at_most", at_most, "Often it is 1.")
        if at_most is not None and norm != 1:
            found = f"norm={norm:g} and at_most={at_most:g}"
            do = "Pass norm= to set the norm, or at_most= to bound it."
            raise InvalidArgumentError("SpectralNorm has one of norm= and at_most=", found, do)
        self.view = view
        self.u: Tensor | None
        self.v: Tensor | None
        self.length: Tensor | None
        for name in ("u", "v", "length", "basis"):
            self.register_buffer(name, None)
        self.view_impl: SpectralView | None = None
        self._adopted = False
        self._followed: int | None = None  # of the trained tensor when the vectors advanced; None: when it is next seen
        self._written = STALE_VERSION  # of u, when it advanced: another one says that others wrote the vectors
        self._evaluated: tuple[int, Mapping[str, Tensor]] | None = None  # a version, and the vectors computed for it

    @torch.no_grad()
    def bind(self, weight: Tensor, layout: Layout) -> None:
        wide = widen(weight.detach())
        self.view_impl = _view_of(self.view, layout, wide)
        for name, value in self.view_impl.start(self.view_impl.matrices(wide)).items():
            # Not a view, such as a column of the SVD: safetensors saves only tensors that fill their storage.
            setattr(self, name, value.clone(memory_format=torch.contiguous_format))
        super().bind(weight, layout)

    def rebind_(self, weight: Tensor) -> None:
        super().rebind_(weight)
        self._followed = None

    def forward(self, raw: Tensor) -> Tensor:
        if self._buffers["u"] is not None and not self._unset:
            self._follow_(raw)
        return super().forward(raw)

    def weight_of(self, raw: Tensor) -> Tensor:
        if is_sharded(raw):  # every process stores the vectors of the whole weight
            return cut_like(self.weight_of(whole(raw)), raw)
        state = self._vectors()
        view = self.view_impl
        if view is None:  # a template stores no vectors
            view = _view_of(self.view, self.bound_layout, raw)
            state = view.start(view.matrices(raw.detach()))
        u, v = state["u"], state["v"]
        constants = u, v, state.get("length"), view, self._bound / view.margin, self.at_most is not None
        fast = raw.is_cpu and u.shape[0] == 1 and u.dtype is v.dtype is raw.dtype and ordinary_eager(raw, u, v)
        weight: Tensor = apply(DividedBySpectralNorm, raw, constants) if fast else _divided(raw, *constants)
        return weight

    @torch.no_grad()
    def sigma(self, raw: Tensor) -> Tensor:
        """The norm of the trained tensor by which the weight is divided.

        For ``view="conv"`` the circular norm on the grid, without the margin for other grids.
        """
        if self.view_impl is None:
            raise InvalidArgumentError("sigma() reads bound vectors", "a template", "Attach it to a layer.")
        self._follow_(raw)
        state = self._vectors()
        return _sigma(self.view_impl.matrices(widen(whole(raw))), state["u"], state["v"], state.get("length"))

    def measured(self, weight: Tensor) -> float:
        """The largest gain of a weight, computed without the vectors; for ``view="conv"`` that of the operator.

        Example:
            >>> layer = nn.Linear(8, 8)
            >>> sn = gonio.parametrizations.attach(layer, "weight", gonio.parametrizations.SpectralNorm())
            >>> round(sn.measured(layer.weight), 3)
            1.0
            >>> raw = next(layer.parameters())
            >>> _ = raw.data.copy_(torch.diag(torch.arange(1.0, 9.0)))  # a change that torch does not count
            >>> sn.measured(layer.weight) > 1.05
            True
        """
        weight = whole(weight.detach())
        return _view_of(self.view, self.bound_layout, weight).measured(weight)

    def remarks(self, weight: Callable[[], Tensor]) -> tuple[str, ...]:
        """The gain now and the one it is set to: after a large step the vectors lag behind."""
        used = weight()
        if used.is_meta or not used.isfinite().all():
            return ()
        of = "of the convolution" if self.view == "conv" else "of the filters' matrix"
        set_to = f"a norm of {self.norm:g}" if self.at_most is None else f"at most {self.at_most:g}"
        return (f"its largest gain, {of}, is {self.measured(used):.4g} for {set_to}",)

    def holds(self, weight: Tensor) -> bool:
        """Whether the largest gain is `norm` within 1 %; with ``view="conv"``, at most 1 % above, and below by
        no more than 1 % and the margin. With `at_most`, whether it is at most 1 % above."""
        how = _view_of(self.view, self.bound_layout, weight)
        low, high = 0.99 * self.norm / how.margin if self.at_most is None else 0.0, 1.01 * self._bound
        return low <= self.measured(weight) <= high

    def adopt(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        """Take over torch's u and v, if the layer has one matrix and the norm is torch's, 1."""
        u, v, original = (tensors.get(name) for name in ("u", "v", "original"))
        torchs = self.norm == 1 and self.at_most is None and self.view == "filters"
        if u is None or v is None or self.u is None or self.v is None or not torchs:
            return None
        if self.bound_layout.matrices > 1:
            problem = "SpectralNorm normalises each group of a layer as a matrix of its own"
            groups = f"a checkpoint of torch's spectral norm of {self.bound_layout.matrices} groups"
            found = f"{groups}, which is one matrix there: loading it would rescale the weight"
            do = "Load the effective weight: plain_state_dict(state_dict), which is rescaled to the norm."
            raise InvalidArgumentError(problem, found, do)
        self._adopted = True  # the function is torch's, also where its vectors are one step old
        self.u, self.v = u.detach().clone().view_as(self.u), v.detach().clone().view_as(self.v)
        return original

    # --- when the vectors advance ---------------------------------------------------------------------

    def track(self, raw: nn.Parameter | None) -> None:
        current = self._is_current()
        count_uncounted_steps()
        super().track(raw)
        self._followed = (None if raw is None else version_of(raw)) if current else STALE_VERSION

    def release(self) -> nn.Parameter | None:
        self._followed = None if self._is_current() else STALE_VERSION  # the next version is the one to follow
        return super().release()

    def train(self, mode: bool = True) -> Self:
        raw = self.trained
        ends = self.training and not mode and not self._unset  # a phase of training
        if ends and raw is not None and not is_sharded(raw) and not self._is_current():
            self.tick_(raw)
        return super().train(mode)

    def __getstate__(self) -> dict[str, Any]:
        version = None if self._is_current() else STALE_VERSION
        return {
            **super().__getstate__(),
            "_followed": version,
            "_written": STALE_VERSION,
            "_evaluated": None,
        }

    @property
    def _bound(self) -> float:
        """The norm that is set, or the largest that is left."""
        return self.norm if self.at_most is None else self.at_most

    def _options(self) -> dict[str, Any]:
        """Without the one of `norm` and `at_most` that is not used; earlier checkpoints have no `at_most`."""
        unused = "at_most" if self.at_most is None else "norm"
        return {name: value for name, value in super()._options().items() if name != unused}

    def _described(self) -> dict[str, Any]:
        return {**super()._described(), **({"adopted": True} if self._adopted else {})}

    def set_extra_state(self, state: Tensor) -> None:
        super().set_extra_state(state)
        raw, adopted = self.trained, describe(state).get("adopted", False)
        unseen = raw is not None and is_sharded(raw)  # the next use sees whether the vectors belong to it
        self._followed = None if adopted or (not unseen and self._belongs_to(raw)) else STALE_VERSION
        self._written = STALE_VERSION
        self.track(raw)

    def _is_current(self) -> bool:
        """Whether the vectors belong to the present values of the trained Parameter."""
        raw = self.trained
        return self._followed is None or (raw is not None and self._followed == version_of(raw))

    @torch.no_grad()
    def _belongs_to(self, raw: Tensor | None) -> bool:
        """Whether the direction of u is that of Wv, as after a power iteration; True where it cannot be told."""
        u, v, view = self.u, self.v, self.view_impl
        if raw is None or u is None or v is None or view is None or raw.is_meta or is_sharded(raw):
            return True
        image = torch.bmm(v.to(widen(raw)), view.matrices(widen(raw)).mT)
        apart = (normalize(image, (1, 2)) - normalize(u.to(image), (1, 2))).abs().amax()
        return bool(apart <= 16 * torch.finfo(u.dtype).eps)

    def _follow_(self, raw: Tensor) -> None:
        """Advance the vectors if `raw` has changed since; see Note [When the vectors advance]."""
        if torch.compiler.is_compiling():
            if self.training:
                self.tick_(raw)
            return
        trained = self.trained
        if trained is None and type(raw) is nn.Parameter:  # it has replaced another, as in `to_empty()`
            self.track(raw)
            trained = raw
        vectors = self._buffers["u"]
        if trained is None or vectors is None or not (raw is trained or is_sharded(trained)):
            return  # a functional call with other values
        if not ordinary_eager(vectors):
            return
        state = self.__dict__  # itself: `nn.Module.__setattr__` is a slow search
        now = version_of(trained)
        if state["_followed"] is None:
            state["_followed"] = now
        if state["_followed"] == now:
            state["_evaluated"] = None
        elif state["training"]:
            if state["_written"] != version_of(vectors) and self._belongs_to(whole(raw)):  # loaded with the weight
                state.update(_followed=now, _evaluated=None, _written=version_of(vectors))
            else:
                self.tick_(raw)
        elif state["_evaluated"] is None or state["_evaluated"][0] != now:
            if self._belongs_to(whole(raw)):  # overwritten with its own values, as by a verb that restores a model
                state["_followed"], state["_evaluated"] = now, None
            else:
                state["_evaluated"] = now, self._computed(raw)

    def _vectors(self) -> Mapping[str, Tensor]:
        """Those by which the weight is divided now."""
        stored: Any = self._buffers  # the registry itself: `self.u` is a slow search
        return stored if self._evaluated is None else self._evaluated[1]

    @torch.no_grad()
    def _computed(self, raw: Tensor) -> Mapping[str, Tensor]:
        """Vectors of a weight that has changed by any amount."""
        view: Any = self.view_impl
        with full_precision(raw):
            return view.renewed(view.matrices(widen(whole(raw.detach()))), self._stored())

    def tick_(self, raw: Any, iterations: int = 1) -> None:
        """Advance the vectors by power iterations for the trained tensor `raw`, in place."""
        compiled = torch.compiler.is_compiling()
        if not compiled:
            self.__dict__.update(_followed=None if self.trained is None else version_of(self.trained), _evaluated=None)
        if self.view_impl is None:
            return
        if compiled or iterations > 1 or not self._find_on_cpu(raw):
            self._iterate_(whole(raw.detach()), iterations)
        if not compiled:
            vectors: Any = self._buffers["u"]
            self.__dict__["_written"] = version_of(vectors)

    @torch.no_grad()
    def _iterate_(self, raw: Tensor, iterations: int) -> None:
        view: Any = self.view_impl
        with full_precision(raw):
            matrices = view.matrices(widen(raw))
            state = {name: value.to(matrices.dtype) for name, value in self._stored().items()}
            for _ in range(iterations):
                state = view.step(matrices, state)
        for name, value in self._stored().items():
            value.copy_(state[name])

    def _find_on_cpu(self, raw: Tensor) -> bool:
        """Advance the vectors of one small matrix by :func:`kernels.top_vectors`; False where it does not apply."""
        stored: Any = self._buffers
        u, v, view = stored["u"], stored["v"], self.view_impl
        one = type(view) is FilterView and view.flat and stored["basis"] is None and raw.is_cpu
        if not one or not u.dtype is v.dtype is raw.dtype or raw.dtype not in WIDE or u.is_inference():
            return False
        if not ordinary_eager(raw, u, v):
            return False
        # A copy: a tensor whose storage NumPy has seen cannot be resized any more, which FSDP 2 does to free weights.
        matrix, to_u, to_v = raw.detach().clone().numpy(), u.numpy(), v.numpy()
        found = top_vectors(matrix.reshape(len(matrix), -1), to_v.reshape(-1))
        if found is None:
            return False
        to_u[...], to_v[...] = found
        increment_version((u, v))  # NumPy's writes are not counted
        return True

    def _stored(self) -> dict[str, Tensor]:
        return {name: value for name, value in self._buffers.items() if value is not None}


def _view_of(view: Of, layout: Layout, weight: Tensor) -> SpectralView:
    matrix = weight[0, 0].numel() == 1  # without neighbours the map on images is the matrix at each pixel
    kind = FilterView if view == "filters" or matrix else ConvolutionView
    if kind is ConvolutionView and layout.padding_mode not in ("zeros", "circular"):
        found = f"padding_mode={layout.padding_mode!r}, which repeats pixels and can exceed every such bound"
        problem = 'SpectralNorm(view="conv") bounds layers with zero or circular padding'
        raise InvalidArgumentError(problem, found, "Use zero padding, or exclude the layer.")
    return kind.of(layout, weight.shape)


def _divided(
    raw: Tensor, u: Tensor, v: Tensor, length: Tensor | None, view: SpectralView, norm: float, only_above: bool
) -> Tensor:
    """`raw` times `norm` over its spectral norm; itself if that is 0 or, with `only_above`, at most `norm`."""
    sigma = _sigma(view.matrices(raw), u, v, length)
    if only_above:
        return raw / (sigma / norm).clamp_min(1)
    zero = sigma < torch.finfo(sigma.dtype).tiny ** 0.5
    # A division, whose gradient needs the quotient, which the layer keeps anyway: compiled, a product keeps `raw` too.
    # A sum, where the norm is 0 and 1 is added: a choice of the two would be kept for the gradient.
    return raw / (sigma / norm + zero)


def _sigma(matrices: Tensor, u: Tensor, v: Tensor, length: Tensor | None) -> Tensor:
    """The largest norm that the vectors show for a group; see Note [Stale vectors].

    The vectors are constants, and need not be of unit length (averaged or half-precision buffers are not).
    """
    # Copies: the vectors may advance, or DDP may broadcast them, between the forward and its backward.
    u, v = (x.detach().clone().to(matrices.dtype) for x in (u, v))
    image = torch.bmm(v, matrices.mT)  # (groups, parts, rows); as in a step, so that a compiler computes it once
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


def tick_(model: nn.Module, *, iterations: int = 1) -> int:
    """Advance the singular vectors of every spectral norm in a model by power iterations, in place.

    Training does so by itself, once for each change of a weight. Call it after a change that is much larger than an
    optimizer's, or that torch does not count; see :class:`SpectralNorm`. One that several layers share is advanced
    once. Nothing else changes: no weight, no other buffer, no random generator.

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
    found = {}
    for module in model.modules():
        for name in module.parametrized_names if isinstance(module, Parametrized) else ():
            norm, raw = module._modules[child_name(name)], module._parameters.get(name)
            if isinstance(norm, SpectralNorm) and raw is not None:
                found[norm] = raw
    for norm, raw in found.items():
        norm.tick_(raw, iterations)
    return len(found)


def tick_on_step(optimizer: Any, model: nn.Module) -> Edited:
    """Call :func:`gonio.parametrizations.tick_` after every step of an optimizer, in a wrapper or not.

    The vectors of a spectral norm advance by themselves with every change of the weight that torch counts. This is for
    optimizers that write through ``.data``, which it does not count. Steps that a gradient scaler skips do not count.
    Pickles and state dicts do not contain the call. Layers that are parametrized later are included.

    Raises:
        NoMatchError: if the model has no spectral norm.
        InvalidArgumentError: for an optimizer whose steps cannot be observed.

    Example:
        >>> layer = nn.Linear(4, 4)
        >>> _ = gonio.parametrizations.attach(layer, "weight", gonio.parametrizations.SpectralNorm())
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        >>> edited = gonio.parametrizations.tick_on_step(optimizer, layer)
        >>> layer(torch.ones(1, 4)).sum().backward(); optimizer.step()
        >>> edited.undo_()
    """
    ref = weakref.ref(model)  # the optimizer does not keep the model

    def after(_: object) -> None:
        there = ref()
        if there is not None:
            tick_(there)

    weights: dict[str, Tensor] = {}
    with Edit(model, "tick_on_step") as edit:
        edit.changes_model = False
        for site in sites(model):
            for name, parameter in site.module._parameters.items():
                found = parametrization_of(site.module, name)
                if isinstance(found, SpectralNorm) and parameter is not None:
                    weights[f"{site.path}.{name}".removeprefix(".")] = parameter
                    edit.changed(site.path, say("{name}: {norm} advances after each step", name=name, norm=str(found)))
        if not edit.changes:
            raise NoMatchError("tick_on_step", None, [])
        edit.on_undo(watch(optimizer, after=after, verb="tick_on_step"))
        expect_steps_(edit, optimizer, weights)
    return edit.done()
