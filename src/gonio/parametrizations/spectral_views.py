"""The matrices whose norm a spectral norm bounds: the filters, or the convolution at many frequencies.

Both views store unit singular vectors and improve them by power iteration. `u` and `v` are stacks of real
vectors, (groups, parts, rows) and (groups, parts, columns), for the stored matrices W of a weight: the norm of a
group is the sum over parts of uᵀ W v. A real matrix has one part. A convolution has two, the real and the imaginary
part at one frequency. There the vector of one number per input channel is repeated for every tap and has a length
above 1; `v` is stored with length 1, and `length` is the factor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import cos, pi, prod
from typing import Any, Self

import torch
from torch import Tensor

from gonio.geometry.conv_norm import conv_spectral_norm_estimate
from gonio.geometry.conv_operator import frequencies
from gonio.geometry.lanczos import spectral_norm
from gonio.geometry.norms import least_norm, normalize, safe_norm
from gonio.geometry.views import Layout, from_matrices, matrix_view
from gonio.seeding import normal

# Note [Following the largest singular value]
# A power iteration of one vector loses the largest singular value where another one overtakes it: after single steps of
# SGD at a rate of 0.1, or of AdamW at 0.001, the norm of small convolutions was 20 to 40 % above the one shown. So the
# top vector is taken from a space: all of it for a smaller side n up to WHOLE, else the span of a stored orthonormal
# block B and of A Aᵀ B. The Gram matrix of the images of the space is raised to its 512th power by squaring, whose
# largest column is the top vector; its 8th power gives the next block. No decomposition waits for a device. A Gram
# matrix of trace 1 has its largest eigenvalue in [1/n, 1], and one whose largest entry is n^-1/2, which is on the
# diagonal, has it in [n^-1/2, n^1/2]: for n up to WHOLE, the 16th power of the first and the 32nd power of the second
# lie within 2^±96, which float32 holds.
WHOLE = 64  # smaller side of a matrix up to which its whole space is searched
BLOCK = 8  # vectors of the stored block; with 6, norms of AdamW at 0.001 were off by 1.5 %

EXACT = 2**28  # multiplications up to which the first vectors come from a singular value decomposition
_ITERATIONS = 60  # of power iteration for the first vectors of larger convolutions
_PER_STEP = 2  # power iterations for each change of a convolution
_RENEWALS = 10  # steps for the vectors of a convolution that has changed by any amount
_POINTS = 8  # of the grid, per dimension and unit of the kernel's reach: a margin of 2 % per dimension


@dataclass(frozen=True)
class SpectralView(ABC):
    """How weights of one shape and layout become matrices, and how their top singular vectors are found."""

    layout: Layout
    shape: torch.Size
    margin: float  # the factor by which the operator's norm may exceed the norm that converged vectors show
    flat: bool = True  # whether the matrix of a weight without groups is `weight.flatten(1)`

    @classmethod
    @abstractmethod
    def of(cls, layout: Layout, shape: torch.Size) -> Self:
        """The view of weights of this shape."""

    @abstractmethod
    def measured(self, weight: Tensor) -> float:
        """The norm itself, computed without the stored vectors: a tight lower bound for any weight of the shape."""

    @abstractmethod
    def matrices(self, weight: Tensor) -> Tensor:
        """The stored matrices, (groups, rows, columns); those of several weights can be concatenated."""

    @abstractmethod
    def weight_of(self, matrices: Tensor) -> Tensor:
        """The inverse of :meth:`matrices`."""

    @abstractmethod
    def start(self, matrices: Tensor) -> dict[str, Tensor]:
        """The first state: top singular vectors, exact for small weights."""

    @abstractmethod
    def step(self, matrices: Tensor, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The state after one more power iteration; runs without synchronising a device."""

    @abstractmethod
    def renewed(self, matrices: Tensor, state: Mapping[str, Any]) -> dict[str, Tensor]:
        """Vectors of matrices that differ by any amount from those to which the state belongs."""


class FilterView(SpectralView):
    """The matrices with one filter per row; the norm is the largest singular value of all groups."""

    @classmethod
    def of(cls, layout: Layout, shape: torch.Size) -> Self:
        return cls(layout, shape, 1.0, flat=layout.matrices == 1 and not layout.transposed)

    def measured(self, weight: Tensor) -> float:
        return float(spectral_norm(self.matrices(weight)).amax())

    def matrices(self, weight: Tensor) -> Tensor:
        # The layout is looked at last: compiled, every attribute that is read is a guard of every call.
        return weight.flatten(1).unsqueeze(0) if self.flat else matrix_view(weight, self.layout)

    def weight_of(self, matrices: Tensor) -> Tensor:
        return from_matrices(matrices, self.shape, self.layout)

    def start(self, matrices: Tensor) -> dict[str, Tensor]:
        groups, rows, columns = matrices.shape
        small, wide = min(rows, columns), rows <= columns
        state = {"u": matrices.new_zeros(groups, 1, rows), "v": matrices.new_zeros(groups, 1, columns)}
        if small > WHOLE:
            state["basis"] = matrices.new_zeros(groups, BLOCK, small)
        if matrices.is_meta or not matrices.numel():
            return state
        if matrices.numel() * small <= EXACT:
            left, _, right = torch.linalg.svd(matrices, full_matrices=False)
            state |= {"u": left[..., 0].unsqueeze(1).contiguous(), "v": right[:, :1].contiguous()}
            return state | ({"basis": left.mT[:, :BLOCK] if wide else right[:, :BLOCK]} if small > WHOLE else {})
        with torch.enable_grad():  # the gradient of a matrix's norm is the product u vᵀ of its top vectors
            matrices = matrices.detach().requires_grad_()
            (product,) = torch.autograd.grad(spectral_norm(matrices).sum(), matrices)
        matrices, largest = matrices.detach(), safe_norm(product, -1).argmax(-1)
        state["v"] = normalize(product[torch.arange(groups, device=largest.device), largest], -1).unsqueeze(1)
        state["u"] = normalize(product @ state["v"].mT, (1, 2)).mT
        drawn = _random_vectors((groups, BLOCK - 1, small), matrices)
        top = torch.cat([state["u"] if wide else state["v"], drawn], 1)
        return self.step(matrices, state | {"basis": torch.linalg.qr(top.mT).Q.mT})

    def step(self, matrices: Tensor, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """See Note [Following the largest singular value]."""
        wide = matrices.shape[1] <= matrices.shape[2]
        a, found = (matrices if wide else matrices.mT), dict(state)
        if "basis" not in state:
            space, images = None, a
        else:
            images = _unit(torch.bmm(state["basis"], a))
            both = torch.cat([state["basis"], _unit(torch.bmm(images, a.mT))], 1)
            space = torch.linalg.qr(both.mT).Q.mT
            images = torch.bmm(space, a)
        images = _unit(images)
        power = torch.bmm(images, images.mT)
        for _ in range(3):
            power = torch.bmm(power, power)
        eighth = power
        power = torch.bmm(power, power)
        power = power / (power.amax((1, 2), keepdim=True) * power.shape[1] ** 0.5)
        for _ in range(5):
            power = torch.bmm(power, power)
        best = power.diagonal(dim1=1, dim2=2).argmax(1)
        top = power.gather(1, best[:, None, None].expand(-1, 1, power.shape[1]))
        top = top / top.amax(2, keepdim=True)  # NaN for a zero matrix, whose vectors stay
        if space is not None:
            top = torch.bmm(top, space)
            restart = torch.bmm(torch.linalg.qr(eighth[:, :, :BLOCK]).Q.mT, space)
            zero = torch.linalg.vector_norm(images, dim=(1, 2), keepdim=True) == 0
            found["basis"] = torch.where(zero, state["basis"], restart)
        v = torch.bmm(top, matrices) if wide else top
        found["v"] = _unit_or(v, state["v"], (1, 2), (v * state["v"]).sum((1, 2), keepdim=True))
        found["u"] = _unit_or(torch.bmm(found["v"], matrices.mT), state["u"], (1, 2))
        return found

    def renewed(self, matrices: Tensor, state: Mapping[str, Any]) -> dict[str, Tensor]:
        return self.start(matrices)


class ConvolutionView(SpectralView):
    r"""The convolution itself, by its symbol :math:`F(\omega) = \sum_t W_t e^{-i \omega t}` on a grid.

    Every frequency has its own right singular vector (state `basis`), and two matrix products per step
    improve all of them; `u` and `v` belong to the frequency with the largest norm.
    """

    @classmethod
    def of(cls, layout: Layout, shape: torch.Size) -> Self:
        return cls(layout, shape, _taps(layout, shape).margin)

    def measured(self, weight: Tensor) -> float:
        grid, stride = _taps(self.layout, self.shape).grid, self.layout.per_axis(len(self.shape) - 2)[0]
        finer = [2 * n * s for n, s in zip(grid, stride, strict=True)]
        return float(conv_spectral_norm_estimate(weight, finer, layout=self.layout))

    def matrices(self, weight: Tensor) -> Tensor:
        # A transposed convolution is the adjoint of the convolution with the same stored weight.
        return weight.unflatten(0, (self.layout.groups, -1)).flatten(2)

    def weight_of(self, matrices: Tensor) -> Tensor:
        return matrices.reshape(self.shape)

    def start(self, matrices: Tensor) -> dict[str, Tensor]:
        groups, rows, columns = matrices.shape
        taps = self._taps(matrices)
        inputs = self.shape[1] * taps.phases
        shape = (groups, len(taps.angle), inputs)
        state = {
            "u": matrices.new_zeros(groups, 2, rows),
            "v": matrices.new_zeros(groups, 2, columns),
            "length": matrices.new_ones(groups),
            "basis": matrices.new_zeros(*shape, 2),
        }
        if matrices.is_meta:
            return state
        if prod(shape) * rows * min(rows, inputs) <= EXACT:
            state["basis"] = _as_pairs(self._right_vectors(matrices))
            return self.step(matrices, state)
        state["basis"][..., 0] = _random_vectors(shape, matrices)
        for _ in range(_ITERATIONS):
            state = self.step(matrices, state)
        return state

    def step(self, matrices: Tensor, state: dict[str, Tensor]) -> dict[str, Tensor]:
        for _ in range(_PER_STEP):
            state = self._iterated(matrices, state)
        return state

    def _iterated(self, matrices: Tensor, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """One power iteration at every frequency."""
        folded, waves = self._folded(matrices), self._waves(matrices)
        basis = torch.view_as_complex(state["basis"].to(matrices.dtype))
        waved = (waves.unsqueeze(-1) * basis.unsqueeze(2)).flatten(2)  # (groups, frequencies, steps · inputs)
        left = _as_complex(normalize(_as_pairs(_times(waved, folded.mT)), (2, 3)))
        right = _times(left, folded).unflatten(2, (waves.shape[1], -1))
        right = _as_pairs((waves.conj().unsqueeze(-1) * right).sum(2))
        best = safe_norm(right, (2, 3)).argmax(1)
        basis = _unit_or(right, state["basis"], (2, 3))
        spread = self._repeated(basis, best, waves)
        u = _unit_or(spread @ matrices.mT, state["u"], (1, 2))
        return {"u": u, "v": normalize(spread, (1, 2)), "length": safe_norm(spread, (1, 2)), "basis": basis}

    def renewed(self, matrices: Tensor, state: Mapping[str, Any]) -> dict[str, Tensor]:
        found = {name: value.to(matrices.dtype) for name, value in state.items()}
        for _ in range(_RENEWALS):
            found = self.step(matrices, found)
        return found

    def _repeated(self, basis: Tensor, best: Tensor, waves: Tensor) -> Tensor:
        """The vector of each group's best frequency for the stored columns, as two real parts, (groups, 2, columns)."""
        taps = self._taps(basis)
        vector = _as_complex(basis[torch.arange(len(best), device=best.device), best])
        by_tap = vector.unflatten(1, (-1, taps.phases))[..., taps.phase] * waves[best][:, None, taps.step]
        return _as_pairs(by_tap.flatten(1)).movedim(-1, 1)

    def _right_vectors(self, matrices: Tensor) -> Tensor:
        """Top right singular vector of the symbol at each frequency, (groups, frequencies, inputs)."""
        waves = self._waves(matrices)
        folded = self._folded(matrices).unflatten(2, (waves.shape[1], -1))
        symbol = torch.einsum("ft,gnti->gfni", waves, folded.to(waves.dtype))
        return torch.linalg.svd(symbol, full_matrices=False)[2][..., 0, :].conj()

    def _folded(self, matrices: Tensor) -> Tensor:
        """The stored matrices with their columns in the order (step, input, phase); absent taps are 0."""
        taps = self._taps(matrices)
        by_tap = matrices.unflatten(2, (self.shape[1], -1))  # (groups, rows, inputs, taps)
        groups, rows, inputs, _ = by_tap.shape
        folded = matrices.new_zeros(groups, rows, taps.angle.shape[1], inputs, taps.phases)
        folded[:, :, taps.step, :, taps.phase] = by_tap.movedim(3, 0)
        return folded.flatten(2)

    def _waves(self, like: Tensor) -> Tensor:
        """e^{−iω·t}, (frequencies, steps)."""
        angle = self._taps(like).angle.to(like.dtype)
        return torch.polar(torch.ones_like(angle), angle)

    def _taps(self, like: Tensor) -> _Taps:
        return _taps(self.layout, self.shape, like.device)


@dataclass(frozen=True)
class _Taps:
    """The positions of a kernel's taps after the stride is folded into input channels: tap = step · stride + phase."""

    step: Tensor  # (taps,): the step of each tap, as an index
    phase: Tensor  # (taps,): the phase of each tap, as an index
    phases: int  # product of the strides
    grid: tuple[int, ...]  # points per dimension
    angle: Tensor  # (frequencies, distinct steps): −ω·t for half of a grid; the other half is complex conjugate
    margin: float

    def to(self, device: torch.device) -> _Taps:
        return replace(self, step=self.step.to(device), phase=self.phase.to(device), angle=self.angle.to(device))


_TAPS: dict[tuple[Any, ...], _Taps] = {}


def _taps(layout: Layout, shape: torch.Size, device: torch.device | None = None) -> _Taps:
    """The taps of a convolution; made once per geometry and device, so that a step copies nothing to a device."""
    key = (layout.stride, layout.dilation, shape[2:], device)
    if key in _TAPS:
        return _TAPS[key]
    steps = layout.per_axis(len(shape) - 2)
    made = _new_taps(*steps, shape[2:]) if device is None else _taps(layout, shape)
    if device is not None:
        made = made.to(device)
    if type(made.step) is Tensor:  # not a fake tensor of a compiler
        _TAPS[key] = made
    return made


def _new_taps(stride: tuple[int, ...], dilation: tuple[int, ...], kernel: torch.Size) -> _Taps:
    # at stride 1 the dilation only renames frequencies
    spread = dilation if prod(stride) > 1 else (1,) * len(kernel)
    taps = [[t * d for t, d in zip(tap, spread, strict=True)] for tap in product(*(range(k) for k in kernel))]
    step_of_tap = [tuple(t // s for t, s in zip(tap, stride, strict=True)) for tap in taps]
    steps = sorted(set(step_of_tap))
    phase = [
        sum((t % s) * prod(stride[d + 1 :]) for d, (t, s) in enumerate(zip(tap, stride, strict=True))) for tap in taps
    ]
    reach = [max(along) for along in zip(*steps, strict=True)]
    grid = tuple(max(1, _POINTS * r) for r in reach)
    # Note [Between the grid points]: a product yᴴF(ω)x is, up to a phase, a trigonometric polynomial of degree
    # r/2 in each component of ω. One of degree r/2 is at most 1/cos(πr/2N) times its maximum on N points
    # [H. Ehlich and K. Zeller, "Schwankung von Polynomen zwischen Gitterpunkten", Math. Z. 86, 1964].
    margin = prod(1 / cos(pi * r / (2 * n)) for r, n in zip(reach, grid, strict=True))
    omega = frequencies(grid, torch.zeros((), dtype=torch.float64, device="cpu"))
    angle = -(omega @ torch.tensor(steps, dtype=torch.float64, device="cpu").mT)
    index = {one: i for i, one in enumerate(steps)}
    step = torch.tensor([index[one] for one in step_of_tap], device="cpu")
    return _Taps(step, torch.tensor(phase, device="cpu"), prod(stride), grid, angle, margin)


def _unit(x: Tensor) -> Tensor:
    """Each matrix of a stack over its Frobenius norm; a zero matrix stays zero."""
    return x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp_min(least_norm(x.dtype))


def _unit_or(vectors: Tensor, fallback: Tensor, dims: tuple[int, ...], sign: Tensor | None = None) -> Tensor:
    """Unit vectors, negated where `sign` is negative, because averages of vectors need one sign.

    The fallback for a zero vector, because a power iteration from zero stays at zero.
    """
    norm = torch.linalg.vector_norm(vectors, dim=dims, keepdim=True)
    signed = norm if sign is None else norm.copysign(sign)
    return torch.where(norm > least_norm(vectors.dtype), vectors / signed, fallback)


def _random_vectors(shape: Sequence[int], like: Tensor) -> Tensor:
    """Unit vectors along the last dimension; they depend on the shape alone."""
    drawn = normal(shape, 0, "spectral norm", *shape, dtype=torch.float64)
    return (drawn / safe_norm(drawn, -1, keepdim=True)).to(like)


def _times(x: Tensor, matrices: Tensor) -> Tensor:
    """A complex stack of rows times real matrices, as one real product."""
    return torch.complex(*(torch.cat([x.real, x.imag], 1) @ matrices).chunk(2, 1))


def _as_pairs(x: Tensor) -> Tensor:
    return torch.view_as_real(x.resolve_conj()).contiguous()


def _as_complex(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.contiguous())
