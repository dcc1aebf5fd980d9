"""Suspects: the layers that findings name, by their path or by what the batch showed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from gonio.editing.where import modules_at
from gonio.measuring import Finding, Measurements
from gonio.measuring.figures.signals import Signal
from gonio.measuring.figures.starts import layers_as_built
from gonio.measuring.findings.model_rules import dead_layers, out_of_scale, stale, without_statistics
from gonio.measuring.findings.rules import LEVELS
from gonio.measuring.reading.entry import FACTOR
from gonio.surgery.calibrate import can_act
from gonio.surgery.facts import WEIGHTED, facts_of


def suspects(findings: Iterable[Finding], found: Measurements, model: nn.Module) -> list[str]:
    """The layers with parameters that findings name, each once.

    The worst findings come first, those with a path before those of the whole model, and then the order in which the
    layers ran. A finding of a layer without parameters, as a dead activation, names the layer that ran before it; of
    stale statistics it names the norm that comes first, and the layer before it.

    Example:
        >>> from gonio.lab.treating.suspects import suspects
        >>> model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
        >>> with torch.no_grad():
        ...     _ = model[2].weight[0].mul_(0)
        >>> found = gonio.measure(model)
        >>> suspects(found.findings, found, model)
        ['2']
    """
    ran = [signal.path for signal in found.signals]
    order = {path: place for place, path in enumerate([*ran, *(p for p in modules_at(model) if p not in ran)])}
    named: dict[str, tuple[int, bool, int]] = {}
    for finding in findings:
        for path in _named(finding, found, model):
            place = -LEVELS.index(finding.level), not finding.path, order.get(path, 0)
            named[path] = min(place, named.get(path, place))
    return sorted(named, key=named.__getitem__)


def _named(finding: Finding, found: Measurements, model: nn.Module) -> list[str]:
    """The layers with parameters that one finding names."""
    modules = modules_at(model)
    if finding.path:
        path = finding.path if finding.path in modules else finding.path.rpartition(".")[0]
        return [path] if path in modules and _trains(modules[path]) else []
    signals = [signal for signal in found.signals if signal.path in modules]
    if finding.code == "G415":
        return list(layers_as_built(model))
    if finding.code in ("G101", "G407"):
        return [path for path, m in modules.items() if _is_zero(m)]
    if finding.code == "G408":
        named = [signal.path for signal in dead_layers(signals)]
    elif finding.code == "G409":
        factors = {tensor.path for tensor in found.tensors if tensor.kind == FACTOR}
        weighted = {path for path, module in modules.items() if isinstance(module, WEIGHTED)} - factors
        kinds = {path: (bool(facts_of(m).removes_scale), path in weighted) for path, m in modules.items()}
        named = [
            s.path for s in signals if out_of_scale(s, norm=kinds[s.path][0], weighted=kinds[s.path][1]) is not None
        ]
    elif finding.code == "G410":
        first = [signal.path for signal in signals if stale(signal)][:1]
        return [path for norm in first for path in (*_before(norm, signals, modules), norm) if _trains(modules[path])]
    else:
        named = _without_statistics(modules)
    found_in = [[path] if _trains(modules[path]) else _before(path, signals, modules) for path in named]
    return list(dict.fromkeys(path for paths in found_in for path in paths))


def _before(path: str, signals: Sequence[Signal], modules: Mapping[str, nn.Module]) -> list[str]:
    """The last layer with parameters that ran before another one."""
    ran = [signal.path for signal in signals]
    earlier = ran[: ran.index(path)] if path in ran else []
    return [each for each in earlier if _trains(modules[each])][-1:]


def _trains(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


def _is_zero(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return weight is not None and weight.numel() > 0 and not bool(weight.any())


def _without_statistics(modules: Mapping[str, nn.Module]) -> list[str]:
    """The paths of the norms whose statistics are those of the start, unlike the rest of the model."""
    norms = {path: module for path, module in modules.items() if can_act(module) is None}
    fresh = set(map(id, without_statistics(norms.values())))
    return [path for path, module in norms.items() if id(module) in fresh]


def statistics_of(model: nn.Module) -> set[str]:
    """The paths of the running statistics that `calibrate_` measures."""
    layers = [path for path, m in modules_at(model).items() if can_act(m) is None]
    return {f"{path}.{name}".removeprefix(".") for path in layers for name in ("running_mean", "running_var")}


def calibrated_layers(treats: list[Finding], found: Measurements, model: nn.Module) -> list[list[str]]:
    """The layers in which `calibrate_` is tried: those that are named, then all (an empty list)."""
    layers = [path for path, module in modules_at(model).items() if can_act(module) is None]
    named = {finding.path.rpartition(".")[0] for finding in treats if finding.path}
    named |= set(_without_statistics(modules_at(model)))
    gaps = [signal for signal in found.signals if signal.path in layers and stale(signal)]
    first = {gaps[0].path} if gaps else set()  # what follows may be a consequence
    chosen = [path for path in layers if path in named | first]
    return [*([chosen] if chosen and len(chosen) < len(layers) else []), []]
