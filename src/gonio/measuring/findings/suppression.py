"""Suppression: findings to leave out, by code for the whole model or for some layers. They are still counted."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from gonio.editing.where import as_selector, modules_at
from gonio.measuring.findings.rules import RULES, Finding, Suppressed, unknown_rule
from gonio.measuring.measurements import Measurements


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
        modules = {} if model is None else modules_at(model)
        unknown = nn.Module()  # the layer of a tensor that was read without its model

        def selects(where: str, finding: Finding) -> bool:
            owner = owners.get(finding.path, finding.path)
            module, selector = modules.get(owner, unknown), as_selector(where)
            return bool(finding.path) and (selector(owner, module) or selector(finding.path, module))

        kept: list[Finding] = []
        dropped: list[Finding] = []
        used: set[tuple[str, str]] = set()
        for finding in measured.findings:
            taken = {(w, code) for w, code in rules if code == finding.code and (not w or selects(w, finding))}
            (dropped if taken else kept).append(finding)
            used |= taken
        unmatched = tuple(
            f"{code} for {where}" if where else code for where, code in rules if (where, code) not in used
        )
        return replace(measured, findings=tuple(kept), suppressed=Suppressed(self.origin, tuple(dropped), unmatched))


def _known_code(code: str) -> str:
    found = str(code).strip().upper()
    if found not in RULES:
        raise unknown_rule(str(code))
    return found
