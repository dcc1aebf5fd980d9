"""`Muon`: updates whose matrices are orthogonal, block by block, with AdamW for what is no matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf, sqrt
from typing import Any, ClassVar, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from gonio.errors import InvalidArgumentError
from gonio.execution import sharded_like
from gonio.geometry.norms import whole
from gonio.penalty.matrices import Blocks

Coefficients = tuple[float, float, float]
ADJUSTMENTS = ("original", "match_rms_adamw")


class Muon(Optimizer):
    r"""Muon (momentum orthogonalised by Newton–Schulz): each matrix of the update has singular values near 1.

    With the gradient g: :math:`B ← μB + (1−μ)g`, :math:`U = (1−μ)g + μB` (Nesterov) or :math:`U = B`,
    :math:`W ← (1 − ηλ)W − η c\,NS(U)`, where NS is a polynomial iteration towards the polar factor and c a factor of
    the matrix' sides. On weights in two dimensions it equals ``torch.optim.Muon``, whose arguments it takes.

    With the groups of ``gonio.param_groups(model, matrices=True)`` every block of a weight is orthogonalised by itself:
    groups of a convolution, heads of fused queries, keys and values, experts. Blocks of one size are computed together
    in batched products. Without such groups a weight of more than two dimensions is one matrix of flattened filters.
    Groups with ``matrices=False`` are trained by AdamW.

    Args:
        params: groups, or parameters that all are matrices.
        lr: of matrices.
        weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps: as in ``torch.optim.Muon``.
        adjust_lr_fn: "original" (the default) for the factor c = √max(1, rows/columns), "match_rms_adamw" for
            0.2 √max(rows, columns), of the sides of a block.
        others_lr: learning rate of groups with ``matrices=False`` that have no ``lr``.
        betas: of AdamW on those groups.

    Raises:
        InvalidArgumentError: for a parameter of fewer than two dimensions in a group of matrices, for complex
            parameters, and for negative or unknown values.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 6 * 6, 10))
        >>> optimizer = gonio.optim.Muon(gonio.param_groups(model, matrices=True), lr=1.0, weight_decay=0.0)
        >>> before = model[0].weight.detach().clone()
        >>> model(torch.randn(4, 3, 8, 8)).square().sum().backward()
        >>> optimizer.step()
        >>> change = (before - model[0].weight.detach()).flatten(1)
        >>> bool((torch.linalg.svdvals(change) - 1).abs().max() < 0.4)
        True

    Source: Jordan et al., "Muon", https://kellerjordan.github.io/posts/muon/, and ``torch.optim.Muon``.
    Differs: convolutions are matrices of flattened filters and packed weights are cut, which torch refuses or mixes.
    """

    per_parameter = ("blocks",)  # the options of a group with one value for each of its parameters
    state_powers: ClassVar[Mapping[str, int]] = {"momentum_buffer": 1}  # as editing.optimizer_states reads it

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        others_lr: float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.95),
    ) -> None:
        values = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "others_lr": others_lr}
        for name, value in values.items():
            if not 0 <= float(value) < inf:
                raise InvalidArgumentError(f"Muon({name}=) is finite and not negative", f"{value}", "Pass 0 or more.")
        for beta in betas:
            if not 0 <= beta < 1:
                raise InvalidArgumentError("Muon(betas=) are at least 0 and below 1", f"{betas}", "Change them.")
        if ns_steps < 1:
            raise InvalidArgumentError("Muon(ns_steps=) takes steps", f"{ns_steps}", "Pass 1 or more.")
        if not 0 < eps < inf:
            raise InvalidArgumentError("Muon(eps=) is positive and finite", f"{eps}", "Leave it out for 1e-7.")
        if adjust_lr_fn is not None and adjust_lr_fn not in ADJUSTMENTS:
            known = ", ".join(ADJUSTMENTS)
            raise InvalidArgumentError(f"Muon(adjust_lr_fn=) is one of {known}", repr(adjust_lr_fn), "Choose one.")
        defaults = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov,
            "ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn,
            "betas": betas, "matrices": True, "others_lr": others_lr,
        }  # fmt: skip
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its `blocks` are one list of whole numbers for each parameter, or None for one matrix."""
        group = dict(param_group)
        if not group.get("matrices", True):
            group.setdefault("lr", self.defaults["others_lr"])
        group["blocks"] = _plain(group.get("blocks"))
        super().add_param_group(group)
        added = self.param_groups[-1]
        why = _refusal(added)
        if why is None and added["blocks"] is None:
            added["blocks"] = [None] * len(added["params"])
        if why is not None:
            self.param_groups.pop()
            raise why

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also of state dicts with the blocks in the state of each parameter, or without (of ``torch.optim.Muon``)."""
        mine = {
            id(p): code
            for g in vars(self).get("param_groups", ())
            for p, code in zip(g["params"], g["blocks"], strict=True)
        }
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("matrices", True)
            kept = [self.state.get(p, {}).pop("blocks", mine.get(id(p))) for p in group["params"]]
            group["blocks"] = _plain(group.get("blocks") or kept)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step; `closure` computes the loss again, as in every optimizer of torch."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        _refuse_sparse_gradients(p for group in self.param_groups for p in group["params"])
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            if trained and group["matrices"]:
                self._step_matrices(group, trained)
            elif trained:
                self._step_others(group, trained)
        return loss

    def _step_matrices(self, group: dict[str, Any], parameters: Sequence[Tensor]) -> None:
        updates = [self._update(group, p) for p in parameters]
        codes = dict(zip(map(id, group["params"]), group["blocks"], strict=True))
        blocks = [Blocks.of(code) if (code := codes[id(p)]) is not None else Blocks() for p in parameters]
        parts = [each.split(whole(update)) for each, update in zip(blocks, updates, strict=True)]
        scaled = _orthogonal(
            [part for of_one in parts for part in of_one],
            group["ns_coefficients"], group["ns_steps"], group["eps"],
        )  # fmt: skip
        for p, cut, of_one in zip(parameters, blocks, parts, strict=True):
            rates = [adjusted(float(group["lr"]), group["adjust_lr_fn"], part.shape) for part in of_one]
            mine = [next(scaled) for _ in of_one]
            p.mul_(1 - float(group["lr"]) * float(group["weight_decay"]))
            if len(set(rates)) > 1:
                mine, rates = [part * rate for part, rate in zip(mine, rates, strict=True)], [1.0]
            p.add_(sharded_like(cut.join(mine, whole(p)), p), alpha=-rates[0])

    def _update(self, group: dict[str, Any], parameter: Tensor) -> Tensor:
        """The momentum of a parameter, which is updated."""
        gradient: Any = parameter.grad
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient, memory_format=torch.preserve_format)
        buffer: Tensor = state["momentum_buffer"]
        buffer.lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer

    def _step_others(self, group: dict[str, Any], parameters: Sequence[Tensor]) -> None:
        for p in parameters:
            if "exp_avg" not in self.state[p]:
                zeros = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
                self.state[p].update(step=torch.tensor(0.0, dtype=torch.float32, device="cpu"), **zeros)
        averages, squares, steps = ([self.state[p][k] for p in parameters] for k in ("exp_avg", "exp_avg_sq", "step"))
        adamw(
            list(parameters), [p.grad for p in parameters if p.grad is not None], averages, squares, [], steps,
            amsgrad=False, beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"],
            weight_decay=group["weight_decay"], eps=1e-8, maximize=False,
        )  # fmt: skip


def _refuse_sparse_gradients(parameters: Iterable[Tensor]) -> None:
    """Raise before a step has changed anything."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            found = f"one of {parameter.grad.layout} of a parameter of shape {tuple(parameter.shape)}"
            do = "Set sparse=False of its embedding, or train it by torch.optim.SparseAdam."
            raise InvalidArgumentError("Muon takes dense gradients", found, do)


def _plain(blocks: Any) -> list[list[int] | None] | None:
    """Codes of blocks as lists, which JSON and every checkpoint can store."""
    return None if blocks is None else [None if code is None else [int(n) for n in code] for code in blocks]


def _refusal(group: dict[str, Any]) -> InvalidArgumentError | None:
    """Why a group cannot be trained."""
    for parameter in group["params"]:
        if parameter.is_complex():
            do = "Train it by another optimizer."
            return InvalidArgumentError("Muon takes real parameters", f"one of {parameter.dtype}", do)
        if parameter.layout is not torch.strided:
            do = "Train it by another optimizer."
            return InvalidArgumentError("Muon takes dense parameters", f"one of {parameter.layout}", do)
        if group["matrices"] and parameter.ndim < 2:
            found = f"one of shape {tuple(parameter.shape)}"
            do = "Put it in a group with matrices=False, as gonio.param_groups(model, matrices=True) does."
            return InvalidArgumentError("Muon takes parameters of at least 2 dimensions as matrices", found, do)
    if group["blocks"] is not None and len(group["blocks"]) != len(group["params"]):
        found = f"{len(group['blocks'])} for {len(group['params'])} parameters"
        return InvalidArgumentError("Muon takes one entry of `blocks` for each parameter", found, "Add the others.")
    return None


# --- polar factors ------------------------------------------------------------------------------------------------


def _orthogonal(stacks: Sequence[Tensor], coefficients: Coefficients, steps: int, eps: float) -> Any:
    """For each stack of matrices their approximate polar factors in bfloat16; stacks of one size in one batch."""
    sizes: dict[tuple[torch.device, int, int], list[int]] = {}
    for index, stack in enumerate(stacks):
        sizes.setdefault((stack.device, stack.shape[1], stack.shape[2]), []).append(index)
    found: dict[int, Tensor] = {}
    for members in sizes.values():
        joined = torch.cat([stacks[i].bfloat16() for i in members])
        counts = [stacks[i].shape[0] for i in members]
        found.update(zip(members, _newton_schulz(joined, coefficients, steps, eps).split(counts), strict=True))
    return iter([found[i] for i in range(len(stacks))])


def _newton_schulz(x: Tensor, coefficients: Coefficients, steps: int, eps: float) -> Tensor:
    """X ← aX + (bA + cA²)X with A = XXᵀ, on matrices of Frobenius norm 1 that are at least as wide as high."""
    a, b, c = coefficients
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / torch.stack([each.norm() for each in x]).clamp(min=eps).view(-1, 1, 1)
    single = x.shape[0] == 1  # the plain product of matrices rounds as torch's Muon does
    x = x[0] if single else x
    multiply_add = torch.addmm if single else torch.baddbmm
    for _ in range(steps):
        gram = x @ x.mT
        x = multiply_add(x, multiply_add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x.unsqueeze(0) if single else x
    return x.mT if tall else x


def adjusted(rate: float, how: str | None, shape: Sequence[int]) -> float:
    """The learning rate of a stack of matrices (number, rows, columns) of this shape."""
    rows, columns = shape[1:]
    return rate * (0.2 * sqrt(max(rows, columns)) if how == "match_rms_adamw" else sqrt(max(1, rows / columns)))
