"""Writes docs/claims/*.md, pictures, the verdicts that commands list, and two tables.

All follow from the committed results in benchmarks/results/claims/full.json.

The table of methods in README.md and the counts in docs/index.md lie between the comments `<!-- claims -->` and
`<!-- /claims -->`. docs/claims/corrections.md is written by hand.

`python docs/build_claims.py` writes the pages; with `--check` it fails if a page differs from what it would write.
`--add FILE…` first puts the claims of `gonio reproduce CLAIM --full --json FILE` into full.json, in place of older
results of the same claims, and drops results of experiments that were planned anew since.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import committed
import yaml

from gonio.lab.claims import SCOPES, SEEDS, Claim, ClaimResult, as_data, from_data, load_claim, load_claims, tally
from gonio.lab.claims.fairness import false_verdicts
from gonio.lab.judging.statistics import points
from gonio.lab.showing.claims import (
    arm_table,
    claim_picture,
    claimed_text,
    claims_json,
    contrast_text,
    cost_text,
    effect_text,
    task_picture,
)

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGES = committed.RESULTS, ROOT / "docs" / "claims"
RECORDED = ROOT / "src" / "gonio" / "lab" / "claims" / "recorded.json"  # for the lists of the command line
HEAD = "<!-- Written by docs/build_claims.py from benchmarks/results/claims; do not edit. -->"
# The README's table: a method, a claim about what it does, and its row of whole training steps, if it acts there.
METHODS = (
    ("gain of the initialisation", "gain-tanh", None),
    ("soft orthogonality", "orthogonality-spread", "orthogonality, add_grads_"),
    ("weight norm", "weight-norm-grows", "weight norm"),
    ("`balance_`", "int8-balance", None),
    ("group norm at batch size 2", "bn-batch-2", None),
)


def pages() -> dict[Path, str]:
    """The content of every page and picture."""
    found, versions = committed.findings(RESULTS), dict(committed.results(RESULTS).versions)
    written: dict[Path, str] = {}
    for seed, topic in SEEDS.items():
        if not (claims := [claim for claim in load_claims() if claim.seed == seed]):
            continue
        lines = [HEAD, f"# Claims on {topic}", "", *_intro(seed, versions)]
        for claim in claims:
            lines += ["", *_section(claim, found.get(claim.name))]
            one = found.get(claim.name)
            for name, picture in ((claim.name, claim_picture), (f"{claim.name}-task", task_picture)):
                svg = picture(one) if one else ""
                written |= {PAGES / "images" / f"{name}.svg": standalone(svg) + "\n"} if svg else {}
        written[PAGES / f"{committed.PAGE[seed]}.md"] = "\n".join(lines) + "\n"
    shown = {name: {"verdict": one.verdict, "effect": effect_text(one)} for name, one in found.items()}
    written[RECORDED] = json.dumps(shown, ensure_ascii=False, indent=1) + "\n"
    head = [HEAD, "# What the papers claim, tried here", ""]
    lines = [*head, _counts(found), "", *_RULES, "", _CORRECTIONS, "", *_tables(found), "", *_noise(found), "",
             *_other_seeds()]  # fmt: skip
    written[PAGES / "README.md"] = "\n".join(lines) + "\n"
    written |= {path: _between(path, text) for path, text in (
        (ROOT / "README.md", _methods(found)),
        (ROOT / "docs" / "index.md", _counts(found) + "\n"),
    )}  # fmt: skip
    return written


_CORRECTIONS = (
    "The [sources](../sources.md) are gone through sentence by sentence; their [errors, with proof](corrections.md) "
    "have a page of their own. [中文](../zh/claims.md)"
)
_NOTES = {
    "003": "The same operators are compared in [another study](../howto/decoupled-evidence.md), which trains 1,297 "
    "digits for 252 steps of Adam with the cosine, at one learning rate. `operator-grid` trains 200 digits by SGD, "
    "with the rate of each operator tuned, and averages over three angular functions; `bounded-operators` trains "
    "Fashion-MNIST. `decoupled-robust` counts the most harmful of several attacks, that study each attack by itself.",
}


def standalone(picture: str) -> str:
    """A picture of a page as an SVG file: in the colours of the page for light, and in those for dark where it is dark.

    The colours of the light page are attributes, for programs that read no style sheet.
    """
    style = files("gonio.pages").joinpath("templates", "style.css").read_text(encoding="utf-8")
    blocks = re.findall(r"\.gonio \{\n(.*?)\}", style, flags=re.DOTALL)
    light, dark = (dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block)) for block in blocks[:2])
    rules = [
        f'[{what}="{light[name]}"]{{{what}:{dark[name]}}}'
        for what, name in sorted(set(re.findall(r'(fill|stroke)="var\(--([\w-]+)\)"', picture)))
    ]
    coloured = re.sub(r'"var\(--([\w-]+)\)"', lambda match: f'"{light[match[1]]}"', picture)
    head, _, body = coloured.partition(">")
    title = re.search(r'aria-label="([^"]*)"', head)
    head = re.sub(r' (class|style)="[^"]*"', "", head)
    opening = head.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" ', 1)
    sheet = f"<style>@media (prefers-color-scheme: dark){{{''.join(rules)}}}</style>"
    return f"{opening}>{f'<title>{title[1]}</title>' if title else ''}{sheet}{body}"


def _between(path: Path, table: str) -> str:
    """The file with the table between its comments."""
    text = path.read_text(encoding="utf-8")
    return re.sub(r"(<!-- claims -->\n).*?(<!-- /claims -->)", lambda m: f"{m[1]}{table}{m[2]}", text, flags=re.S)


def _methods(found: dict[str, ClaimResult]) -> str:
    """One line per method: the claim, the verdict, the effect, and a whole step as a ratio to the plain one."""
    steps = json.loads((ROOT / "benchmarks" / "results" / "whole_steps.json").read_text(encoding="utf-8"))["rows"]
    cost = {(row["table"], row["case"]): row["candidates"][0]["wall"]["median"] for row in steps}
    lines = ["| method | claim | scope | verdict here | effect (95 % interval) | step |", "|---|---|---|---|---|---|"]
    for method, name, case in METHODS:
        claim, one = load_claim(name), found.get(name)
        step = (
            "–"
            if case is None
            else " · ".join(f"×{cost[table, case]:.2f}" for table in ("ResNet-18", "digits-network"))
        )
        link = f"[{claim.claim.rstrip('.')}](docs/claims/{committed.PAGE[claim.seed]}.md#{name})"
        effect = effect_text(one) if one else ""
        lines.append(f"| {method} | {link} | {claim.scope} | {committed.word_of(claim, one)} | {effect} | {step} |")
    return "\n".join(lines) + "\n"


def _intro(seed: str, versions: dict[str, str]) -> list[str]:
    used = ", ".join(f"{name} {version}" for name, version in versions.items())
    made = f"Every figure is a row of `benchmarks/results/claims`, made on two cores of a CPU with {used}, "
    made += "but for claims that name a GPU."
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
    lines = [f"## {claim.name}", "", f"> {claim.claim}", "", f"**{committed.word_of(claim, one)}** ({claim.scope})"]
    if one:
        lines[-1] += f": {effect_text(one)}. {one.evidence.reason}"
        lines += ["", f"![Scores of {claim.name}](images/{claim.name}.svg)", ""]
        if task_picture(one):
            lines += [f"![Task scores of {claim.name}](images/{claim.name}-task.svg)", ""]
        arms = arm_table(one)
        lines += [
            f"| {' | '.join(arms.head)} |",
            "|---" * len(arms.head) + "|",
            *(f"| {' | '.join(row)} |" for row in arms.rows),
        ]
        lines += [
            "",
            f"- Tested: {contrast_text(one.contrast)}. {one.measured} {claimed_text(claim)}",
            f"- Cost: {cost_text(one)}.",
            *([f"- Computed on {_computed(one.versions)}."] if "device" in one.versions else []),
        ]
    else:
        lines += ["", claim.not_tried or f"{claimed_text(claim)} The experiment was planned anew and has not run yet."]
        lines += [""]
    lines += [f"- Source: {claim.source}"]
    lines += [f"- Reported there: {claim.reported}"] if claim.reported else []
    lines += [f"- What differs: {claim.differs}"] if claim.differs else []
    flag = " --full" if one and one.full else ""
    lines += [f"- Repeat: `gonio reproduce {claim.name}{flag}`"] if not claim.not_tried else []
    return lines


def _counts(found: dict[str, ClaimResult]) -> str:
    claims = load_claims()
    waiting = sum(not claim.not_tried and claim.name not in found for claim in claims)
    later = f" {waiting} have a new experiment that has not run yet." if waiting else ""
    tried = f"{len(claims)} claims, {len(found)} of them tried here. {_sentence(tally([*found.values()]))}.{later}"
    return f"{tried} `gonio reproduce` tries the quick ones on your machine."


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


_RULES = (
    "A verdict needs a fair test, which is checked before it is given: every arm trains above a stated floor; arms "
    "whose property is compared have the same score within a stated margin; a strength is tried at six doses or more, "
    "and a rule picks the one that is judged on seeds that are not; learning rates are tuned with equally many trials; "
    "twice the training changes little; a control arm repeats the baseline with other random numbers. What breaks a "
    "rule is *not a fair test*, and the rule is named.",
    "",
    *(f"* **{name}**: {text}." for name, text in SCOPES.items()),
    "",
    "Only a claim of field scope is *reproduced* or *contradicted*; an identity *holds* or *fails*; the others are "
    "*seen*, *opposite seen* or *not seen* here.",
)


def _noise(found: dict[str, ClaimResult]) -> list[str]:
    """The controls: how far the baseline of each claim is from itself with other random numbers."""
    rows = [
        (name, one) for name, one in found.items() if one.evidence.noise is not None and one.claim.scope != "identity"
    ]
    lines = [
        "## Noise of the controls",
        "",
        "Of each experiment: the interval that other random numbers alone would give (± half of 95 %), beside the "
        "smallest effect of interest; and how often two random halves of all runs of the baseline would be called "
        "different (a false verdict, before the correction; 400 draws).",
        "",
        "| claim | task | noise | smallest effect | false verdicts |",
        "|---|---|--:|--:|--:|",
    ]
    for name, one in rows:
        noise, least = (points(value, one.unit) for value in (one.evidence.noise or 0.0, one.claim.sesoi))
        lines.append(
            f"| {name} | {one.task} | ±{noise} | {least} | {100 * false_verdicts(one.setting, one.runs):.1f} % |"
        )
    return lines


def _tables(found: dict[str, ClaimResult]) -> list[str]:
    """The claims by topic, those with a verdict; then all the others."""
    lines, claims = [], load_claims()
    for seed, topic in SEEDS.items():
        tried = [claim for claim in claims if claim.seed == seed and claim.name in found]
        rows = [(_link(claim), claim.claim, claim.scope, committed.word_of(claim, found[claim.name]),
                 effect_text(found[claim.name])) for claim in tried]  # fmt: skip
        if rows:
            heads = ("claim", "sentence", "scope", "verdict", "effect (95 % interval)")
            lines += [f"## On {topic}", "", *markdown_rows(heads, rows), ""]
    others = [claim for claim in claims if claim.name not in found]
    rows = [(_link(claim), claim.claim, claim.scope, committed.word_of(claim, None)) for claim in others]
    return [*lines, "## Without a verdict", "", *markdown_rows(("claim", "sentence", "scope", "state"), rows)]


def markdown_rows(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (heads, ("---",) * len(heads), *rows)]


def _link(claim: Claim) -> str:
    return f"[{claim.name}]({committed.PAGE[claim.seed]}.md#{claim.name})"


def _other_seeds() -> list[str]:
    """How often each quick claim, and the control, got each verdict on disjoint sets of seeds."""
    path = ROOT / "benchmarks" / "results" / "claims_agreement.json"
    if not path.is_file():  # the claims were planned anew since it was measured
        return []
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


def _computed(versions: Mapping[str, str]) -> str:
    """The GPU of a claim's runs and their packages."""
    packages = ", ".join(f"{name} {version}" for name, version in versions.items() if name != "device")
    return f"one {versions['device']}, with {packages}"


def _joined(one: dict[str, str], other: dict[str, str]) -> dict[str, str] | None:
    """The versions of both, of which only gonio's may differ; None if another one does."""
    if {**one, "gonio": ""} != {**other, "gonio": ""}:
        return None
    return {**one, "gonio": " and ".join(sorted({*one["gonio"].split(" and "), other["gonio"]}))}


def add(paths: list[Path]) -> None:
    """Put the claims of runs of their own into the committed results."""
    whole = committed.results(RESULTS)
    of = {one.claim.name: one for one in whole.results if one.plan and committed.is_current(one)}
    versions = whole.versions if of else None
    for path in paths:
        new = from_data(json.loads(path.read_text(encoding="utf-8")))
        of |= {one.claim.name: one for one in new.results}
        if all("device" in one.versions for one in new.results):  # the page of such a claim names its packages
            continue
        versions = _joined(dict(versions or new.versions), dict(new.versions))
        if versions is None:
            sys.exit(f"{path} was made with other packages, {new.versions}: run the whole catalogue")
    kept = tuple(of[claim.name] for claim in load_claims() if claim.name in of)
    together = replace(whole, results=kept, versions=versions or {}, command="gonio reproduce --full")
    RESULTS.write_text(claims_json(from_data(as_data(together))) + "\n", encoding="utf-8")


def main() -> None:
    if sys.argv[1:2] == ["--add"]:
        add([Path(argument) for argument in sys.argv[2:] if argument != "--check"])
    written = pages()
    left_over = sorted({*(PAGES / "images").glob("*.svg")} - {*written})
    stale = [*left_over] if "--check" in sys.argv else []
    stale += [path for path, text in written.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    if "--check" in sys.argv:
        sys.exit(f"stale: {', '.join(str(path.relative_to(ROOT)) for path in stale)}" if stale else 0)
    for path in left_over:
        path.unlink()
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(written[path], encoding="utf-8")
    print(f"{len(stale)} of {len(written)} files written")


if __name__ == "__main__":
    main()
