"""The outputs of all layers on a batch, the gradients there, and what the outputs reveal of norms and angles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from gonio.editing.twin import evaluating, set_tensors_
from gonio.editing.where import is_sharded
from gonio.errors import first_line
from gonio.execution import derivatives, several_ranks
from gonio.geometry import angles, layout_of, matrix_view
from gonio.geometry.norms import whole
from gonio.geometry.views import has_filters, why_not_dense
from gonio.messages import say
from gonio.nn.conversion import computes_as
from gonio.parametrizations.parametrization import Parametrization
from gonio.regularizers import SelfOrthogonality
from gonio.seeding import generator, normal
from gonio.surgery import Site, sites
from gonio.surgery.calibrate import own_buffers
from gonio.surgery.equivalent import call, first_input
from gonio.surgery.facts import CONVOLUTIONS, facts_of

_OF_CHANNELS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm, nn.GroupNorm)
_OF_LAST = (nn.LayerNorm, nn.RMSNorm)
_COMPUTING = (Parametrization, nn.utils.parametrize.ParametrizationList)


@dataclass(frozen=True, kw_only=True)
class Signal:
    """One layer's output on a batch, in evaluation mode, at the layer's first call, and the gradient there.

    The gradient is that of the model's output multiplied by standard normal numbers and summed; its figures
    are None where none arrives. A batch norm that has seen no batch yet has no meaningful statistics: it uses
    those of this batch, as in the first step of training.

    Attributes:
        mean, std, rms: over all entries.
        gain, norm_ratio: rms and norm of the output over those of the input; None where the layer has no
            tensor input.
        zeros: share of entries that are exactly 0.
        units, dead_units: channels, and those that are 0 throughout: the outputs of a layer with filters, dim 1 after a
            norm of channels, a pooling, or in more than three dimensions; as at the last such layer whose output has
            the same shape, else the columns of a matrix. None where that does not tell them.
        nonfinite: entries that are NaN or infinite; they are left out of the other figures.
        calls: how often the layer ran.
        angles_read, angles_exact: root mean square of 90° − θ over pairs of filters, in degrees, estimated from the
            signs of the outputs (without the bias of a finite sample), and computed from the weights. They agree for
            inputs uniform in direction. Only for linear layers and convolutions with 2 to 2048 filters per group.
        gradient_rms: of the gradient at the output.
        gradient_gain, gradient_norm_ratio: rms and norm of the gradient at the input, through this layer
            alone, over those at the output.
        train_eval_gap: of a norm with running statistics: root mean square of the difference between its outputs with
            the statistics of this batch and with the running ones, over the standard deviation of the latter output.
            0 where they agree; about √(3/(2N)) for a batch of the training data with N values per channel. None
            for norms that have seen no batch, and over several processes.
        branch: "ends" where the layer's own weights are all 0, or a gain among them, so that its output is 0 for every
            input and they have a gradient: the end of a residual branch initialised to the identity, not a dead layer;
            where a layer only passes such zeros on; and where its input is a constant 0, as the first queries of a
            decoder, and its bias is 0, too. "waits" where the gradient is exactly 0 for one of these reasons, or
            because the branch is multiplied by 0: it trains once the zero has changed. Else "".
    """

    path: str
    kind: str
    shape: tuple[int, ...]
    mean: float
    std: float
    rms: float
    gain: float | None
    norm_ratio: float | None
    zeros: float
    units: int | None
    dead_units: int | None
    nonfinite: int
    calls: int
    angles_read: float | None = None
    angles_exact: float | None = None
    gradient_rms: float | None = None
    gradient_gain: float | None = None
    gradient_norm_ratio: float | None = None
    train_eval_gap: float | None = None
    branch: str = ""


def measure_signals(model: nn.Module, batch: Any) -> tuple[tuple[Signal, ...], tuple[str, ...]]:
    """The outputs of all layers without sub-layers, in the order in which they run, and notes.

    A twin of the model runs twice, in evaluation mode and without compilation, the second time with its backward; and
    a third time where layers got zeros, to tell whose they are. A model that draws random numbers draws the same ones
    in each run, and the global generator keeps its state.
    """
    with evaluating(model) as plain, _first_statistics(plain):
        computing = {part for module in plain.modules() if isinstance(module, _COMPUTING) for part in module.modules()}
        layers = {s.module: s for s in sites(plain) if _is_layer(s.module) and s.module not in computing}
        outputs = _Outputs(layers)
        with torch.no_grad(), _hooked(layers, outputs):
            _run(plain, batch)
        backward, why = _backward(plain, batch, list(outputs.found))
        for module, signal in [(m, s) for m, s in outputs.found.items() if s.rms == 0 and s.gain == 0]:
            if module in backward and backward[module].trains:
                outputs.found[module] = replace(signal, branch="ends")
        empty = [m for m, s in outputs.found.items() if s.rms == 0 and s.gain is None and s.branch == ""]
        constant = {module for module, gradient in backward.items() if gradient.constant}
        for module in _zero_by_zeroed_weights(plain, batch, {m: layers[m] for m in empty}, constant):
            outputs.found[module] = replace(outputs.found[module], branch="ends")
    forward = outputs.found.items()
    zero = [m for m, s in forward if s.rms == 0 and s.branch == "" and next(m.parameters(), None) is None]
    dead = [backward[module].node for module in zero if module in backward]
    signals = [_joined(s, backward[m], dead) if m in backward else s for m, s in forward]
    notes = [] if signals else [say("Outputs were not measured: no layer had one with values on this batch.")]
    return tuple(signals), (*notes, *((f"Gradients were not measured: {why}.",) if why else ()))


def _run(model: nn.Module, batch: Any) -> Any:
    """The outputs; of a model that draws random numbers, with the same ones each time."""
    torch.default_generator.manual_seed(0)
    return call(model, batch)


def _zero_by_zeroed_weights(
    twin: nn.Module, batch: Any, layers: dict[nn.Module, Site], constant: set[nn.Module]
) -> list[nn.Module]:
    """Those of the layers that got zeros which do so no more once the weights that are all 0 have changed a little.

    They pass on the zeros of a branch that starts at 0, as dropout behind its gate does; what is behind dead units
    still gets zeros. Of layers whose input is constant, those whose output is then another one: a bias is added.
    """
    if not layers or is_sharded(twin):
        return []
    zeroed = [p for p in twin.parameters() if p.is_floating_point() and not p.any()]
    draws = [normal(p.shape, 0, "zeroed weights", i) for i, p in enumerate(zeroed)]
    changed = {id(p): nn.Parameter(1e-3 * d.to(p)) for p, d in zip(zeroed, draws, strict=True)}
    originals = {id(changed[id(p)]): p for p in zeroed}
    outputs = _Outputs(layers)
    set_tensors_(twin, changed)
    try:
        with torch.no_grad(), _hooked(layers, outputs):
            _run(twin, batch)
    finally:  # some models are their own twins
        set_tensors_(twin, originals)
    found = outputs.found.items()
    return [module for module, signal in found if signal.gain is not None or (signal.rms and module in constant)]


def _is_layer(module: nn.Module) -> bool:
    """Whether a module has no sub-layers except those that compute its weight, and takes hooks."""
    if isinstance(module, torch.jit.ScriptModule):
        return False
    lists = module._modules.get("parametrizations")
    return all(child is lists or isinstance(child, _COMPUTING) for child in module.children())


@contextmanager
def _first_statistics(model: nn.Module) -> Iterator[None]:
    """Batch norms that have seen no batch use the statistics of this one, and do not update their own."""
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    norms = [m for m in model.modules() if isinstance(m, kinds) and m.track_running_stats]
    fresh = [m for m in norms if m.num_batches_tracked is not None and not m.num_batches_tracked]
    fresh = [m for m in fresh if are_unseen(m.get_buffer("running_mean"), m.get_buffer("running_var"))]
    handles = [norm.register_forward_pre_hook(_use_batch, with_kwargs=True) for norm in fresh]
    try:
        yield
    finally:
        for norm, handle in zip(fresh, handles, strict=True):
            handle.remove()
            norm.track_running_stats, norm.training = True, False


def are_unseen(mean: Tensor, var: Tensor) -> bool:
    """Whether statistics have their initial values; `num_batches_tracked` alone is 0 after `calibrate_` too."""
    return not bool(mean.any()) and not bool((var != 1).any())


def _use_batch(norm: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    x: Tensor = first_input(arguments, keywords)
    several = x.numel() > x.shape[1]  # one value per channel has no variance
    norm.training = several
    norm.track_running_stats = not several  # type: ignore[assignment]


@contextmanager
def _hooked(layers: Iterable[nn.Module], hooks: _Outputs | _Gradients) -> Iterator[None]:
    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(layer.register_forward_pre_hook(hooks.before, with_kwargs=True))
            stack.enter_context(layer.register_forward_hook(hooks.after, with_kwargs=True))
        yield


class _Outputs:
    """Hooks that measure each layer's first call; its input first, because a layer may overwrite it in place."""

    def __init__(self, layers: dict[nn.Module, Site]) -> None:
        self.layers = layers
        self.found: dict[nn.Module, Signal] = {}
        self.fed: dict[nn.Module, tuple[float, int]] = {}  # rms and number of entries
        self.channels: dict[torch.Size, int] = {}  # the dimension of the channels in the last output of each shape

    def before(self, module: nn.Module, arguments: Any, keywords: Any) -> None:
        source = _signal_in((arguments, keywords))
        if module not in self.fed and source is not None:
            self.fed[module] = _rms(source.detach()), source.numel()  # the model may have turned gradients on

    def after(self, module: nn.Module, arguments: Any, keywords: Any, output: Any) -> None:
        if module in self.found:
            self.found[module] = replace(self.found[module], calls=self.found[module].calls + 1)
            return
        found = _signal_in(output)
        tensor = None if found is None else found.detach()
        if tensor is not None:
            if (channels := _channels_of(module, tensor)) is not None:
                self.channels[tensor.shape] = channels
            channels = self.channels.get(tensor.shape, _USUAL.get(min(tensor.ndim, 4)))
            figures = _figures(tensor, *self.fed.get(module, (0.0, 0)), channels)
            figures["angles_read"], figures["angles_exact"] = off_right_angle(module, tensor)
            figures["train_eval_gap"] = train_eval_gap(module, arguments, keywords, output)
            ends = figures["rms"] == 0 and self._is_zeroed(module)
            path, kind = self.layers[module].path, type(module).__name__
            self.found[module] = Signal(path=path, kind=kind, calls=1, branch="ends" if ends else "", **figures)

    def _is_zeroed(self, module: nn.Module) -> bool:
        """Whether own weights that are all 0 make the output 0; of a part without weights, those of its module.

        A batch norm with an activation in it has its own gain, and only the activation is a layer without sub-layers.
        """
        own = list(module.parameters())
        around = [p for parent, _ in self.layers[module].owners for p in parent.parameters(recurse=False)]
        fed, _ = self.fed.get(module, (None, 0))
        weights = own if fed else around if fed == 0 and not own else []
        return bool(weights) and not any(bool(each.any()) for each in weights)


def _joined(signal: Signal, gradient: Gradient, dead: list[Node | None]) -> Signal:
    stopped = gradient.output == 0 and signal.rms > 0
    waits = stopped and not any(_leads_to(node, gradient.node) for node in dead)
    return replace(
        signal,
        gradient_rms=gradient.rms,
        gradient_gain=gradient.gain,
        gradient_norm_ratio=gradient.norm_ratio,
        branch=signal.branch or ("waits" if waits else ""),
    )


def _signal_in(value: Any) -> Tensor | None:
    """The first floating-point tensor in any nesting of tuples, lists and dicts."""
    return next(filter(_is_signal, tree_leaves(value)), None)


def _is_signal(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 0


_USUAL = {2: 1, 4: 1}  # the dimension of the channels of so many or more, where no layer tells it


def _channels_of(module: nn.Module, output: Tensor) -> int | None:
    """The dimension of the output that counts the channels, if the type of the layer tells it."""
    if has_filters(module):  # which make one channel each, at so many positions as the kernel has dimensions
        weight: Any = module.weight
        dim: int = output.ndim + 1 - weight.ndim
        return dim if 0 <= dim < output.ndim else None
    facts = facts_of(module)
    if output.ndim > 1 and (facts.acts_on == "channels" or isinstance(module, _OF_CHANNELS)):
        return 1
    return output.ndim - 1 if isinstance(module, nn.RNNBase) or computes_as(module, _OF_LAST) else None


def _figures(output: Tensor, fed: float, entries: int, channels: int | None) -> dict[str, Any]:
    units = None if channels is None else output.movedim(channels, 0).reshape(output.shape[channels], -1)
    finite = torch.isfinite(output)
    values = output[finite].double()
    rms = _rms(output)
    gain = rms / fed if fed else None
    return {
        "shape": tuple(output.shape),
        "mean": float(values.mean()) if values.numel() else 0.0,
        "std": float(values.std(correction=0)) if values.numel() else 0.0,
        "rms": rms,
        "gain": gain,
        "norm_ratio": None if gain is None else gain * sqrt(output.numel() / entries),
        "zeros": float((output == 0).double().mean()),
        "units": None if units is None else len(units),
        "dead_units": None if units is None else int((units == 0).all(1).sum()),
        "nonfinite": int((~finite).sum()),
    }


def _rms(tensor: Tensor) -> float:
    """Root mean square of the finite entries; 0 if there is none."""
    values = tensor[torch.isfinite(tensor)].double()
    return float(values.square().mean().sqrt()) if values.numel() else 0.0


# --- the gradient of a random linear function of the output ----------------------------------------------------------


@dataclass
class Gradient:
    """Sums of squares of the gradient at a layer's output, and at its input through this layer alone."""

    output: float | None = None  # None where no gradient arrives
    outputs: int = 0
    input: float | None = None
    inputs: int = 0
    trains: bool = False  # whether a gradient arrives at the layer's own parameters
    constant: bool = False  # whether no parameter had a part in the layer's input
    node: Node | None = None  # where autograd computes the layer's output

    @property
    def rms(self) -> float | None:
        return None if self.output is None else sqrt(self.output / self.outputs)

    @property
    def norm_ratio(self) -> float | None:
        """Norm of the gradient at the input over that at the output."""
        return sqrt(self.input / self.output) if self.output and self.input is not None else None

    @property
    def gain(self) -> float | None:
        return None if self.norm_ratio is None else self.norm_ratio * sqrt(self.outputs / self.inputs)

    def at_output(self, gradient: Tensor | None) -> None:
        """Hook; an operation that has no derivative, as of a quantised layer, passes None on."""
        if gradient is not None:
            self.output, self.outputs = float(gradient.double().square().sum()), gradient.numel()

    def at_input(self, gradient: Tensor | None) -> None:
        if gradient is not None:
            self.input, self.inputs = float(gradient.double().square().sum()), gradient.numel()


def _backward(model: nn.Module, batch: Any, layers: Sequence[nn.Module]) -> tuple[dict[nn.Module, Gradient], str]:
    """The gradient at each layer's first call; or an empty dict and the reason.

    The output is multiplied by standard normal numbers and summed. No `.grad` is changed. Frozen parameters take
    part, because gradients pass through their layers too.
    """
    hooks = _Gradients()
    try:
        _unfreeze_(model)
        with torch.enable_grad(), _hooked(layers, hooks):
            outputs = tree_leaves(_run(model, batch))
            hooks.recording = False  # a checkpointed part calls its layers again in the backward
            roots = [leaf for leaf in outputs if isinstance(leaf, Tensor) and leaf.requires_grad]
            if not roots:
                return {}, "its output has no gradient"
            draws = [normal(t.shape, 0, "cotangent", i) for i, t in enumerate(roots)]
            inputs = [*hooks.sources, *(p for p in model.parameters() if p.requires_grad)]
            along = [d.to(t) for d, t in zip(draws, roots, strict=True)]
            found = derivatives(roots, inputs, along, allow_unused=True)
            learn = {id(p) for p, g in zip(inputs, found, strict=True) if g is not None and bool((g != 0).any())}
            for layer, gradient in hooks.found.items():
                gradient.trains = any(id(p) in learn for p in layer.parameters())
    except RuntimeError as error:  # no derivative, or an operation in place that autograd cannot follow
        return {}, say("derivatives cannot be computed: {error}", error=first_line(error, 80))
    finally:  # a hook and the node that it refers to would keep the graph, with its weights, for good
        for handle in hooks.handles:
            handle.remove()
    return hooks.found, ""


Called = tuple[tuple[Any, ...], dict[str, Any]]


class _Gradients:
    """Hooks that record each layer's first call."""

    def __init__(self) -> None:
        self.found: dict[nn.Module, Gradient] = {}
        self.sources: list[Tensor] = []  # inputs without a gradient of their own
        self.handles: list[RemovableHandle] = []
        self.recording = True

    def before(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Called | None:
        first = self.recording and module not in self.found
        gradient = self.found.setdefault(module, Gradient())
        if getattr(module, "inplace", False):
            return None  # it must write into the tensor that it was given
        places: list[tuple[int | str, Any]] = [*enumerate(arguments), *keywords.items()]
        for place, argument in places:
            if _is_signal(argument):
                # A separate view, so that the gradients of other layers to the same tensor are not counted; in
                # every call, because a checkpointed part must compute the same twice.
                own = argument.view_as(argument) if argument.requires_grad else argument.detach().requires_grad_()
                if first:
                    self.sources += [own] if own.is_leaf else []
                    gradient.constant = own.is_leaf and torch.is_grad_enabled()
                    self.handles.append(own.register_hook(gradient.at_input))
                if isinstance(place, str):
                    return arguments, {**keywords, place: own}
                return (*arguments[:place], own, *arguments[place + 1 :]), keywords
        return None

    def after(self, module: nn.Module, _arguments: Any, _keywords: Any, output: Any) -> None:
        gradient = self.found.get(module)
        if not self.recording or gradient is None or gradient.node is not None:
            return
        tensor = _signal_in(output)
        if tensor is not None and tensor.grad_fn is not None:
            self.handles.append(tensor.register_hook(gradient.at_output))
            gradient.node = tensor.grad_fn


def _unfreeze_(twin: nn.Module) -> None:
    """Let all parameters require gradients; a sharded model, which runs itself, keeps its own."""
    if not is_sharded(twin):
        frozen = [p for p in twin.parameters() if p.is_floating_point() and not p.requires_grad]
        set_tensors_(twin, {id(p): nn.Parameter(p.detach()) for p in frozen})


def _leads_to(later: Node | None, earlier: Node | None) -> bool:
    """Whether the result of `earlier` is an input of `later`, directly or through other nodes."""
    pending, seen = [later], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        if node is earlier:
            return True
        seen.add(node)
        pending += [following for following, _ in node.next_functions]
    return False


# --- norms: training mode beside evaluation mode ---------------------------------------------------------------------


@torch.no_grad()
def train_eval_gap(norm: nn.Module, arguments: Any, keywords: Any, output: Any) -> float | None:
    """Root mean square of (output with the batch's statistics − `output`), over the deviation of `output`.

    None for modules without running statistics or before their first batch, for a batch without a variance (one value
    per channel), and over several processes. The norm's statistics do not change.
    """
    mean, var = norm._buffers.get("running_mean"), norm._buffers.get("running_var")
    if mean is None or var is None or norm.training or several_ranks():
        return None
    if are_unseen(mean, var) or not isinstance(output, Tensor) or output.numel() < 2:
        return None
    trained = _in_training(norm, arguments, keywords)
    if trained is None:
        return None
    size = output.double().std(correction=0)
    gap = (trained.double() - output.double()).square().mean().sqrt()
    found = float(gap / size)
    return found if size > 0 and found < float("inf") else None


def _in_training(norm: nn.Module, arguments: Any, keywords: Any) -> Tensor | None:
    """Its output in training mode; hooks do not run, and its buffers keep their values."""
    norm.training = True
    try:
        with own_buffers(norm):
            found = norm.forward(*arguments, **keywords)
    except (ValueError, RuntimeError):  # a single value per channel; a norm that trains on other devices only
        return None
    finally:
        norm.training = False
    return found if isinstance(found, Tensor) else None


# --- angles between filters, estimated from outputs ------------------------------------------------------------------

MOST_FILTERS = 2048  # in a group: their angles are a matrix
SAMPLES = 4096
RIGHT = 90.0

# Nearly hard signs: with the γ = 10 of training, small deviations from 90° are estimated 6 to 8 % too large.
_ESTIMATE = SelfOrthogonality(1.0, mean_ratio=0.0, gamma=1e3, standardize=True, samples=SAMPLES)
_KINDS = (nn.Linear, *CONVOLUTIONS)


@torch.no_grad()
def off_right_angle(module: nn.Module, output: Tensor) -> tuple[float | None, float | None]:
    r"""Root mean square of :math:`90° - \theta_{ij}` over pairs of filters: from the outputs, and from the weights.

    The first is 90° · √(mean of ϑ²) without the bias of the finite sample, with ϑ the agreement in sign that
    :class:`gonio.regularizers.SelfOrthogonality` penalises. The two agree where inputs are uniform in direction.
    None for layers that are not linear, of one filter, or of more than :data:`MOST_FILTERS` per group.
    """
    weight = getattr(module, "weight", None)
    if not (isinstance(module, _KINDS) and isinstance(weight, Tensor) and why_not_dense(weight) is None):
        return None, None
    layout = layout_of(module)
    filters = matrix_view(whole(weight), layout)  # a shard has some filters only
    count = filters.shape[1]
    if isinstance(module, nn.Linear):
        x = output.reshape(-1, output.shape[-1])
    else:  # without a batch dimension for a single input
        x = output if output.ndim == weight.ndim else output.unsqueeze(0)
    samples = min(SAMPLES, x.numel() // max(1, x.shape[1]))
    readable = samples >= 3 and x.shape[1] == layout.groups * count and bool(torch.isfinite(x).all())
    if not 2 <= count <= MOST_FILTERS or not readable:
        return None, None
    spread = _ESTIMATE.value(x.float(), groups=layout.groups, generator=generator(0, "measure", "samples"))
    read = RIGHT * float(_ESTIMATE.debias(spread, samples).clamp_min(0).sqrt())
    off = ~torch.eye(count, dtype=torch.bool, device=filters.device)
    exact = (angles(filters).rad2deg() - RIGHT)[:, off]
    return read, float(exact.square().mean().sqrt())
