"""The committed results of claims, as the builders of the pages read them, and their words in Chinese."""

from __future__ import annotations

import json
from pathlib import Path

from gonio.lab.claims import Claim, ClaimResult, ClaimResults, from_data, load_claims

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "claims" / "full.json"
PAGE = {
    "000": "angular-regularisation",
    "001": "scale-shift-invariant",
    "002": "normalisation",
    "003": "decoupled",
    "004": "initialisation",
    "training": "training",
    "control": "control",
}  # the claims' page of each document, called like the page of its method
CHINESE = {
    "no useful effect": "无实际作用",
    "not seen": "未见此效应",
    "opposite seen": "见到相反效应",
    "seen": "见到此效应",
    "holds": "成立",
    "hold": "成立",
    "fails": "不成立",
    "fail": "不成立",
    "reproduced": "复现",
    "contradicted": "与论断相反",
    "undecided": "未定",
    "too noisy": "噪声过大",
    "not a fair test": "比较不公平",
    "not tried": "未检验",
    "not run yet": "尚未运行",
    "identity": "恒等式",
    "mechanism": "机理",
    "small": "小规模",
    "field": "实际规模",
}


def results(path: Path = RESULTS) -> ClaimResults:
    """Everything that was committed, judged by the rules of now."""
    return from_data(json.loads(path.read_text(encoding="utf-8")))


def findings(path: Path = RESULTS) -> dict[str, ClaimResult]:
    """The finding of each claim in the catalogue's order, without those whose experiment was planned anew."""
    found = {one.claim.name: one for one in results(path).results if one.plan and is_current(one)}
    return {claim.name: found[claim.name] for claim in load_claims() if claim.name in found}


def is_current(one: ClaimResult) -> bool:
    """Whether the catalogue still has the experiment, the scope and the conditions that were tried."""
    now = {claim.name: claim for claim in load_claims()}.get(one.claim.name)
    if now is None or now.not_tried:
        return False
    same = ("measure", "options", "direction", "sesoi", "scope", "fair")
    return all(getattr(now, name) == getattr(one.claim, name) for name in same) and (
        now.setting(full=one.full) == one.claim.setting(full=one.full)
    )


def word_of(claim: Claim, one: ClaimResult | None) -> str:
    """The verdict, or why there is none."""
    return one.verdict if one else "not tried" if claim.not_tried else "not run yet"
