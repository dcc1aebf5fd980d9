"""SRIP: the spectral norm of the Gram matrix's distance from the identity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gonio.errors import SecondDerivativeError
from gonio.execution import is_sharded, replicated
from gonio.geometry.norms import normalize, safe_norm, small_side
from gonio.geometry.views import Layout, matrix_view
from gonio.regularizers.base import Evaluation, WeightRegularizer, replicated_like, require
from gonio.regularizers.kernels import stretch_and_gradient

GOLDEN = 0.6180339887498949


@dataclass(frozen=True, kw_only=True)
class SRIP(WeightRegularizer):
    r"""Spectral restricted isometry: the largest distance of a squared singular value from 1.

    .. math:: \sigma(W W^\top - I) = \max_i \lvert \sigma_i^2 - 1 \rvert

    over the singular values of the smaller side of :math:`W`; added over groups. Estimated from below by power
    iteration :math:`v \leftarrow W (W^\top v) - v`. :math:`v` is a constant in the backward, so there is no second
    derivative. `Penalty` keeps :math:`v` from step to step, so that one iteration per step follows a slowly changing
    weight; :meth:`value` by itself starts from a fixed vector, with one iteration more.

    Args:
        strength: the paper's code starts from 1e-2 and decays it, see :meth:`Milestones.srip`.
        iterations: power iterations per evaluation.

    Invariances:
        Rotations on either side, permutations and flips of filters (of the true value). Not scale.

    Example:
        >>> round(gonio.regularizers.SRIP(1.0, iterations=50)(torch.diag(torch.tensor([1.0, 2.0, 0.5]))).item(), 3)
        3.0

    References:
        [1] N. Bansal, X. Chen, Z. Wang, "Can we gain more from orthogonality regularizations in training
        deep CNNs?", NeurIPS 2018, §3.4. https://arxiv.org/abs/1810.09102

    Differs:
        The public code penalises the square, estimates it with one iteration from a random vector in each step
        (2.49 reads as 1.75), differentiates through that iteration, and for some models takes the side on which
        the identity cannot be reached.
    """

    iterations: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        needs = "SRIP() needs iterations from 1 to 1000, because each multiplies the weight twice"
        require(1 <= self.iterations <= 1000, needs, f"iterations={self.iterations}", "1 or 2 are usual.")

    def _evaluate(self, weight: Tensor, layout: Layout, state: Tensor | None) -> Evaluation:
        a = small_side(matrix_view(weight, layout))
        vector = self._iterated(a.detach(), state)
        # Compilers take no functions with forward-mode derivatives, and refuse second derivatives themselves.
        held = a if torch.compiler.is_compiling() else _Held.apply(a)
        image = _image(held, vector)
        following = _following(image.detach(), vector)
        local: Any = following.to_local() if is_sharded(following) else following  # type: ignore[attr-defined]
        return Evaluation(safe_norm(image, -2).sum(), {}, local)

    def _closed_form(self, weight: Tensor, layout: Layout, state: Tensor | None) -> tuple[Evaluation, Tensor]:
        matrix = matrix_view(weight, layout)
        a = small_side(matrix)
        value, following, gradient = stretch_and_gradient(a, self._iterated(a, state))
        return Evaluation(value, {}, following), gradient if a is matrix else gradient.mT

    def _iterated(self, a: Tensor, state: Tensor | None) -> Tensor:
        """The vectors of the last iteration (matrices, rows, 1), given detached matrices."""
        vector = replicated_like(_start(a) if state is None else state.to(a), a)
        for _ in range(self.iterations - (state is not None)):
            vector = _following(_image(a, vector), vector)
        return vector


def _start(a: Tensor) -> Tensor:
    """A fixed unit vector per matrix without regularities that a weight would share: fractional parts of i·φ."""
    spread = torch.arange(1, a.shape[1] + 1, dtype=a.dtype, device=a.device).mul_(GOLDEN).remainder_(1).sub_(0.5 - 1e-3)
    return normalize(spread).unsqueeze(-1).expand(a.shape[0], -1, -1)


def _image(a: Tensor, vector: Tensor) -> Tensor:
    """A Aᵀ v − v for each matrix, in every process."""
    return replicated(a @ (a.mT @ vector)) - vector


def _following(image: Tensor, vector: Tensor) -> Tensor:
    """The image at length 1; the vector itself where the image is zero."""
    length = torch.linalg.vector_norm(image, dim=-2, keepdim=True)
    return torch.where(length > 0, image / length, vector)


class _Held(torch.autograd.Function):
    """The identity, with a gradient that refuses to be differentiated, because it takes the vector as a constant."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return grads[0]
        refusing: Tensor = _Refusing.apply(grads[0], *ctx.saved_tensors)
        return refusing

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        return tangents[0].view_as(tangents[0])


class _Refusing(torch.autograd.Function):
    """torch's ``once_differentiable`` refuses only where the incoming gradient requires grad; elsewhere it is wrong."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gradient: Tensor, x: Tensor) -> Tensor:
        return gradient.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise SecondDerivativeError("this penalty", "the vector of the power iteration is held fixed in the first")

    jvp = backward
