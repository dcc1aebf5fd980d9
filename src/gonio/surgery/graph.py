"""The graph of a model, traced by `torch.fx`.

`torch.fx` traces most convolutional networks and fails on data-dependent control flow: then the graph is empty and
states the reason.
"""

from __future__ import annotations

import inspect
import itertools
import operator
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy

from gonio.editing.memory import memory_key, registered
from gonio.editing.twin import in_mode, twin_of, without_wrappers
from gonio.editing.where import unwrapped
from gonio.geometry.views import why_not_dense
from gonio.messages import fixed, say
from gonio.nn.conversion import computes_as
from gonio.parametrizations.mechanism import without_steps
from gonio.seeding import state_kept
from gonio.surgery.facts import (
    ACTIVATIONS,
    CONVOLUTIONS,
    TORCH_NORMS,
    UNKNOWN,
    WEIGHTED,
    Facts,
    computes_plainly,
    facts_of,
    has_changing_hooks,
    measure,
    tail_of,
)

# Linear functions without weights: the search for the following norm or activation passes them.
_PASSED_FUNCTIONS = frozenset(
    ("flatten", "reshape", "view", "permute", "transpose", "contiguous", "dropout", "squeeze", "unsqueeze", "mean")
)
# Positively homogeneous functions: scales move through them.
ELEMENTWISE_FUNCTIONS = frozenset(("relu", "relu_", "leaky_relu", "dropout", "contiguous"))
POOLING_FUNCTIONS = frozenset(
    f"{kind}_pool{dims}d" for kind in ("max", "avg", "adaptive_max", "adaptive_avg") for dims in (1, 2, 3)
)


@dataclass(frozen=True, eq=False)
class Graph:
    """The traced graph of a model; without nodes if it cannot be traced.

    Attributes:
        model: the module that the paths start from: the model without compilation or parallelism around it and its
            parts.
        nodes: the nodes of the `torch.fx` graph, in the order of execution.
        reason: why tracing failed; empty if it did not. stopped: path of the module whose forward could not be traced.
        measured: by path, the facts of layers of unknown type that follow a weighted layer.
        dims: by path, the number of dimensions of a layer's outputs, as far as a run of the model told it.
        constants: by the target of a node, the tensors that the forward computes from buffers alone.
        read: the `id` of each tensor that the forward reads of a module.
        exchanged: paths of the layers that are called with other tensors in the place of their own.
    """

    model: nn.Module
    nodes: tuple[fx.Node, ...] = ()
    reason: str = ""
    stopped: str = ""
    measured: Mapping[str, Facts] = field(default_factory=dict)
    dims: Mapping[str, int] = field(default_factory=dict)
    constants: Mapping[str, Tensor] = field(default_factory=dict)
    read: frozenset[int] = frozenset()
    exchanged: frozenset[str] = frozenset()

    def called(self, node: fx.Node) -> nn.Module | None:
        """The module that a node calls; None for functions, methods and inputs."""
        return self.model.get_submodule(str(node.target)) if node.op == "call_module" else None

    def facts(self, node: fx.Node) -> Facts:
        """What the layer that a node calls does, by its type or as measured; unknown for functions."""
        module = self.called(node)
        stated = UNKNOWN if module is None else facts_of(module)
        return stated if stated is not UNKNOWN else self.measured.get(str(node.target), UNKNOWN)

    def calls(self) -> Iterator[tuple[str, nn.Module, fx.Node]]:
        """Every call of a layer in the order of execution: its path, the module and the node."""
        for node in self.nodes:
            module = self.called(node)
            if module is not None:
                yield str(node.target), module, node

    @cached_property
    def call_counts(self) -> dict[str, int]:
        """How often each layer runs in one forward, by path."""
        return dict(Counter(path for path, _, _ in self.calls()))

    @cached_property
    def _owners(self) -> Counter[Hashable]:
        """For each Parameter, by its place in memory: under how many names modules have registered it."""
        return Counter(memory_key(p) for m in self.model.modules() for p in m._parameters.values() if p is not None)

    def shares_parameters(self, module: nn.Module) -> bool:
        """Whether another layer has one of the module's own Parameters."""
        return any(self._owners[memory_key(p)] > 1 for p in module._parameters.values() if p is not None)

    @cached_property
    def read_outside(self) -> dict[int, str]:
        """For the `id` of each Parameter that is read outside of its own layer: what reads it."""
        found: dict[int, str] = {}
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        for node in self.nodes:
            if node.op == "get_attr" and str(node.target) in parameters:
                reader = called_function(next(iter(node.users), node)) or node.name
                found[id(parameters[str(node.target)])] = f"the forward of the model ({reader})"
        for path, module, _ in self.calls():  # a layer with a forward of its own may read what is inside of it
            if not computes_as(module, WEIGHTED):
                inside = [p for child in module.children() for p in child.parameters()]
                found.update((id(p), f"{path} ({type(module).__name__})") for p in inside)
        return found

    @cached_property
    def read_by_name(self) -> dict[str, set[str]]:
        """By path of each layer, the names of its tensors that the forward of the model reads without calling it."""
        called, found = self.call_counts, {}
        for path, module in self.model.named_modules(remove_duplicate=False):
            if path in called or isinstance(module, (*WEIGHTED, *TORCH_NORMS)):  # not those whose inside was traced
                own = {**module._parameters, **module._buffers}
                found[path] = {name for name, tensor in own.items() if id(tensor) in self.read}
        return found

    def why_pinned(self, path: str, module: nn.Module) -> str:
        """Why the weight of a layer cannot be changed along with its neighbours; empty if it can."""
        return self._why_fixed(path, module) or self._why_exchanged(path)

    def _why_fixed(self, path: str, module: nn.Module) -> str:
        own = [p for p in module._parameters.values() if p is not None]
        if (why := next(filter(None, map(why_not_dense, own)), None)) is not None:
            return say("{path}: {why}", path=path, why=fixed(why))
        if path in self.exchanged:
            return say("{path} gets other tensors in the place of its own when it runs", path=path)
        if self.call_counts[path] > 1:
            return say("{path} runs more than once", path=path)
        with without_steps(module):
            computed = module._parameters.get("weight") is not getattr(module, "weight", None)
        if computed:
            return say("{path} has a parametrized weight", path=path)
        if self.shares_parameters(module):
            return say("{path} shares its weight", path=path)
        readers = [self.read_outside[id(p)] for p in own if id(p) in self.read_outside]
        if readers:
            return say("{path} has a weight that {reader} reads too", path=path, reader=readers[0])
        if has_changing_hooks(module):
            return say("{path} has forward hooks, which may change its output", path=path)
        return ""

    def _why_exchanged(self, path: str, beside: str = "") -> str:
        """Why another layer may run in its place, without running in that of a layer beside it; empty if none may."""
        for end in (*_dots(path), len(path)):
            if (other := self._at_rest.get(path[:end])) is not None and not f"{beside}.".startswith(f"{path[:end]}."):
                told = {"path": path[:end], "other": other}
                return say("{other} does not run, and a setting of the model may put it in the place of {path}", **told)
        return ""

    @cached_property
    def _at_rest(self) -> dict[str, str]:
        """By path of a part that runs, one that runs in neither mode, of its kind and sizes or of one list with it."""
        return self._resting(self._ever_running) if self._resting(self._running) else {}

    @cached_property
    def _ever_running(self) -> frozenset[str]:
        """The paths of the parts that run in evaluation or in training."""
        return self._running.union(*(trace(self.model, training=mode)._running for mode in (False, True)))

    def why_read_at_rest(self, layer: nn.Module) -> str:
        """Which layer that never runs would fit the outputs of this one, and may read them in another setting.

        Not one that may take the place of a layer that runs: it reads what that one reads.
        """
        outputs = getattr(layer, "out_features", getattr(layer, "out_channels", 0))
        fitting = [
            path
            for path, module in self.model.named_modules()
            if isinstance(module, WEIGHTED) and path not in self._running
            if getattr(module, "in_features", getattr(module, "in_channels", 0)) == outputs
        ]
        apart = self._ever_running.union(self._at_rest.values()) if fitting else ()
        other = next((path for path in fitting if path not in apart), None)
        return "" if other is None else say("{other} does not run, and may read the output of its layer", other=other)

    @cached_property
    def _running(self) -> frozenset[str]:
        """The paths of the parts in which a layer runs or is read, and of all that is inside of such a layer."""
        read = {*self.call_counts, *(path for path, names in self.read_by_name.items() if names)}
        around = {path[:end] for path in read for end in _dots(path)}
        return frozenset(around.union(*(self._inside(path) for path in read)))

    def _inside(self, path: str) -> set[str]:
        return {f"{path}.{name}".rstrip(".") for name, _ in self.model.get_submodule(path).named_modules()}

    def _resting(self, runs: frozenset[str]) -> dict[str, str]:
        found: dict[str, str] = {}
        for path, module in self.model.named_modules(remove_duplicate=False):
            parts = {f"{path}.{name}".lstrip("."): part for name, part in module.named_children()}
            rest = [each for each, part in parts.items() if each not in runs and any(True for _ in part.parameters())]
            listed = isinstance(module, (nn.ModuleList, nn.ModuleDict))
            for one, other in itertools.product(parts.keys() & runs if rest else (), rest):
                a, b = parts[one], parts[other]
                if type(a) is type(b) and (listed or _sizes(a) == _sizes(b)):
                    found[one] = other
        return found

    @cached_property
    def norm_after(self) -> dict[str, str]:
        """For each weighted layer whose whole output goes into normalisation layers: the first such layer."""
        found = self._first_after_each(lambda node: str(node.target) if self.facts(node).removes_scale else None)
        return {path: norms[0] for path, norms in found.items() if norms[0] is not None and all(norms)}

    @cached_property
    def activation_after(self) -> dict[str, str]:
        """The activation that the output of each weighted layer meets first; see :func:`activation_after`."""
        found = self._first_after_each(self._activation, through_norms=True)
        return {path: names[0] for path, names in found.items() if names[0] is not None and len(set(names)) == 1}

    def _activation(self, node: fx.Node) -> str | None:
        """The name of an activation, or "linear" where the search for one ends."""
        module = self.called(node)
        if node.op == "output" or isinstance(module, WEIGHTED):
            return "linear"
        if module is None:
            called = called_function(node).removesuffix("_")
            return called if called in ACTIVATIONS else None
        candidates = [self.facts(node), *map(facts_of, tail_of(module))]
        return next((facts.activation for facts in candidates if facts.activation), None)

    def _first_after_each(
        self, name: Callable[[fx.Node], str | None], *, through_norms: bool = False
    ) -> dict[str, list[str | None]]:
        """For each weighted layer: the first named node after each reader of its outputs, behind linear nodes."""

        def passes(node: fx.Node) -> bool:
            module, facts = self.called(node), self.facts(node)
            if module is None:
                return called_function(node) in _PASSED_FUNCTIONS
            # a norm with children may have an unknown activation inside
            plain = facts_of(module) is not UNKNOWN or not module._modules
            return bool(facts.linear) or (through_norms and bool(facts.removes_scale) and plain)

        def first(node: fx.Node) -> str | None:
            while (found := name(node)) is None and passes(node) and len(users := value_users(node)) == 1:
                node = users[0]
            return found

        found: dict[str, list[str | None]] = {}
        for path, module, node in self.calls():
            if isinstance(module, WEIGHTED) and node.users:
                found.setdefault(path, []).extend(first(user) for user in value_users(node))
        return found

    @cached_property
    def scale_invariant(self) -> frozenset[str]:
        """Paths of layers on the scale of whose weight the function in training does not depend.

        Stricter than :attr:`norm_after`: each output goes directly into a norm, which also removes the layer's bias if
        there is one, and no other layer shares the weight.
        """
        found: dict[str, bool] = {}
        for path, module, node in self.calls():
            weight = module._parameters.get("weight")
            if weight is None or not computes_as(module, WEIGHTED):
                continue
            if self._owners[memory_key(weight)] == 1 and id(weight) not in self.read_outside:
                has_bias = module._parameters.get("bias") is not None
                after = [self.facts(user) for user in value_users(node)]
                removed = bool(after) and all(f.removes_shift if has_bias else f.removes_scale for f in after)
                found[path] = found.get(path, True) and removed
        return frozenset(path for path, free in found.items() if free)

    def folds_into(self, norm: nn.Module) -> nn.Module | str:
        """The layer into which an affine map of dim 1 in the place of the norm folds, or why there is none.

        That layer is linear or convolutional, runs torch's own forward, has its channels on dim 1 and feeds the norm
        alone.
        """
        nodes = [node for _, module, node in self.calls() if module is norm]
        if not nodes:
            around = [path for path, module, _ in self.calls() if any(part is norm for part in module.modules())]
            return f"{around[0]} calls it inside of its own forward" if around else "it does not run"
        feeds = nodes[-1].all_input_nodes
        layer = self.called(feeds[0]) if len(feeds) == 1 and len(value_users(feeds[0])) == 1 else None
        if layer is None or not computes_plainly(layer) or isinstance(layer, nn.Bilinear):
            return "its input is not the output of a linear or convolutional layer of torch that feeds it alone"
        if len(nodes) > 1 or self.call_counts[str(feeds[0].target)] > 1:
            return "it or the layer before it runs more than once"
        if any(m._forward_hooks or m._forward_pre_hooks for m in (layer, norm)):
            return "it or the layer before it has forward hooks"
        if self.read_by_name[str(nodes[-1].target)]:
            return "its scale, shift or statistics are read elsewhere too"
        at, after = str(feeds[0].target), str(nodes[-1].target)
        if after in self.exchanged:
            return "it gets other tensors in the place of its own when it runs"
        elsewhere = self._why_exchanged(at, after) or self._why_exchanged(after, at) or self.why_read_at_rest(layer)
        return self._why_fixed(at, layer) or elsewhere or self._why_other_axis(feeds[0], layer) or layer

    def _why_other_axis(self, node: fx.Node, layer: nn.Module) -> str:
        """Why the channels of a layer's output are not on dim 1, or may not be; empty if they are."""
        dims = self.dims_of(node)
        if isinstance(layer, nn.Linear) and dims is None:
            return (
                "its input may have more than two dimensions, of which it normalises another than the layer's; "
                "an example= tells"
            )
        expected = 2 if isinstance(layer, nn.Linear) else len(layer.kernel_size) + 2  # type: ignore[arg-type]
        if dims in (None, expected):
            return ""
        axis = (dims or 0) - 1 if isinstance(layer, nn.Linear) else 0
        return f"it normalises dim 1 of its input, and the channels of the layer before it are on dim {axis}"

    def dims_of(self, node: fx.Node) -> int | None:
        """The number of dimensions of a node's result, if the graph or a run of the model tells it."""
        removed = 0
        while True:
            if node.op == "call_module" and str(node.target) in self.dims:
                return self.dims[str(node.target)] - removed
            module, called, before = self.called(node), called_function(node), node.all_input_nodes[:1]
            if isinstance(module, tuple(_DIMS)):
                return _DIMS[next(kind for kind in _DIMS if isinstance(module, kind))] - removed
            if flattens_from_dim_1(node, module, called):
                return 2 - removed
            if called == "mean" and not node.kwargs.get("keepdim"):
                dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
                removed += len(dims) if isinstance(dims, (tuple, list)) else 1
                same = dims is not None
            else:
                same = isinstance(module, nn.Linear) or self.facts(node).acts_on is not None
                same = same or called in ELEMENTWISE_FUNCTIONS or called in POOLING_FUNCTIONS
                same = same or bool(self.facts(node).removes_scale)
            if not same or not before:
                return None
            node = before[0]


# --- tracing ------------------------------------------------------------------------------------------

_TRACING = threading.RLock()
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class _Tracer(fx.Tracer):
    """Treats every layer that has weights, or that is of torch or gonio, as one node.

    While it traces, `torch.fx` has replaced `nn.Module.__call__` for the whole process; the calls of other
    threads pass through.
    """

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()
        self._measuring = False
        self.measured: dict[str, Facts] = {}
        self.read: dict[int, Tensor] = {}
        self.own: dict[int, dict[str, int]] = {}  # by the `id` of each module, those of its tensors before the run
        self.exchanged: set[str] = set()
        self.stopped = ""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if isinstance(m, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
            return False
        if type(m).__module__.startswith(("torch.nn.", "gonio.nn")) or isinstance(m, (*WEIGHTED, *TORCH_NORMS)):
            return True
        found = self.measured.get(module_qualified_name, UNKNOWN)
        # a layer with vectors as its only parameters multiplies by them: it is a leaf of unknown facts
        vectors = [p for p in m._parameters.values() if p is not None and sum(size > 1 for size in p.shape) < 2]
        alone = not m._modules and bool(vectors) and len(vectors) == len(m._parameters)
        return facts_of(m) is not UNKNOWN or bool(found.removes_scale) or alone

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != self._thread or self._measuring:
            return forward(*args, **kwargs)
        if self.own.get(id(m), registered(m)) != registered(m):  # as in torch.func.functional_call
            self.exchanged.add(self.path_of_module(m))
        if facts_of(m) is UNKNOWN and (not m._modules or isinstance(m, TORCH_NORMS)) and args:
            self._measure(m, args[0])
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            self.stopped = self.stopped or self.path_of_module(m)  # the innermost one
            raise

    def _measure(self, m: nn.Module, argument: Any) -> None:
        """Run a layer of unknown type on inputs of the shape that the weighted layer before it makes."""
        node = argument.node if isinstance(argument, fx.Proxy) else None
        before: nn.Module | None = None
        while node is not None and not isinstance(before, WEIGHTED):
            before = self.root.get_submodule(str(node.target)) if node.op == "call_module" else None
            node = node.all_input_nodes[0] if len(node.all_input_nodes) == 1 else None
        weight = before._parameters.get("weight") if before is not None else None
        if weight is None or isinstance(m, WEIGHTED) or not isinstance(before, (nn.Linear, *CONVOLUTIONS)):
            return
        transposed = not isinstance(before, nn.Linear) and before.transposed
        groups: Any = before.groups if transposed else 1
        channels = weight.shape[1] * int(groups) if transposed else weight.shape[0]
        rows: list[tuple[int, ...]] = [(4, channels), (2, 3, channels), (2, 5, 5, channels)]
        maps: list[tuple[int, ...]] = [(4, channels, *[5] * dims) for dims in (1, 2, 3)]
        own = [maps.pop(weight.dim() - 3)] if weight.dim() > 2 else []
        self._measuring = True
        try:
            found = measure(m, [*own, *rows] if own else [*rows, *maps])
        finally:
            self._measuring = False
        self.measured[self.path_of_module(m)] = found

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        if threading.get_ident() != self._thread or self._measuring:
            return attr_val
        if isinstance(attr_val, Tensor):
            self.read[id(attr_val)] = attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)


def trace(model: nn.Module, *, training: bool | None = None, dims: Mapping[str, int] | None = None) -> Graph:
    """Trace a model symbolically, called with its first arguments alone; never raises because of the model.

    Arguments that have defaults keep them: `if mask is None` is decided as in a plain call. A twin of the model is
    traced; the random generator is restored. One thread traces at a time; meanwhile other threads may call modules
    that are not compiled. `training` is the mode in which the model is traced; None for its own. `dims` becomes
    :attr:`Graph.dims`.

    Example:
        >>> trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU())).reason
        ''
    """
    whole, model, tracer = unwrapped(model), without_wrappers(model), _Tracer()
    try:
        with _TRACING, state_kept(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch.fx, about defaults that it cannot check
            twin = without_wrappers(twin_of(whole))
            if training is not None:
                in_mode(twin, training=training)
            tracer.own = {id(module): registered(module) for module in twin.modules()}
            arguments = list(inspect.signature(twin.forward).parameters.values())[1:]
            defaults = {p.name: p.default for p in arguments if p.kind in _BY_NAME and p.default is not p.empty}
            graph = tracer.trace(twin, concrete_args=defaults)
    except Exception as error:  # the model's own code can raise anything under a tracer
        return Graph(model, reason=f"{type(error).__name__}: {error}".split("\n")[0], stopped=tracer.stopped)
    names = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
    constants = {name: value for name, value in vars(twin).items() if name in names and isinstance(value, Tensor)}
    facts, read = tracer.measured, frozenset(tracer.read) | _read_buffers(twin, model, tracer.read)
    told: dict[str, Any] = {"measured": facts, "dims": dims or {}, "constants": constants, "read": read}
    return Graph(model, tuple(graph.nodes), exchanged=frozenset(tracer.exchanged), **told)


def _read_buffers(twin: nn.Module, model: nn.Module, read: Mapping[int, Tensor]) -> set[int]:
    """The model's buffers, by `id`, of which the twin's copies were read."""
    copies = dict(twin.named_buffers(remove_duplicate=False))
    own = model.named_buffers(remove_duplicate=False)
    return {id(buffer) for name, buffer in own if id(copies.get(name)) in read}


# --- the layers that follow ---------------------------------------------------------------------------


def followed_by_norm(model: nn.Module) -> dict[str, str]:
    """Weighted layers whose output goes only into normalisation layers, and the first such layer.

    The loss does not depend on the scale of their weights. Empty where the model cannot be traced.

    Example:
        >>> followed_by_norm(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Conv2d(2, 2, 3)))
        {'0': '1'}
    """
    return trace(model).norm_after


def activation_after(model: nn.Module) -> dict[str, str]:
    """The first activation after each weighted layer, `"linear"` if there is none.

    Normalisation, average pooling, dropout and reshaping in between are skipped. A layer whose output goes to
    different activations, or to an unknown one, is left out.

    Example:
        >>> activation_after(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.GELU(), nn.Linear(2, 2)))
        {'0': 'gelu', '3': 'linear'}
    """
    return trace(model).activation_after


def _dots(path: str) -> list[int]:
    return [place for place, sign in enumerate(path) if sign == "."]


def _sizes(module: nn.Module) -> list[tuple[str, torch.Size]]:
    held = itertools.chain(module.named_parameters(), module.named_buffers())
    return [(name, tensor.shape) for name, tensor in held if not is_lazy(tensor)]


def called_function(node: fx.Node) -> str:
    """The name of the method, or of the function of torch or Python, that a node calls; empty for other nodes."""
    if node.op == "call_method":
        return str(node.target)
    name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
    return name if any(getattr(home, name, None) is node.target for home in _HOMES) else ""


_HOMES = (torch, F, operator, torch._C._nn)
_DIMS = dict(zip((*CONVOLUTIONS, nn.BatchNorm2d, nn.BatchNorm3d), (3, 4, 5, 3, 4, 5, 4, 5), strict=True))


def reads_size(node: fx.Node) -> bool:
    """Whether a node reads the sizes of its input, or what follows from sizes alone, and no values.

    `x.size(0)`, `x.shape[0]` and `x.shape[2] // 2` do.
    """
    if node.op == "call_method":
        return node.target in ("size", "dim", "numel", "ndimension")
    if node.target is getattr:
        return node.args[1] in ("shape", "ndim", "dtype", "device")
    inputs = node.all_input_nodes
    known = node.op == "call_function" and getattr(operator, called_function(node), None) is node.target
    return known and bool(inputs) and all(map(reads_size, inputs))


def value_inputs(node: fx.Node) -> list[fx.Node]:
    """The inputs of a node that are tensors, without sizes of tensors."""
    return [each for each in node.all_input_nodes if not reads_size(each)]


def value_users(node: fx.Node) -> list[fx.Node]:
    """The nodes that read the values of a node's result."""
    return [each for each in node.users if not reads_size(each)]


def flattens_from_dim_1(node: fx.Node, module: nn.Module | None, called: str) -> bool:
    """Whether a node makes (N, C, *positions) to (N, C·positions): by `flatten`, or by `x.view(x.size(0), -1)`."""
    if module is not None:
        return bool(computes_as(module, (nn.Flatten,)) and module.start_dim == 1 and module.end_dim == -1)
    if called in ("view", "reshape") and not node.kwargs:
        sizes: Any = node.args[1] if len(node.args) == 2 else node.args[1:]
        two = isinstance(sizes, tuple) and len(sizes) == 2
        return two and sizes[1] == -1 and _is_first_size(sizes[0], node.args[0])
    given = dict(zip(("start_dim", "end_dim"), node.args[1:], strict=False)) | node.kwargs
    return bool(called == "flatten" and given.get("start_dim", 0) == 1 and given.get("end_dim", -1) == -1)


def _is_first_size(size: Any, x: Any) -> bool:
    """Whether a node is the first size of x."""
    if not isinstance(size, fx.Node):
        return False
    if size.op == "call_method" and size.target == "size":
        return size.args == (x, 0) and not size.kwargs
    if called_function(size) != "getitem" or size.args[1] != 0:
        return False
    shape: Any = size.args[0]
    of_method = shape.op == "call_method" and shape.target == "size"
    return bool((of_method and shape.args == (x,)) or (shape.target is getattr and shape.args == (x, "shape")))


def averages_positions(node: fx.Node, spatial: int) -> bool:
    """Whether a call of `mean` is over all positions of (N, C, *positions), so that one number per channel is left."""
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    dims = (dims,) if isinstance(dims, int) else dims
    if len(node.args) > 2 or not isinstance(dims, (tuple, list)) or not all(isinstance(d, int) for d in dims):
        return False
    rank = 2 + spatial
    return {d % rank for d in dims if isinstance(d, int)} == set(range(2, rank))
