"""Suppression: findings to leave out, by code for the whole model or for some layers. They are still counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import nn

from gonio.errors import UnknownNameError
from gonio.measuring.findings.rules import RULES, Finding, Suppressed
from gonio.measuring.measurements import Measurements
from gonio.surgery import as_selector, sites


@dataclass(frozen=True)
class Suppression:
    """The findings to leave out, by code for the whole model and by code for some layers.

    A suppressed finding is removed from `findings`, so that it fails no check, and stays in `suppressed`; every
    output states how many there are. A finding on the whole model is suppressed only by `ignore`.

    Args:
        ignore: codes of rules.
        per_layer: (selector, codes) in the language of `where`: a glob, `re:…`, or `type:…`, which needs the model.
            It is matched against a layer's path and against a tensor's.
        origin: its name in the outputs, such as the file that it was read from.

    Raises:
        UnknownNameError: for a code that no rule has, with the closest ones.
        InvalidArgumentError: for an invalid selector.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
        >>> for layer in model:
        ...     _ = nn.init.zeros_(layer.weight)
        >>> m = gonio.measure(model.state_dict())
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
        object.__setattr__(self, "ignore", tuple(_known_code(code) for code in self.ignore))
        layers = tuple((where, tuple(_known_code(code) for code in codes)) for where, codes in self.per_layer)
        object.__setattr__(self, "per_layer", layers)
        for where, _ in layers:
            as_selector(where)

    def applied(self, measured: Measurements, model: nn.Module | None = None) -> Measurements:
        """The measurements without these findings, which are in `suppressed` instead.

        Args:
            model: the measured model, for selectors by type; without it these select nothing.
        """
        rules = [("", code) for code in dict.fromkeys(self.ignore)]  # (selector, code); no selector: the whole model
        rules += [(where, code) for where, codes in self.per_layer for code in dict.fromkeys(codes)]
        owners = {tensor.path: tensor.name.rpartition(".")[0] for tensor in measured.tensors}
        modules = {} if model is None else {site.path: site.module for site in sites(model)}
        hits = [(f, [rule for rule in rules if _takes(*rule, f, owners, modules)]) for f in measured.findings]
        used = {rule for _, taken in hits for rule in taken}
        unmatched = tuple(f"{rule[1]} for {rule[0]}" if rule[0] else rule[1] for rule in rules if rule not in used)
        dropped = tuple(finding for finding, taken in hits if taken)
        kept = tuple(finding for finding, taken in hits if not taken)
        return replace(measured, findings=kept, suppressed=Suppressed(self.origin, dropped, unmatched))


def _known_code(code: str) -> str:
    """A rule's code in capitals.

    Raises:
        UnknownNameError: if there is no such rule.
    """
    found = str(code).strip().upper()
    if found not in RULES:
        raise UnknownNameError("rule", str(code), RULES)
    return found


class _Unknown(nn.Module):
    """The layer of a tensor that was read without its model."""


_UNKNOWN = _Unknown()


def _takes(
    where: str, code: str, finding: Finding, owners: Mapping[str, str], modules: Mapping[str, nn.Module]
) -> bool:
    """Whether a rule of the suppression selects a finding."""
    if code != finding.code or not where:
        return code == finding.code
    if not finding.path:  # a finding on the whole model
        return False
    owner = owners.get(finding.path, finding.path)
    module, selector = modules.get(owner, _UNKNOWN), as_selector(where)
    return selector(owner, module) or selector(finding.path, module)
