"""Writes docs/claims/*.md, pictures and two tables from the committed results in benchmarks/results/claims/*.json.

The table of methods in README.md and that of all claims in docs/index.md lie between the comments `<!-- claims -->` and
`<!-- /claims -->`. docs/claims/corrections.md is written by hand.

`python docs/build_claims.py` writes the pages; with `--check` it fails if a page differs from what it would write.
The full results of a claim replace its quick ones. `--add FILE` first puts the claims of `gonio reproduce CLAIM --full
--json FILE` into full.json and judges all of them again together, as one run of the whole catalogue would.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import yaml

from gonio.lab.claims import SEEDS, VERDICTS, Claim, ClaimResult, as_data, from_data, load_claims
from gonio.lab.showing.claims import (
    arm_table,
    claim_picture,
    claimed_text,
    claims_json,
    contrast_text,
    cost_text,
    effect_text,
)
from gonio.pages import standalone

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGES = ROOT / "benchmarks" / "results" / "claims", ROOT / "docs" / "claims"
HEAD = "<!-- Written by docs/build_claims.py from benchmarks/results/claims; do not edit. -->"
# The README's table: a method, a claim about what it does, and its row of whole training steps, if it acts there.
METHODS = (
    ("gain of the initialisation", "gain-tanh", None),
    ("soft orthogonality", "orthogonality-spread", "orthogonality, add_grads_"),
    ("self-orthogonality", "som-spread", "self-orthogonality"),
    ("spectral norm", "spectral-lipschitz", "spectral norm"),
    ("weight norm", "weight-norm-grows", "weight norm"),
    ("scale-shift-invariant decay", "log-is-not-fooled", "scale shift, add_grads_"),
    ("`balance_`", "int8-balance", None),
    ("group norm at batch size 2", "bn-batch-2", None),
)


def pages() -> dict[Path, str]:
    """The content of every page and picture."""
    found, versions = _findings()
    written: dict[Path, str] = {}
    for seed, topic in SEEDS.items():
        claims = [claim for claim in load_claims() if claim.seed == seed]
        lines = [HEAD, f"# Claims on {topic}", "", *_intro(seed, versions)]
        for claim in claims:
            lines += ["", *_section(claim, found.get(claim.name))]
            svg = _svg(found.get(claim.name))
            written |= {PAGES / "images" / f"{claim.name}.svg": svg} if svg else {}
        written[PAGES / f"{seed}.md"] = "\n".join(lines) + "\n"
    head = [HEAD, "# What the papers claim, tried here", ""]
    written[PAGES / "README.md"] = (
        "\n".join([*head, _counts(found), "", _CORRECTIONS, "", *_table(found), "", *_other_seeds()]) + "\n"
    )
    written |= {path: _between(path, text) for path, text in (
        (ROOT / "README.md", _methods(found)),
        (ROOT / "docs" / "index.md", "\n".join([_counts(found), "", *_table(found, folder="claims/")]) + "\n"),
    )}  # fmt: skip
    return written


_CORRECTIONS = (
    "The [sources](../sources.md) are gone through sentence by sentence; their [errors, with proof](corrections.md) "
    "have a page of their own. [中文](../zh/claims.md)"
)
_NOTES = {
    "003": "The same operators are compared in [another study](../howto/decoupled-evidence.md), in which without batch "
    "norm bounded magnitudes are ahead of unbounded ones; here, in `operator-grid` and `bounded-operators`, they are "
    "not. That study trains 1,297 digits for 252 steps of Adam with the cosine. `operator-grid` trains 200 digits for "
    "96 steps of SGD and averages over four angular functions; `bounded-operators` trains Fashion-MNIST. Neither tunes "
    "the learning rate of each operator. `decoupled-robust` counts the most harmful of several attacks, that study "
    "each attack by itself.",
}


def _between(path: Path, table: str) -> str:
    """The file with the table between its comments."""
    text = path.read_text(encoding="utf-8")
    return re.sub(r"(<!-- claims -->\n).*?(<!-- /claims -->)", lambda m: f"{m[1]}{table}{m[2]}", text, flags=re.S)


def _methods(found: dict[str, ClaimResult]) -> str:
    """One line per method: the claim, the verdict, the effect, and a whole step as a ratio to the plain one."""
    steps = json.loads((ROOT / "benchmarks" / "results" / "whole_steps.json").read_text(encoding="utf-8"))["rows"]
    cost = {(row["table"], row["case"]): row["candidates"][0]["wall"]["median"] for row in steps}
    lines = ["| method | claim | verdict here | effect (95 % interval) | step |", "|---|---|---|---|---|"]
    for method, name, case in METHODS:
        one = found[name]
        step = (
            "–"
            if case is None
            else " · ".join(f"×{cost[table, case]:.2f}" for table in ("ResNet-18", "digits-network"))
        )
        link = f"[{one.claim.claim.rstrip('.')}](docs/claims/{one.claim.seed}.md#{name})"
        lines.append(f"| {method} | {link} | {one.verdict} | {effect_text(one)} | {step} |")
    return "\n".join(lines) + "\n"


def _findings() -> tuple[dict[str, ClaimResult], dict[str, str]]:
    """The finding of each claim, and the versions that made them; later files (full after quick) win."""
    found: dict[str, ClaimResult] = {}
    versions: dict[str, str] = {}
    for path in sorted(RESULTS.glob("*.json"), key=lambda path: path.stem.startswith("full")):
        data = from_data(json.loads(path.read_text(encoding="utf-8")))
        found |= {one.claim.name: one for one in data.results if one.verdict != "not tried"}
        versions |= data.versions
    return found, versions


def _intro(seed: str, versions: dict[str, str]) -> list[str]:
    used = ", ".join(f"{name} {version}" for name, version in versions.items())
    made = f"Every figure is a row of `benchmarks/results/claims`, made on two cores of a CPU with {used}."
    return [f"{_source(seed)} {made}", *(("", _NOTES[seed]) if seed in _NOTES else ())]


def _source(seed: str) -> str:
    """What the claims of a page come from: an article with title, author, date and address, or another origin."""
    article = yaml.safe_load((ROOT / "docs" / "sources.yaml").read_text(encoding="utf-8")).get(seed)
    if article is None:
        return {
            "control": "The control: a sentence that is false by construction.",
            "training": "Claims on the steps of optimizers, of which the five articles do not speak.",
        }[seed]
    parts = (article["author_en"], f"*{article['title']}*", article["date"], article["address"])
    named = ", ".join(part for part in parts if part)
    return (
        f"Claims of the article {seed} ({named}) and of the papers that it is about; see the [sources](../sources.md)."
    )


def _section(claim: Claim, one: ClaimResult | None) -> list[str]:
    verdict = one.verdict if one else "not tried" if claim.not_tried else "not run yet"
    lines = [f"## {claim.name}", "", f"> {claim.claim}", "", f"**{verdict}**"]
    if one:
        lines[-1] += f": {effect_text(one)}. {one.evidence.reason}"
        lines += ["", f"![Scores of {claim.name}](images/{claim.name}.svg)", ""]
        arms = arm_table(one)
        lines += [f"| {' | '.join(arms.head)} |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in arms.rows)]
        terms = contrast_text(one.setting.decisive) if one.setting else ""
        lines += ["", f"- Tested: {terms}. {one.measured} {claimed_text(claim)}", f"- Cost: {cost_text(one)}."]
    else:
        lines += ["", claim.not_tried or f"{claimed_text(claim)} It needs the full run."]
        lines += [""]
    lines += [f"- Source: {claim.source}"]
    lines += [f"- Reported there: {claim.reported}"] if claim.reported else []
    lines += [f"- What differs: {claim.differs}"] if claim.differs else []
    flag = " --full" if one and one.full else ""
    lines += [f"- Repeat: `gonio reproduce {claim.name}{flag}`"] if not claim.not_tried else []
    return lines


def _svg(one: ClaimResult | None) -> str:
    """The picture as a file of its own."""
    picture = claim_picture(one) if one else ""
    return standalone(picture) + "\n" if picture else ""


def _counts(found: dict[str, ClaimResult]) -> str:
    counts = ", ".join(
        f"{count} {name}" for name in VERDICTS if (count := sum(one.verdict == name for one in found.values()))
    )
    tried = f"{len(load_claims())} claims; {len(found)} were tried: {counts}."
    return f"{tried} `gonio reproduce` tries the quick ones on your machine."


def _table(found: dict[str, ClaimResult], folder: str = "") -> list[str]:
    """All claims with their verdicts; `folder` leads from the page to those of the claims."""
    rows = ["| claim | sentence | verdict | effect (95 % interval) |", "|---|---|---|---|"]
    for claim in load_claims():
        one = found.get(claim.name)
        verdict = one.verdict if one else "not tried" if claim.not_tried else "not run yet"
        effect = effect_text(one) if one else ""
        rows.append(f"| [{claim.name}]({folder}{claim.seed}.md#{claim.name}) | {claim.claim} | {verdict} | {effect} |")
    return rows


def _other_seeds() -> list[str]:
    """How often each quick claim, and the control, got each verdict on disjoint sets of seeds."""
    path = ROOT / "benchmarks" / "results" / "claims_agreement.json"
    parts = json.loads(path.read_text(encoding="utf-8"))
    lines = [
        "## The same claims on other seeds",
        "",
        "Each quick claim was tried on five disjoint sets of seeds, and the control, a recipe that changes nothing, on "
        "twenty (`benchmarks/claims_agreement.py`). No two sets contradict each other: where they differ, one is "
        "undecided.",
        "",
        "| claim | verdicts | mean effects |",
        "|---|---|---|",
    ]
    rows = {**parts["quick"]["claims"], **parts["control"]["claims"]}
    for verdicts in (set(row["counts"]) - {"undecided"} for row in rows.values()):
        assert len(verdicts) <= 1, "the sentence above is wrong"
    for name, row in rows.items():
        counts = ", ".join(f"{count} {verdict}" for verdict, count in row["counts"].items())
        lines.append(f"| {name} | {counts} | {min(row['means'].values()):.3g} to {max(row['means'].values()):.3g} |")
    return lines


def add(path: Path) -> None:
    """Put the claims of a run of their own into the results of the full run."""
    whole, new = (from_data(json.loads(file.read_text(encoding="utf-8"))) for file in (RESULTS / "full.json", path))
    if new.versions != whole.versions:
        sys.exit(f"{path} was made with {new.versions}, the full run with {whole.versions}: run the whole catalogue")
    of = {one.claim.name: one for one in (*whole.results, *new.results)}
    together = replace(whole, results=tuple(of[claim.name] for claim in load_claims() if claim.name in of))
    (RESULTS / "full.json").write_text(claims_json(from_data(as_data(together))) + "\n", encoding="utf-8")


def main() -> None:
    if sys.argv[1:2] == ["--add"]:
        add(Path(sys.argv[2]))
    written = pages()
    stale = [path for path, text in written.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    if "--check" in sys.argv:
        sys.exit(f"stale: {', '.join(str(path.relative_to(ROOT)) for path in stale)}" if stale else 0)
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(written[path], encoding="utf-8")
    print(f"{len(stale)} of {len(written)} files written")


if __name__ == "__main__":
    main()
