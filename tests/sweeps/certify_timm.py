"""`gonio.certify` on models of timm: a bound that no pair of inputs exceeds, or a refusal that names the layer.

    PYTHONPATH=tests python -m sweeps.timm_sweep certify --count 332 --out tests/sweeps/timm_certified.jsonl
    PYTHONPATH=tests python -m sweeps.certify_timm       the table of docs/howto/certify.md from these rows

Pairs are all pairs of `INPUTS` random images around a few centres, at distances over four decades: 10,011 of them.
"""

from __future__ import annotations

import json
import re
import statistics
from collections import defaultdict
from collections.abc import Callable
from math import log10
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gonio
from gonio.errors import NotApplicableError
from gonio.measuring.certificate import Certificate
from gonio.seeding import generator

ROWS = Path(__file__).with_name("timm_certified.jsonl")
PAGE = Path(__file__).parents[2] / "docs" / "howto" / "certify.md"
MARKS = "<!-- certified -->\n", "<!-- /certified -->"
INPUTS = 142  # 142 · 141 / 2 = 10,011 pairs
_CENTRES, _BATCH, _STEPS = 6, 16, 6


def certified(name: str, build: Callable[[], tuple[nn.Module, Tensor]]) -> dict[str, Any]:
    """The row of one model: its bounds and the largest quotient of all pairs, or why it is refused."""
    model, x = build()
    row = {"model": name, "input": list(x.shape[1:])}
    try:
        found = gonio.certify(model, x, steps=_STEPS)
    except NotApplicableError as refusal:
        return {**row, "steps": {"certify": f"refused: {refusal}"}}
    except Exception as error:  # the outcome of this model; the sweep goes on
        return {**row, "steps": {"certify": f"failed: {type(error).__name__}: {error}"[:400]}}
    seen = largest_quotient(found, tuple(x.shape[1:]))
    figures = {"upper": found.upper, "lower": found.lower, "seen": seen, "pairs": INPUTS * (INPUTS - 1) // 2}
    return {**row, "steps": {"certify": judged(found, seen)}, "figures": figures}


def judged(found: Certificate, seen: float) -> str:
    """Whether the bound is finite, and neither its own lower bound nor the quotient of a pair exceeds it."""
    if not 0 <= found.upper < float("inf"):
        return f"failed: the upper bound is {found.upper}"
    if max(seen, found.lower) > found.upper:
        return f"failed: a quotient of {max(seen, found.lower):.6g} exceeds the bound {found.upper:.6g}"
    return "passed"


@torch.no_grad()
def largest_quotient(found: Certificate, shape: tuple[int, ...]) -> float:
    """‖f(x) − f(y)‖ / ‖x − y‖ over all pairs, of the float64 copy that is certified."""
    random = generator(1)
    centres = torch.randn(_CENTRES, *shape, generator=random, dtype=torch.float64)
    sizes = 10 ** torch.linspace(-3, 1, INPUTS, dtype=torch.float64).view(-1, *[1] * len(shape))
    moves = torch.randn(INPUTS, *shape, generator=random, dtype=torch.float64)
    x = centres[torch.arange(INPUTS) % _CENTRES] + sizes * moves
    y = torch.cat([found.network(part.clone()).flatten(1) for part in x.split(_BATCH)])
    return float((torch.pdist(y) / torch.pdist(x.flatten(1))).max())


# --- the table ------------------------------------------------------------------------------------------------------

_REFUSAL = re.compile(r"refused: certify: cannot bound (?:layer '[^']*'(?: \(\w+\))?|the model): (.*?)\. [A-Z][a-z]+ ")
_SHORTER = (
    (
        r"its slope where its input is nearly constant .*",
        "a layer, group or RMS norm, steep where its input is constant",
    ),
    (r"no Lipschitz constant is known for \w*Norm\w*", "a norm without a known constant"),
    (r"no Lipschitz constant is known for it with these arguments", "a function without a known constant"),
    (r"no Lipschitz constant is known for .*", "a class without a known constant"),
    (r"it cannot be traced by torch.fx .*", "a forward that torch.fx cannot trace"),
    (r"it does not run on one example .*", "it does not run on a single example"),
)


def reason(outcome: str) -> str:
    """Why a model is refused, without the name of its layer."""
    said = _REFUSAL.match(outcome + " ")
    text = said[1] if said else outcome.removeprefix("refused: ")
    return next((short for pattern, short in _SHORTER if re.fullmatch(pattern, text)), text)


def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]


def table(found: list[dict[str, Any]]) -> str:
    """How many models are bounded, and why the others are refused, with the first models of each kind."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for row in found:
        outcome = row["steps"].get("certify") or row["steps"]["all"]
        kinds["bounded" if outcome == "passed" else reason(outcome)].append(row["model"])
    ordered = sorted(kinds.items(), key=lambda kind: (kind[0] != "bounded", -len(kind[1])))
    lines = ["| outcome | models | such as |", "|---|--:|---|"]
    for kind, names in ordered:
        said = "**bounded**" if kind == "bounded" else f"refused: {kind}"
        lines.append(f"| {said} | {len(names)} | {', '.join(names[:3])} |")
    figures = [row["figures"] for row in found if "figures" in row]
    slack = statistics.median(log10(each["upper"] / each["lower"]) for each in figures)
    text = (
        f"{len(found)} models of timm with random weights, each with the smallest images that it takes. In the bounded "
        f"ones no quotient of {figures[0]['pairs']:,} pairs of random inputs exceeds the bound. The bounds exceed what "
        f"ascent finds by {slack:.0f} decades in the median: such networks are bounded, not certified usefully."
    )
    return "\n".join([*lines, "", text])


def with_table(page: str) -> str:
    """The page with the table of the committed rows between its marks."""
    before, _, rest = page.partition(MARKS[0])
    return f"{before}{MARKS[0]}{table(rows())}\n{MARKS[1]}{rest.partition(MARKS[1])[2]}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
