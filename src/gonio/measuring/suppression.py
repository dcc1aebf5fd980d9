"""Findings that the user does not want to hear of: which, and that they are still counted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from torch import nn

from gonio.errors import UnknownNameError
from gonio.measuring.findings import Finding
from gonio.measuring.measurements import Measurements
from gonio.measuring.rules import RULES
from gonio.measuring.suppressed import Suppressed
from gonio.surgery import as_selector, sites

__all__ = ["Suppression"]


@dataclass(frozen=True)
class Suppression:
    """Which findings to leave out, by code for the whole model and by code for some layers.

    A suppressed finding is no longer among `findings`, so it fails no check; it stays in `suppressed`, and every
    output says how many there are. One about the model as a whole is suppressed by `ignore` alone.

    Args:
        ignore: codes of rules.
        per_layer: (selector, codes) in the language of `where`: a glob, `re:…`, or `type:…`, which needs the model.
            It is held against a layer's path and against a tensor's.
        origin: what the outputs call it, such as the file that it was read from.

    Raises:
        UnknownNameError: for a code that no rule has, with the closest ones.
        InvalidArgumentError: for a selector that is none.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
        >>> for layer in model:
        ...     _ = nn.init.zeros_(layer.weight)
        >>> m = gonio.measure(model)
        >>> [(f.code, f.path) for f in m.findings]
        [('G101', '0'), ('G101', '1')]
        >>> quiet = gonio.measuring.Suppression(per_layer=[("1", ["G101"])]).applied(m)
        >>> [f.path for f in quiet.findings], [f.path for f in quiet.suppressed.findings]
        (['0'], ['1'])
    """

    ignore: tuple[str, ...] = ()
    per_layer: tuple[tuple[str, tuple[str, ...]], ...] = ()
    origin: str = "the suppression"

    def __post_init__(self) -> None:
        object.__setattr__(self, "ignore", tuple(known_code(code) for code in self.ignore))
        layers = tuple((where, tuple(known_code(code) for code in codes)) for where, codes in self.per_layer)
        object.__setattr__(self, "per_layer", layers)
        for where, _ in layers:
            as_selector(where)

    def applied(self, measured: Measurements, model: nn.Module | None = None) -> Measurements:
        """The measurements without these findings, which are in `suppressed` instead.

        Args:
            model: what was measured, for selectors by type; without it these select nothing.
        """
        owners = {tensor.path: tensor.name.rpartition(".")[0] for tensor in measured.tensors}
        modules = {} if model is None else {site.path: site.module for site in sites(model)}
        hit: set[tuple[str, str]] = set()
        dropped = tuple(f for f in measured.findings if _matching(self._rules(), f, owners, modules, hit))
        unmatched = tuple(_said(*rule) for rule in self._rules() if rule not in hit)
        kept = tuple(finding for finding in measured.findings if finding not in dropped)
        return replace(measured, findings=kept, suppressed=Suppressed(self.origin, dropped, unmatched))

    def _rules(self) -> list[tuple[str, str]]:
        """(selector, code); the selector is empty for the whole model."""
        whole = [("", code) for code in dict.fromkeys(self.ignore)]
        return [*whole, *((where, code) for where, codes in self.per_layer for code in dict.fromkeys(codes))]


def known_code(code: str) -> str:
    """A rule's code as it is written in the list of rules.

    Raises:
        UnknownNameError: if there is no such rule.
    """
    found = str(code).strip().upper()
    if found not in RULES:
        raise UnknownNameError("rule", str(code), RULES)
    return found


def _matching(
    rules: Iterable[tuple[str, str]],
    finding: Finding,
    owners: Mapping[str, str],
    modules: Mapping[str, nn.Module],
    hit: set[tuple[str, str]],
) -> bool:
    """Whether any rule takes the finding; all that do are added to `hit`."""
    taken = {rule for rule in rules if rule[1] == finding.code and _selects(rule[0], finding.path, owners, modules)}
    hit |= taken
    return bool(taken)


def _selects(where: str, path: str, owners: Mapping[str, str], modules: Mapping[str, nn.Module]) -> bool:
    if not where:
        return True
    if not path:  # a finding about the model as a whole
        return False
    owner = owners.get(path, path)
    module, selector = modules.get(owner, _UNKNOWN), as_selector(where)
    return selector(owner, module) or selector(path, module)


class _Unknown(nn.Module):
    """Stands for the layer of a tensor that was read without its model."""


_UNKNOWN = _Unknown()


def _said(where: str, code: str) -> str:
    return f"{code} for {where}" if where else code
