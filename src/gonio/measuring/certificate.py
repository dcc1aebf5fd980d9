"""`certify`: bounds of the Lipschitz constant of a whole network, and the radius within which a class cannot change."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite, sqrt
from typing import Any

import torch
from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy

from gonio.editing.twin import copy_of
from gonio.editing.where import require_model, run_eagerly, unwrapped
from gonio.errors import GonioError, InvalidArgumentError, NotApplicableError, first_line
from gonio.escaping import json_data, printed
from gonio.geometry.views import why_not_dense
from gonio.measuring.figures.lipschitz import Factor, Interpreter, UpperBounds, quotient
from gonio.messages import say
from gonio.pages.tables import bare_table, number
from gonio.seeding import generator, state_kept
from gonio.surgery.facts import TORCH_NORMS, UNKNOWN, WEIGHTED, applied_weight, facts_of
from gonio.surgery.graph import Graph, trace
from gonio.surgery.products import floats_in

_PAIRS = 0.02  # distance of the pairs of the lower bound, relative to the size of an input


@dataclass(frozen=True, kw_only=True, repr=False)
class Certificate:
    """Bounds of a network's Lipschitz constant; printing it gives a table of the layers.

    Attributes:
        upper: no two inputs of the certified shape have outputs that are further apart than `upper` times the distance
            of the inputs (l2, evaluation mode, exact arithmetic).
        lower: a quotient ‖f(x) − f(y)‖ / ‖x − y‖ that was found, which no bound can undercut.
        rows: the layers and operations that change the bound, in the order of execution.
        network: the copy in float64 that is certified; later training of the model does not change it.
        head: weight of the last linear layer, and the bound before it; None if the network does not end in one.
    """

    upper: float
    lower: float
    rows: tuple[Factor, ...]
    network: nn.Module = field(repr=False, compare=False)
    head: tuple[Tensor, float] | None = field(default=None, repr=False, compare=False)

    @property
    def slack(self) -> float:
        """upper / lower: the factor within which the constant is known."""
        return quotient(self.upper, self.lower)

    def sentence(self) -> str:
        """Both bounds, and the layer that contributes most to their distance."""
        said = f"The Lipschitz constant is between {number(self.lower)} and {number(self.upper)}"
        worst = max(self.rows, key=lambda row: row.widens, default=None)
        if worst is None or worst.widens < 1.01:
            return f"{said}; no layer widens the gap by 1 % or more."
        return f"{said}; {worst.path} ({worst.kind}) widens the gap most, by a factor of {number(worst.widens)}."

    @torch.no_grad()
    def radius(self, x: Tensor) -> Tensor:
        r"""For each input of a classifier: no change of smaller l2 norm changes the predicted class.

        .. math:: \min_j \frac{z_y - z_j}{\lVert w_y - w_j \rVert L_{\text{before}}}
            \quad\text{with a last linear layer, else}\quad \frac{\min_j (z_y - z_j)}{\sqrt 2 L}

        Args:
            x: inputs of the certified shape; each is treated alone.

        Returns: (n,) radii in float64.
        Raises: InvalidArgumentError if the outputs are not (n, classes ≥ 2).
        """
        return self._judge(x)[1]

    def certified_accuracy(self, x: Tensor, y: Tensor, eps: float) -> float:
        """The share of inputs that are classified as `y` and whose :meth:`radius` exceeds `eps`.

        Raises: InvalidArgumentError if the outputs are not (n, classes ≥ 2), or for a negative `eps`.
        """
        if not eps >= 0:
            raise InvalidArgumentError(
                "certified_accuracy() needs eps >= 0", f"{eps}", "Pass the l2 norm of an attack."
            )
        predicted, radius = self._judge(x)
        return float(((predicted == y.to(predicted.device)) & (radius > eps)).double().mean())

    @torch.no_grad()
    def _judge(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.network(x.to(_reference(self.network), copy=True))
        if not isinstance(logits, Tensor) or logits.dim() != 2 or logits.shape[1] < 2:
            found = f"an output of shape {tuple(getattr(logits, 'shape', ()))}"
            raise InvalidArgumentError("radius() needs outputs (n, classes)", found, "Certify a classifier.")
        best, predicted = logits.max(1)
        if self.head is None:
            gain = logits.new_full(logits.shape, sqrt(2) * self.upper)
        else:
            weight, before = self.head
            gain = torch.cdist(weight, weight, compute_mode="donot_use_mm_for_euclid_dist")[predicted] * before
        radii = (best[:, None] - logits) / gain
        radii.scatter_(1, predicted[:, None], inf)
        return predicted, radii.nan_to_num(nan=0.0, posinf=inf).amin(1) * (1 - 1e-9)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the network as JSON-able data; a number that is not finite is None."""
        bounds = {"upper": self.upper, "lower": self.lower, "slack": self.slack, "rows": self.rows}
        return {"schema": "gonio.certificate/1", **{key: json_data(value) for key, value in bounds.items()}}

    def __repr__(self) -> str:
        return f"<Certificate: constant from {number(self.lower)} to {number(self.upper)}, {len(self.rows)} rows>"

    def __str__(self) -> str:
        return printed(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        table = bare_table("layer", ("kind", "factor", "upper", "lower", "slack", "widens"))
        for row in self.rows:
            cells = map(number, (row.factor, row.upper, row.lower, row.slack, row.widens))
            table.add_row(Text(row.path), row.kind, *cells)
        yield table
        yield Text(self.sentence())


def certify(model: nn.Module, example: Tensor | Sequence[Tensor], *, steps: int = 30, seed: int = 0) -> Certificate:
    r"""Bounds of the l2 Lipschitz constant of a model in evaluation mode.

    .. math:: \text{lower} \le \sup_{x \ne y} \frac{\lVert f(x) - f(y) \rVert}{\lVert x - y \rVert} \le \text{upper}

    The upper bound follows the traced graph from the input to the output: a layer multiplies it by its own constant,
    a sum adds the bounds of its terms, and a concatenation takes the root of their squares. Batch norm is merged into
    the linear layer or convolution before it if that has no other reader. Constants of layers are those of
    :class:`gonio.surgery.facts.Facts`, which :func:`gonio.surgery.facts.register` states for types of your own; those
    of weights are :func:`gonio.geometry.operator_norm_bound`.

    The lower bound is the largest quotient over pairs of inputs: power iteration on the Jacobian at the examples, then
    gradient ascent of the quotient over the inputs.

    Both hold for the function of a copy in float64 and one input of the shape of an example, if the model treats the
    examples of a batch separately. Rounding of narrower arithmetic is not included.

    Args:
        example: (n, …) inputs; more of them give a better lower bound. Of several, as a loader yields them, the first.
        steps: of the lower bound, half of them power iterations.
        seed: of the first directions.

    Raises:
        NotApplicableError: with the path, if a layer or operation has no known constant, such as attention, layer
            norm and products of activations, or if the model cannot be traced or run on one example.
        InvalidArgumentError: for an example that is not a batch in floating point, steps below 1, or a model that
            cannot be copied.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU())
        >>> _ = model[0].weight.data.copy_(torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
        >>> c = gonio.certify(model, torch.ones(1, 2))
        >>> round(c.lower, 4), round(c.upper, 4)
        (4.0, 4.0)

    References: [1] M. Fazlyab et al., "Efficient and accurate estimation of Lipschitz constants for deep neural
        networks", NeurIPS 2019, §2: the product bound. [2] Y. Tsuzuku, I. Sato, M. Sugiyama, "Lipschitz-margin
        training", NeurIPS 2018, Proposition 1: the radius. https://arxiv.org/abs/1802.04034 [3] H. Kim,
        G. Papamakarios, A. Mnih, "The Lipschitz constant of self-attention", ICML 2021, Theorem 3.1: attention by dot
        products has none. https://arxiv.org/abs/2006.04710
    """
    require_model(model, "certify")
    given = example[0] if isinstance(example, (list, tuple)) and example else example  # a loader's [inputs, labels]
    if not isinstance(given, Tensor) or not given.is_floating_point() or given.dim() < 2 or len(given) < 1:
        found = f"{type(given).__name__} {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
        raise InvalidArgumentError("certify() needs a batch of inputs in floating point", found, "Pass example=x.")
    if steps < 1:
        raise InvalidArgumentError("certify() needs steps >= 1", f"{steps}", "Use about 30.")
    for name, parameter in model.named_parameters():
        empty = not is_lazy(parameter) and parameter.numel() == 0
        if not empty and (reason := why_not_dense(parameter)) is not None:
            do = "Certify a part of the model without it."
            raise NotApplicableError("certify", name.rpartition(".")[0], reason, do, action="bound")
    network = copy_of(unwrapped(model)).double().eval()
    if facts_of(network) is not UNKNOWN or isinstance(network, (*WEIGHTED, *TORCH_NORMS)):
        network = nn.Sequential(network)  # the graph shows layers inside of a model
    points = given.detach().to(_reference(network))
    graph = trace(network, training=False)
    if graph.reason:
        why = f"it cannot be traced by torch.fx ({graph.reason})"
        raise NotApplicableError("certify", graph.stopped, why, "Certify a part of it that can.", action="bound")
    inputs = [node for node in graph.nodes if node.op == "placeholder" and not node.args]
    if len(inputs) != 1:
        why = f"it takes {len(inputs)} inputs"
        raise NotApplicableError("certify", "", why, "Wrap it in a module that takes one.", action="bound")
    with run_eagerly(network), state_kept():
        bounds = UpperBounds(graph)
        outputs = _outputs_of_one(bounds, points)
        if not torch.allclose(_flat(outputs), _flat(network(points[:1].clone())), rtol=1e-6, atol=1e-9, equal_nan=True):
            why = "its traced graph has another output than the model, which may have hooks or random parts"
            raise NotApplicableError("certify", "", why, "Remove them, or certify a part of it.", action="bound")
        x, y, lower = _widest_pair(network, points, steps, seed)
        if not isfinite(lower):
            do = "gonio.measure(model, batch=x) finds the layer that makes them."
            raise NotApplicableError("certify", "", "its outputs at the examples are not finite", do, action="bound")
        gains = _Distances(graph, set(bounds.upper)).between(x, y)
    upper = bounds.upper.get(graph.nodes[-1], 0.0)
    if lower > upper:
        why = f"two inputs show a constant of {lower:.3g} at least, its layers state {upper:.3g} at most"
        do = "Correct what is registered for its layers, or remove what changes them; outputs that are constant but "
        raise NotApplicableError("certify", "", why, f"{do}for rounding have no bound.", action="bound")
    head = _head_of(graph, bounds.upper)
    return Certificate(upper=upper, lower=lower, rows=bounds.rows(gains), network=network, head=head)


def _outputs_of_one(bounds: UpperBounds, points: Tensor) -> Any:
    try:
        return bounds.run(points[:1].clone())
    except GonioError:
        raise
    except Exception as error:  # of the model's own code
        why = f"it does not run on one example ({first_line(error, kind=True)})"
        do = "Certify a part that treats the examples of a batch separately."
        raise NotApplicableError("certify", "", why, do, action="bound") from error


def _reference(network: nn.Module) -> Tensor:
    tensors = (*network.parameters(), *network.buffers())
    return next((p for p in tensors if p.is_floating_point()), torch.zeros((), dtype=torch.float64, device="cpu"))


def _head_of(graph: Graph, upper: dict[fx.Node, float]) -> tuple[Tensor, float] | None:
    """The weight of the linear layer whose output the network returns, and the bound of its input."""
    last = graph.nodes[-1].args[0]
    layer = graph.called(last) if isinstance(last, fx.Node) else None
    weight = applied_weight(layer) if isinstance(layer, nn.Linear) else None
    if not isinstance(last, fx.Node) or weight is None:
        return None
    return weight.detach(), upper.get(last.all_input_nodes[0], 0.0)


# --- the lower bound ----------------------------------------------------------------------------------


class _Distances(Interpreter):
    """Runs the graph on two inputs: how far their values at each node are apart, per distance of the inputs."""

    def __init__(self, graph: Graph, kept: Collection[fx.Node]) -> None:
        super().__init__(graph)
        self.kept = kept
        self.values: dict[fx.Node, Tensor] = {}

    @torch.no_grad()
    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n in self.kept:
            self.values[n] = _flat(result).clone()  # a later node may change it in place
        return result

    def between(self, x: Tensor, y: Tensor) -> dict[fx.Node, float]:
        """‖h(x) − h(y)‖ / ‖x − y‖ for the value h of each node."""
        self.run(x.clone())
        before, self.values = self.values, {}
        self.run(y.clone())
        return {node: float((before[node] - value).norm() / (x - y).norm()) for node, value in self.values.items()}


def _flat(outputs: Any, examples: int | None = None) -> Tensor:
    """All floating-point tensors in the outputs as one vector, or one row per example."""
    leaves = floats_in(outputs)
    if not leaves or any(x.numel() % (examples or 1) for x in leaves):
        found = f"outputs of shapes {[tuple(x.shape) for x in leaves]}"
        raise InvalidArgumentError("certify() needs outputs for each example", found, "Leave out a loss or a mean.")
    return torch.cat([x.reshape(-1) if examples is None else x.reshape(examples, -1) for x in leaves], -1)


def _gradients(moved: Tensor, x: Tensor, change: Tensor) -> tuple[Tensor | None, ...]:
    """Of the squared distance of outputs, by a point and by its change."""
    try:
        return torch.autograd.grad(moved.square().sum(), (x, change), allow_unused=True)
    except RuntimeError as error:  # as of a model that changes in place what its backward needs
        why = say("the pair of inputs is found by gradients, and it has none ({error})", error=first_line(error, 200))
        raise NotApplicableError("certify", "", why, "Remove operations in place.", action="bound") from error


def _widest_pair(network: nn.Module, points: Tensor, steps: int, seed: int) -> tuple[Tensor, Tensor, float]:
    """Two inputs with the largest quotient that is found, and the quotient, rounded down."""
    count, dims = len(points), range(1, points.dim())

    def size(x: Tensor) -> Tensor:
        return torch.linalg.vector_norm(x, dim=tuple(dims), keepdim=True)

    def output(x: Tensor) -> Tensor:
        return _flat(network(x.clone()), count)  # a model may change its input in place

    x = points.clone()
    length = _PAIRS * size(x).mean().clamp(min=1e-3)
    apart = torch.randn(x.shape, generator=generator(seed, "certify"), dtype=x.dtype, device="cpu").to(x)
    best, found = -1.0, (x[:1], x[:1] + apart[:1])
    for step in range(steps):
        last = step >= steps // 2
        reach = length * (1 if last else 1e-3)
        apart = reach * apart / size(apart).clamp(min=1e-30)
        x.requires_grad_()
        change = apart.clone().requires_grad_()
        base = output(x)
        moved = output(x + change) - base
        quotients = moved.detach().norm(dim=1) / size(change.detach()).flatten()
        top = int(quotients.argmax())
        if float(quotients[top]) > best:
            best = float(quotients[top])
            found = x.detach()[top : top + 1].clone(), (x + change).detach()[top : top + 1].clone()
        by_point, by_change = _gradients(moved, x, change)
        x = x.detach()
        if last and by_point is not None:
            x = x + 0.2 * reach * by_point / size(by_point).clamp(min=1e-30)
        # the gradient by the change is the Jacobian's adjoint on the moved output: a step of power iteration
        if by_change is not None:  # an example without a gradient keeps its direction
            apart = torch.where(size(by_change) > 0, by_change, apart)
    a, b = found
    with torch.no_grad():
        quotient = float((_flat(network(a.clone())) - _flat(network(b.clone()))).norm() / (a - b).norm())
    return a, b, quotient * (1 - 1e-9)
