"""What is usual for the layers of trained networks: percentiles of each figure by kind and size of a layer.

    python -m benchmarks.usual_networks FOLDER     measure (10 minutes on one core); goes on where it was stopped
    python -m benchmarks.usual_networks --bands    write the bands of the last measurement anew

FOLDER holds the wheels of `PACKAGES`, as for `benchmarks.shipped_networks`; those that are missing are named. Networks
of `small_networks` and `treated_networks` are trained, and measured before and after. The result is
benchmarks/results/usual_networks.json; the bands are src/gonio/measuring/figures/usual.json.

Each architecture counts once, whatever the number of its networks and layers: networks with layers of the same shapes
are one architecture, and of networks with the same figures one is kept. Bands are tried on what they were not made of:
`held_out` leaves each architecture out in turn.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import nn

import gonio
from benchmarks.healthy_networks import ARCHITECTURES
from benchmarks.machine import versions
from benchmarks.results import FOLDER
from benchmarks.shipped_networks import PACKAGES as JUDGED
from benchmarks.shipped_networks import networks as in_wheels
from benchmarks.small_networks import SMALL, small_network
from benchmarks.treated_networks import KINDS, Network, network
from gonio.measuring.figures import usual
from gonio.measuring.figures.usual import FIGURES, LEAST, PERCENTILES, Bands, kind_of
from gonio.pages.tables import number

RESULT = FOLDER / "usual_networks.json"
PART = FOLDER / "local" / RESULT.with_suffix(".jsonl").name  # the networks of a measurement that was stopped
BANDS = Path(usual.__file__).with_name("usual.json")
PACKAGES: Mapping[str, tuple[str, ...]] = {
    **JUDGED,
    "chgnet": ("0.2.0_e30f77s348m32.pth.tar", "0.3.0_e29f68s314m37.pth.tar", "e15f36s161m23.pth.tar"),
    "fer": ("emotion_model.hdf5",),
    "speechmos": (
        *("Run_1663829550_Stage_0.onnx", "Run_1663915512_Stage_0.onnx", "Run_1668423760_Stage_0.onnx"),
        *("/dnsmos_models/bak_ovr.onnx", "/dnsmos_models/model_v8.onnx", "/dnsmos_models/sig.onnx"),
        *("/dnsmos_models/sig_bak_ovr.onnx", "/pdnsmos_models/sig_bak_ovr.onnx", "plcmos_v2.onnx"),
    ),
    "swift_f0": ("model.onnx",),
    "torchfcpe": ("fcpe_c_v001.pt",),
}
SEEDS = 2  # networks of each architecture of `treated_networks`, whose widths are drawn
Layers = Mapping[str, Mapping[str, Sequence[float | None]]]  # kind and size -> figure -> a value per layer
Row = Mapping[str, Any]


# --- measuring -------------------------------------------------------------------------------------------------------


def layers_of(measured: gonio.Measurements) -> dict[str, dict[str, list[float | None]]]:
    """The figures of all layers that are of a kind, to four digits."""
    found: dict[str, dict[str, list[float | None]]] = {}
    for t in measured.tensors:
        if (kind := kind_of(t)) is not None:
            of_kind = found.setdefault(kind, {name: [] for name in FIGURES})
            for name, value in FIGURES.items():
                one = value(t)
                of_kind[name].append(None if one is None else float(f"{one:.4g}"))
    return found


def shipped(folder: Path) -> Iterator[Row]:
    """Of each network in the wheels: its origin, and its layers."""
    named: dict[tuple[tuple[int, ...], ...], str] = {}
    with tempfile.TemporaryDirectory() as into:
        for package, name, file in in_wheels(folder, Path(into), PACKAGES):
            measured = gonio.measure(file)
            shapes = tuple(sorted(layer.shape for layer in measured.layers))
            origin = {"source": "shipped", "origin": package, "network": name}
            yield {
                **origin,
                "architecture": named.setdefault(shapes, f"{package} {name}"),
                "layers": layers_of(measured),
            }


def trained(known: Mapping[tuple[str, int], Row | None]) -> Iterator[tuple[tuple[str, int], Row | None]]:
    """Of each network its architecture with its number, and its row, or none if it has not learnt its task.

    Args:
        known: those that were trained before.
    """
    makers: dict[tuple[str, int], tuple[Callable[[], Network], Callable[[], nn.Module]]] = {}
    for i in range(SEEDS * len(KINDS)):
        makers[list(KINDS)[i % len(KINDS)], i] = (partial(network, i), partial(_untrained, i))
    for name, kind in SMALL.items():
        makers[name, 0] = (partial(small_network, name, 0), partial(_seeded, kind.make, 0))
    for key, (make, before) in makers.items():
        yield key, known[key] if key in known else _trained(key[0], make, before)


def _trained(name: str, make: Callable[[], Network], before: Callable[[], nn.Module]) -> Row | None:
    made = make()
    print(f"{name}: {made.score:.1f}{'' if made.learnt else ', has not learnt and is left out'}", file=sys.stderr)
    if not made.learnt:
        return None
    row = {"source": "trained", "origin": made.task.name, "network": name, "architecture": name}
    after, fresh = layers_of(gonio.measure(made.model)), layers_of(gonio.measure(before()))
    return {**row, "score": round(made.score, 1), "layers": after, "fresh": fresh}


def resumed(found: Callable[..., Iterator[tuple[tuple[str, int], Row | None]]]) -> list[Row]:
    """The rows of :func:`trained`, each of which is kept in `PART` as soon as it is there."""
    lines = PART.read_text(encoding="utf-8").splitlines() if PART.exists() else []
    known = {(name, number): row for name, number, row in map(json.loads, lines)}
    rows = []
    PART.parent.mkdir(exist_ok=True)
    with PART.open("a", encoding="utf-8") as part:
        for key, row in found(known):
            if key not in known:
                part.write(json.dumps([*key, row]) + "\n")
                part.flush()
            rows += [] if row is None else [row]
    return rows


def _seeded(make: Callable[[random.Random], nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return make(random.Random(seed))


def _untrained(number: int) -> nn.Module:
    """The network of :func:`benchmarks.treated_networks.network` before its training."""
    name = list(KINDS)[number % len(KINDS)]
    if (kind := KINDS[name]) is not None:
        return _seeded(kind.make, number)
    return _seeded(ARCHITECTURES[name], number * len(ARCHITECTURES) + list(ARCHITECTURES).index(name))


def distinct(rows: Iterable[Row]) -> list[Row]:
    """The networks without those whose layers have all the figures of an earlier one, in whatever order."""
    seen: dict[str, Row] = {}
    for row in rows:
        of_kinds = [
            (kind, sorted(zip(*figures.values(), strict=True), key=str)) for kind, figures in row["layers"].items()
        ]
        seen.setdefault(json.dumps(sorted(of_kinds)), row)
    return list(seen.values())


# --- bands -----------------------------------------------------------------------------------------------------------


def bands(rows: Sequence[Row], least: int = 1) -> dict[str, Bands]:
    """Percentiles of each kind and size of at least so many architectures, each of which has the same weight."""
    made = {}
    for kind in sorted({kind for row in rows for kind in row["layers"]}):
        having = [row for row in rows if kind in row["layers"]]
        names = {row["architecture"] for row in having}
        if len(names) >= least:
            figures = {name: found for name in FIGURES if (found := _percentiles(having, kind, name, least))}
            count = sum(len(row["layers"][kind]["norm_spread"]) for row in having)
            made[kind] = Bands(len(having), len(names), count, figures)
    return made


def _percentiles(rows: Sequence[Row], kind: str, figure: str, least: int) -> tuple[float, ...] | None:
    """Weighted percentiles to three digits; the weight of an architecture is shared by its layers with the figure."""
    values = [(row["architecture"], v) for row in rows for v in row["layers"][kind][figure] if v is not None]
    counts: dict[str, int] = {}
    for name, _ in values:
        counts[name] = counts.get(name, 0) + 1
    if len(counts) < least:
        return None
    values.sort(key=lambda pair: pair[1])
    weights = np.array([1 / counts[name] for name, _ in values])
    places = (np.cumsum(weights) - weights / 2) / weights.sum()
    found = np.interp(np.array(PERCENTILES) / 100, places, [value for _, value in values])
    return tuple(float(f"{one:.3g}") for one in found)


def held_out(rows: Sequence[Row], part: str, judged: str, by: str = "") -> dict[str, float]:
    """For each figure, the share of layers inside bands made without their architecture; each architecture counts once.

    Args:
        part: `layers`, or `fresh`: before training. `judged`: the source of the networks that are judged.
        by: the source of those that the bands are made of; all by default.
    """
    inside: dict[str, list[float]] = {name: [] for name in FIGURES}
    basis = [row for row in rows if by in ("", row["source"])]
    for name in dict.fromkeys(row["architecture"] for row in rows if row["source"] == judged):
        made = bands([row for row in basis if row["architecture"] != name], LEAST)
        for figure, shares in inside.items():
            judgements = [
                made[kind].figures[figure][0] <= value <= made[kind].figures[figure][-1]
                for row in rows
                if row["architecture"] == name
                for kind, figures in row.get(part, {}).items()
                if kind in made and figure in made[kind].figures
                for value in figures[figure]
                if value is not None
            ]
            shares += [mean(judgements)] if judgements else []
    return {figure: mean(shares) for figure, shares in inside.items() if shares}


def content_of(found: Row) -> str:
    """The file of the package that these networks give."""
    rows = found["networks"]
    whole = {"networks": len(rows), "architectures": len({row["architecture"] for row in rows})}
    kinds = {kind: asdict(made) for kind, made in bands(rows, LEAST).items()}
    lines = ",\n".join(f"  {json.dumps(kind)}: {json.dumps(made)}" for kind, made in kinds.items())
    return (
        f'{{\n "percentiles": {json.dumps(PERCENTILES)},\n "of": {json.dumps(whole)},\n "kinds": {{\n{lines}\n }}\n}}\n'
    )


# --- the page --------------------------------------------------------------------------------------------------------

TITLES = {
    "alignment": "align",
    "coherence": "coher.",
    "norm_spread": "std/mean of norms",
    "sigma_ratio": "σ/σ₀",
    "effective_rank_share": "e.rank/full",
    "spectrum_distance": "bulk",
    "spectrum_outlier_share": "beyond, share",
    "orthogonality_defect": "orth.",
}


def table(found: Row) -> str:
    """The bands, their coverage of what they were not made of, and the origin of the networks."""
    rows = found["networks"]
    made = bands(rows, LEAST)
    lines = [
        f"| layers | networks (architectures) | {' | '.join(TITLES.values())} |",
        f"|---|--:|{'--:|' * len(TITLES)}",
    ]
    for kind, of in made.items():
        ends = [of.figures.get(name) for name in TITLES]
        cells = ["–" if end is None else f"{number(end[0], 2)}–{number(end[-1], 2)}" for end in ends]
        lines.append(f"| {kind} ({of.layers}) | {of.networks} ({of.architectures}) | {' | '.join(cells)} |")
    held = found["held_out"]
    lines += ["", f"| held out | {' | '.join(TITLES.values())} |", f"|---|{'--:|' * len(TITLES)}"]
    for title, shares in held.items():
        lines.append(f"| {title} | {' | '.join(f'{shares[n]:.0%}' if n in shares else '–' for n in TITLES)} |")
    return "\n".join([*lines, "", _origin(found)])


def _origin(found: Row) -> str:
    rows = found["networks"]
    parts = {source: [row for row in rows if row["source"] == source] for source in ("shipped", "trained")}
    counts = {source: len({row["architecture"] for row in part}) for source, part in parts.items()}
    packages = ", ".join(dict.fromkeys(row["origin"] for row in parts["shipped"]))
    tasks: dict[str, list[str]] = {}
    for row in parts["trained"]:
        if row["architecture"] not in tasks.setdefault(row["origin"], []):
            tasks[row["origin"]].append(row["architecture"])
    own = "; ".join(f"{task}: {', '.join(names)}" for task, names in tasks.items())
    used = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return (
        f"Shipped: {len(parts['shipped'])} networks of {counts['shipped']} architectures, of {packages}. "
        f"Trained here: {len(parts['trained'])} networks of {counts['trained']} architectures ({own}). {used}."
    )


def judged(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """The rows of the table of coverage."""
    return {
        "shipped, inside": held_out(rows, "layers", "shipped"),
        "trained here, inside": held_out(rows, "layers", "trained"),
        "shipped, inside ranges of those trained here alone": held_out(rows, "layers", "shipped", "trained"),
        "before training, inside": held_out(rows, "fresh", "trained"),
    }


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    if arguments[0] != "--bands":
        rows = distinct([*shipped(Path(arguments[0])), *resumed(trained)])
        content: dict[str, Any] = {"versions": versions(), "held_out": {}, "networks": rows}
    else:
        content = json.loads(RESULT.read_text(encoding="utf-8"))
    content["held_out"] = {
        title: {name: round(share, 3) for name, share in shares.items()}
        for title, shares in judged(content["networks"]).items()
    }
    RESULT.write_text(json.dumps(content) + "\n", encoding="utf-8")
    BANDS.write_text(content_of(content), encoding="utf-8")
    PART.unlink(missing_ok=True)
    print(table(content))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
