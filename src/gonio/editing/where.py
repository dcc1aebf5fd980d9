"""`where`: which modules an edit touches, as composable selectors; the modules of a model, and wrappers around them."""

from __future__ import annotations

import inspect
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gonio.errors import GonioError, InvalidArgumentError, NoMatchError, NotApplicableError
from gonio.execution import is_sharded as is_a_shard
from gonio.execution import loaded
from gonio.messages import Message, say


class Selector(ABC):
    """A predicate over `(path, module)` that combines with `&`, `|` and `~`.

    Example:
        >>> hidden = OfType(nn.Linear) & ~Path("head")
        >>> hidden("body.0", nn.Linear(2, 2)), hidden("head", nn.Linear(2, 2))
        (True, False)
        >>> str(hidden)
        'type:Linear & ~head'
    """

    @abstractmethod
    def __call__(self, path: str, module: nn.Module) -> bool:
        """Whether the module at `path` is selected."""

    @abstractmethod
    def __str__(self) -> str:
        """The selector as a user would write it."""

    def __and__(self, other: Where) -> Selector:
        return All((self, as_selector(other)))

    def __or__(self, other: Where) -> Selector:
        return Any_((self, as_selector(other)))

    def __invert__(self) -> Selector:
        return Not(self)


@dataclass(frozen=True)
class Everything(Selector):
    """Selects every module; the meaning of `where=None`.

    Example:
        >>> Everything()("any.path", nn.ReLU())
        True
    """

    def __call__(self, path: str, module: nn.Module) -> bool:
        return True

    def __str__(self) -> str:
        return "every module"


@dataclass(frozen=True, init=False)
class OfType(Selector):
    """Selects instances of the given module classes, subclasses included.

    Example:
        >>> OfType(nn.Conv2d, nn.Linear)("fc", nn.Linear(2, 2))
        True
    """

    types: tuple[type[nn.Module], ...]

    def __init__(self, *types: type[nn.Module]) -> None:
        if not types or not all(isinstance(t, type) for t in types):
            raise InvalidArgumentError("OfType() takes module classes", repr(types), "Pass e.g. OfType(nn.Conv2d).")
        object.__setattr__(self, "types", types)

    def __call__(self, path: str, module: nn.Module) -> bool:
        return isinstance(module, self.types)

    def __str__(self) -> str:
        return " | ".join(f"type:{t.__name__}" for t in self.types)

    def __repr__(self) -> str:
        return f"OfType({', '.join(t.__name__ for t in self.types)})"


@dataclass(frozen=True)
class OfTypeName(Selector):
    """Selects modules by the name of their class or of a base class; `"type:Conv2d"` in text."""

    name: str

    def __call__(self, path: str, module: nn.Module) -> bool:
        return any(self.name == base.__name__ for base in type(module).__mro__)

    def __str__(self) -> str:
        return f"type:{self.name}"


@dataclass(frozen=True)
class Path(Selector):
    """Selects modules whose dotted path matches a shell-style glob; `*` also matches dots.

    Example:
        >>> Path("layer1.*")("layer1.0.conv1", nn.ReLU()), Path("layer1")("layer1.0.conv1", nn.ReLU())
        (True, False)
    """

    glob: str

    def __call__(self, path: str, module: nn.Module) -> bool:
        return fnmatchcase(path, self.glob)

    def __str__(self) -> str:
        return self.glob


@dataclass(frozen=True)
class Regex(Selector):
    """Selects modules whose whole dotted path matches a regular expression; `"re:…"` in text.

    Example:
        >>> Regex(r"layer[34]\\..*")("layer3.0.conv1", nn.ReLU())
        True
    """

    pattern: str

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except (re.error, OverflowError) as error:
            found = f"{self.pattern!r} ({error})"
            raise InvalidArgumentError("where takes a regular expression", found, "Correct the pattern.") from error

    def __call__(self, path: str, module: nn.Module) -> bool:
        return re.fullmatch(self.pattern, path) is not None

    def __str__(self) -> str:
        return f"re:{self.pattern}"


@dataclass(frozen=True)
class Predicate(Selector):
    """Selects modules by a function `(path, module) -> bool`.

    Example:
        >>> wide = Predicate(lambda path, module: getattr(module, "out_features", 0) > 100)
        >>> wide("fc", nn.Linear(2, 200))
        True
    """

    function: Callable[[str, nn.Module], bool]

    def __call__(self, path: str, module: nn.Module) -> bool:
        return bool(self.function(path, module))

    def __str__(self) -> str:
        return getattr(self.function, "__qualname__", repr(self.function))


@dataclass(frozen=True)
class All(Selector):
    """The modules that every part selects; written `a & b`."""

    parts: tuple[Selector, ...]

    def __call__(self, path: str, module: nn.Module) -> bool:
        return all(part(path, module) for part in self.parts)

    def __str__(self) -> str:
        return " & ".join(_grouped(part) for part in self.parts)


@dataclass(frozen=True)
class Any_(Selector):
    """The modules that at least one part selects; written `a | b`."""

    parts: tuple[Selector, ...]

    def __call__(self, path: str, module: nn.Module) -> bool:
        return any(part(path, module) for part in self.parts)

    def __str__(self) -> str:
        return " | ".join(str(part) for part in self.parts)


@dataclass(frozen=True)
class Not(Selector):
    """The modules that the other selector does not select; written `~a`."""

    part: Selector

    def __call__(self, path: str, module: nn.Module) -> bool:
        return not self.part(path, module)

    def __str__(self) -> str:
        return f"~{_grouped(self.part, tight=True)}"


def _grouped(part: Selector, *, tight: bool = False) -> str:
    loose = isinstance(part, Any_) or (isinstance(part, OfType) and len(part.types) > 1)
    return f"({part})" if loose or (tight and isinstance(part, All)) else str(part)


Where = Selector | str | type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[str, nn.Module], bool] | None


def as_selector(where: Where) -> Selector:
    """The selector that a `where` argument stands for.

    `where` is a module class or tuple of classes, a glob over dotted paths (`"layer1.*"`), a regular expression
    (`"re:layer[34]\\..*"`), a class name (`"type:Conv2d"`), a function `(path, module) -> bool`, a :class:`Selector`,
    or None for every module.

    Raises: InvalidArgumentError for anything else, and for a regular expression that does not compile.

    Example:
        >>> as_selector("type:Linear")("fc", nn.Linear(2, 2)), as_selector(nn.Conv2d)("fc", nn.Linear(2, 2))
        (True, False)
    """
    match where:
        case None:
            return Everything()
        case Selector():
            return where
        case str() if where.startswith("re:"):
            return Regex(where[3:])
        case str() if where.startswith("type:"):
            if not where[5:].isidentifier():
                asked = "where='type:…' takes the name of a class"
                raise InvalidArgumentError(asked, repr(where), "Write e.g. type:Conv2d.")
            return OfTypeName(where[5:])
        case str():
            return Path(where)
        case type() if issubclass(where, nn.Module):
            return OfType(where)
        case tuple():
            return OfType(*where)
        case _ if callable(where) and not isinstance(where, type):
            return Predicate(where)
    raise InvalidArgumentError(
        "where takes a module class, a glob, 're:…', 'type:…', a function of path and module, or a selector",
        repr(where),
        "Pass one of these, or None for every module.",
    )


# --- the model ----------------------------------------------------------------------------------------


def require_model(model: object, asked: str) -> None:
    """Raise unless a verb was given a model; every one begins here. `asked` names it in the error.

    Raises: InvalidArgumentError for a path, a state dict, a class or anything else that is not a module.

    Example:
        >>> require_model(nn.ReLU(), "demo_")
        >>> require_model(nn.ReLU, "demo_")
        Traceback (most recent call last):
            ...
        gonio.errors.InvalidArgumentError: demo_ needs a model; found the class ReLU. Make an instance first: ReLU(…).
    """
    if isinstance(model, nn.Module):
        return
    found: str = say("an object of the class {name}", name=type(model).__name__)
    do = say("Pass a torch.nn.Module.")
    loading = say("Load it into its model first, with model.load_state_dict(…), and pass the model.")
    match model:
        case type():
            found = say("the class {name}", name=model.__name__)
            if issubclass(model, nn.Module):
                do = say("Make an instance first: {name}(…).", name=model.__name__)
        case str() | os.PathLike():
            found, do = say("the path {path!r}", path=os.fspath(model)), loading
        case Mapping():
            found, do = say("a state dict or another mapping ({name})", name=type(model).__name__), loading
        case None:
            found = "None"
    raise InvalidArgumentError(say("{asked} needs a model", asked=asked), found, do)


# --- the selected modules -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Site:
    """One module of a model, under all its names.

    Attributes:
        path: its first dotted path, without the names that wrappers add; `""` is the model itself.
        module: the module.
        owners: every `(parent, attribute)` that refers to it. A tied module has several.
        aliases: its other paths.
    """

    path: str
    module: nn.Module
    owners: tuple[tuple[nn.Module, str], ...]
    aliases: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """The name of the module's class."""
        return type(self.module).__name__

    def matches(self, selector: Callable[[str, nn.Module], bool]) -> bool:
        """Whether the selector takes this module under any of its paths."""
        return any(selector(path, self.module) for path in (self.path, *self.aliases))


@contextmanager
def at(site: Site, tensor: str = "") -> Iterator[None]:
    """Adds the place to an error of what knows a layer or a weight alone.

    Example:
        >>> from gonio.editing.where import at
        >>> with at(sites(nn.Sequential(nn.ReLU()))[1]):
        ...     raise NotApplicableError("demo", "ReLU", "it has no weight", "Leave it out.")
        Traceback (most recent call last):
        gonio.errors.NotApplicableError: demo: cannot be applied to 'ReLU'; it has no weight. Leave it out.
        at 0
    """
    try:
        yield
    except GonioError as error:
        error.add_note(f"at {'.'.join(filter(None, (site.path, tensor))) or 'the model'}")
        raise


def sites(model: nn.Module) -> list[Site]:
    """Every distinct module of a model once, in registration order, the model itself first.

    A module that is registered twice is one site with two owners. Models may be nested thousands deep.

    Example:
        >>> shared = nn.Linear(2, 2)
        >>> [(site.path, site.aliases) for site in sites(nn.Sequential(shared, nn.ReLU(), shared))]
        [('', ()), ('0', ('2',)), ('1', ())]
    """
    paths: dict[nn.Module, list[str]] = {}
    owners: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    stack: list[tuple[str, nn.Module, tuple[nn.Module, str] | None]] = [("", model, None)]
    while stack:  # depth first, without recursion
        path, module, owner = stack.pop()
        if module not in paths:
            children = [(name, child) for name, child in module._modules.items() if child is not None]
            for name, child in reversed(children):
                longer = path if adds_no_name(module, name) else f"{path}.{name}".removeprefix(".")
                stack.append((longer, child, (module, name)))
        paths.setdefault(module, []).append(path)
        owners.setdefault(module, []).extend([owner] if owner is not None else [])
    return [Site(names[0], module, tuple(owners[module]), tuple(names[1:])) for module, names in paths.items()]


def sites_at(model: nn.Module) -> dict[str, Site]:
    """The sites of a model by all of their paths.

    Example:
        >>> from gonio.editing.where import sites_at
        >>> shared = nn.ReLU()
        >>> [*sites_at(nn.Sequential(shared, shared))]
        ['', '0', '1']
    """
    return {path: site for site in sites(model) for path in (site.path, *site.aliases)}


def modules_at(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of :func:`sites` by their paths: at the path of a wrapper, what is inside.

    Example:
        >>> from gonio.editing.where import modules_at
        >>> modules_at(nn.DataParallel(nn.Sequential(nn.ReLU())))
        {'': Sequential(
          (0): ReLU()
        ), '0': ReLU()}
    """
    return {site.path: site.module for site in sites(model)}


def select(model: nn.Module, where: Where, *, verb: str, can_act: Callable[[nn.Module], str | None]) -> list[Site]:
    """The sites that `where` selects and on which the verb can act.

    Selected modules on which the verb cannot act are left out, because globs also match containers. `can_act` returns
    None for a module on which it can, otherwise the reason; `verb` names it in the error.

    Raises: NoMatchError if nothing is left, with the modules on which the verb could act.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> only_linear = lambda module: None if isinstance(module, nn.Linear) else "has no weight"
        >>> [site.path for site in select(model, None, verb="demo_", can_act=only_linear)]
        ['0']
    """
    require_model(model, verb)
    selector = as_selector(where)
    everything = sites(model)
    matched = [site for site in everything if site.matches(selector)]
    taken = [site for site in matched if why_not(site, can_act) is None]
    if not taken:
        able = [site.path for site in everything if why_not(site, can_act) is None]
        refused = {site.path: why_not(site, can_act) or "" for site in matched}
        text = asked_of(selector)
        if text is not None and not matched and any(OfTypeName(text)(site.path, site.module) for site in everything):
            text = f"{text!r}, a glob over paths (for the class write 'type:{text}')"
        raise NoMatchError(verb, text, able, refused=refused)
    return taken


def left_out(
    model: nn.Module, where: Where, *, can_act: Callable[[nn.Module], str | None], tensor: str = "weight"
) -> dict[str, str]:
    """Selected layers that have a matrix of this name and are left out by :func:`select`, by path, with the reason.

    Example:
        >>> left_out(nn.Sequential(nn.Bilinear(2, 2, 2)), None, can_act=lambda module: "it takes two inputs")
        {'0': 'it takes two inputs'}
    """
    selector = as_selector(where)
    matched = [site for site in sites(model) if site.matches(selector) and _has_matrix(site.module, tensor)]
    return {site.path: why for site in matched if (why := why_not(site, can_act)) is not None}


def further_matrices(model: nn.Module, can_act: Callable[[nn.Module, str], str | None]) -> list[Message]:
    """The matrices of attention and recurrent layers that a call for the tensor `weight` leaves out, for a note.

    Args:
        can_act: of a module and a tensor's name, why the verb cannot act on it.

    Example:
        >>> from gonio.editing.where import further_matrices
        >>> from gonio.surgery.init import can_act
        >>> print(*further_matrices(nn.MultiheadAttention(8, 2), can_act))
        in_proj_weight of MultiheadAttention layers
    """
    matrices: dict[str, list[str]] = {}
    for module in model.modules():
        if isinstance(module, (nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)):
            names = [name for name in module._parameters if name != "weight" and can_act(module, name) is None]
            matrices.setdefault(type(module).__name__, names)
    return [
        say("{names} of {kind} layers", names=", ".join(names), kind=kind) for kind, names in matrices.items() if names
    ]


def why_not(site: Site, can_act: Callable[[nn.Module], str | None]) -> str | None:
    """Why a verb cannot act on a module; None if it can. TorchScript's have neither Python parts nor hooks.

    Example:
        >>> from gonio.editing.where import sites, why_not
        >>> why_not(sites(torch.jit.trace(nn.ReLU(), torch.zeros(1)))[0], lambda module: None)
        'it is scripted, and runs compiled code; edit the model before torch.jit'
    """
    if isinstance(site.module, torch.jit.ScriptModule):
        return say("it is scripted, and runs compiled code; edit the model before torch.jit")
    return can_act(site.module)


def _has_matrix(module: nn.Module, tensor: str) -> bool:
    own = dict(module._parameters.items()).get(tensor)  # a scripted module keeps no dict of them
    if own is not None:
        return is_lazy(own) or own.dim() > 1
    # computed by a parametrization, or by a hook; of the type, because a wrapper may forward attributes
    computed = isinstance(inspect.getattr_static(type(module), tensor, None), property)
    return computed or isinstance(vars(module).get(tensor), Tensor)


# --- wrappers ---------------------------------------------------------------------------------------------------------

# Note [Wrappers and shards]
# The order that always works is: edit, build the optimizer, then compile, replicate or shard. A later edit
# works where its result is right, and is refused elsewhere:
# compiled: edits inside act, and the next call compiles anew; the verbs run the model eagerly themselves.
# replicated (DDP): the parameters are fixed when it is wrapped; an edit may change values and the computation, but may
#     not add or remove parameters.
# sharded (FSDP 2): values can be set (`init_`, `calibrate_`); everything else is refused.
# sharded by tensor parallelism: as for FSDP 2. `parallelize_module` itself fails on parametrized layers.
# sharded (FSDP 1): parameters are slices of one flat tensor; every edit is refused.

# The classes that call one child, which is the whole model, and the name of that child; paths leave it out.
_WRAPPERS = {
    "torch.nn:DataParallel": "module",
    "torch.nn.parallel:DistributedDataParallel": "module",
    "apex.parallel:DistributedDataParallel": "module",
    "torch.optim.swa_utils:AveragedModel": "module",
    "torch._dynamo:OptimizedModule": "_orig_mod",
    "torch.distributed.fsdp:FullyShardedDataParallel": "_fsdp_wrapped_module",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper:CheckpointWrapper": "_checkpoint_wrapped_module",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper:OffloadWrapper": "_checkpoint_wrapped_module",
}
_CONTENT = frozenset(_WRAPPERS.values())
_SHARDED = "torch.distributed.fsdp:FSDPModule"
_BEFORE = "Edit the model before it is sharded."


def adds_no_name(parent: nn.Module, name: str) -> bool:
    """Whether `name` is the name that a wrapper gives to its content; paths leave it out.

    A class of a user, or a subclass with a forward of its own, may do more than call the child of this name.
    """
    names = (kind for kind, child in _WRAPPERS.items() if child == name)
    kinds: Sequence[Any] = loaded(*names) if name in _CONTENT else ()
    return any(isinstance(parent, kind) and type(parent).forward is kind.forward for kind in kinds)


def holds_original(module: nn.Module) -> bool:
    """Whether a wrapper holds a reference to the module itself, so that replacing the child has no effect."""
    return isinstance(module, loaded("torch._dynamo:OptimizedModule"))


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside the wrappers of compilation, parallelism and averaging."""
    while True:
        inner = next((child for name, child in model._modules.items() if adds_no_name(model, name)), None)
        if inner is None:
            return model
        model = inner


def is_replicated(model: nn.Module) -> bool:
    """Whether DistributedDataParallel is around the model or a part of it."""
    kinds = loaded("torch.nn.parallel:DistributedDataParallel", "apex.parallel:DistributedDataParallel")
    return any(isinstance(module, kinds) for module in model.modules())


def is_sharded(model: nn.Module) -> bool:
    """Whether any parameter is one process's part of a larger tensor."""
    return any(map(is_a_shard, model.parameters()))


def reshard_(model: nn.Module) -> None:
    """Reshard a model in FSDP 2: after a forward it may still hold whole tensors in the place of its shards."""
    for module in model.modules():
        if isinstance(module, loaded(_SHARDED)):
            module.reshard()  # type: ignore[operator]


def refuse_flat_shards(model: nn.Module, verb: str, *, do: str = _BEFORE, action: str = "change") -> None:
    """Raise for what is no model, and for a model in FSDP 1."""
    require_model(model, verb)
    if any(isinstance(module, loaded("torch.distributed.fsdp:FullyShardedDataParallel")) for module in model.modules()):
        why = "its parameters are slices of one flat tensor (FSDP 1)"
        raise NotApplicableError(verb, "", why, do, action=action)


def refuse_shards(model: nn.Module, verb: str) -> None:
    """Raise where whole tensors are needed and the model has shards."""
    refuse_flat_shards(model, verb)
    if not is_sharded(model):
        return
    why, do = "its parameters are sharded", _BEFORE
    if not any(isinstance(module, loaded(_SHARDED)) for module in model.modules()):
        why = "its parameters are sharded by tensor parallelism"
        do = "Edit the model before; parallelize_module takes plain layers alone, without a parametrization."
    raise NotApplicableError(verb, "", why, do, action="change")


def asked_of(selector: Selector) -> str | None:
    """A selector in the words of an error; None where it was left out."""
    return None if isinstance(selector, Everything) else str(selector)


def refuse_meta(model: nn.Module, verb: str) -> None:
    """Raise where values are needed and tensors of the model have none, and for what is no model."""
    require_model(model, verb)
    named = (*model.named_parameters(), *model.named_buffers())
    if first := next((name for name, tensor in named if tensor.is_meta), ""):
        why = say("{name} is on the meta device and has no values", name=first)
        raise NotApplicableError(verb, "", why, "Load its weights first.", action="change")


def run_eagerly(model: nn.Module) -> AbstractContextManager[None]:
    """A context in which compiled modules run eagerly: hooks fire, and nothing is compiled."""
    if not any(holds_original(m) or m._compiled_call_impl is not None for m in model.modules()):
        return nullcontext()  # set_stance imports the compiler
    stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance
