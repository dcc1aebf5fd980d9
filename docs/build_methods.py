"""Writes the tables of claims and costs into the method pages of both languages, README.zh-CN.md and docs/zh/claims.md.

`python docs/build_methods.py` writes them from benchmarks/results; with `--check` it fails if a page differs. The text
around the tables is written by hand.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gonio.lab.claims import VERDICTS, Claim, ClaimResult, from_data, load_claim, load_claims
from gonio.lab.showing.claims import effect_text

ROOT = Path(__file__).resolve().parents[1]
DOCS, RESULTS = ROOT / "docs", ROOT / "benchmarks" / "results"
# Method page: its document, and the rows of whole training steps that belong to it.
METHODS = {
    "initialisation": ("004", ()),
    "normalisation": (
        "002",
        ("switchable norm", "weight norm", "spectral norm", "weight standardisation", "sphere", "orthogonal"),
    ),
    "decoupled": ("003", ("decoupled (tanh, cosine)",)),
    "angular-regularisation": (
        "000",
        ("orthogonality, add_grads_", "SRIP, add_grads_", "self-orthogonality", "self-orthogonality, samples=512"),
    ),
    "scale-shift-invariant": ("001", ("scale shift, add_grads_",)),
}


@dataclass(frozen=True)
class Language:
    """The words of the tables, and how a claim is stated; a missing word stays English."""

    claims: tuple[str, ...]
    costs: tuple[str, ...]
    words: dict[str, str]
    sentence: Callable[[Claim], str]

    def say(self, text: str) -> str:
        for english, own in self.words.items():
            text = re.sub(rf"(?<![\w-]){re.escape(english)}(?![\w-])", own, text)
        return text


ENGLISH = Language(
    claims=("claim", "verdict here", "effect (95 % interval)"),
    costs=("method", "time, ResNet-18", "peak memory, ResNet-18", "time, small network"),
    words={},
    sentence=lambda claim: claim.claim.rstrip("."),
)
CHINESE = Language(
    claims=("论断", "实测结论", "效应（95% 区间）"),
    costs=("方法", "耗时，ResNet-18", "内存峰值，ResNet-18", "耗时，小网络"),
    words={
        "no useful effect": "无实际作用",
        "reproduced": "复现",
        "contradicted": "与论断相反",
        "undecided": "未定",
        "not a fair test": "比较不公平",
        "not tried": "未检验",
        "not run yet": "尚未运行",
        "points": "个百分点",
        "degrees": "度",
        "decades": "个数量级",
        "octaves": "个倍频程",
        "nats": "奈特",
        "bits": "比特",
        "% of the fall": "%（相对于总降幅）",
        "to": "至",
        "orthogonality, add_grads_": "软正交（`add_grads_`）",
        "SRIP, add_grads_": "SRIP（`add_grads_`）",
        "self-orthogonality, samples=512": "自正交，`samples=512`",
        "self-orthogonality": "自正交",
        "scale shift, add_grads_": "尺度偏移不变正则（`add_grads_`）",
        "decoupled (tanh, cosine)": "解耦卷积（tanh，余弦）",
        "switchable norm": "Switchable Norm",
        "weight norm": "权重归一化",
        "spectral norm": "谱归一化",
        "weight standardisation": "权重标准化",
        "sphere": "球面约束",
        "orthogonal": "正交约束",
    },
    sentence=lambda claim: claim.claim_zh,
)  # fmt: skip
TOPICS = {
    "000": "卷积核之间的夹角",
    "001": "权重的尺度",
    "002": "归一化",
    "003": "解耦网络",
    "004": "几何视角的初始化",
    "training": "训练过程中的范数与夹角",
    "control": "对照：按构造为假的论断",
}
README_METHODS = {
    "gain-tanh": "初始化的增益",
    "orthogonality-spread": "软正交",
    "som-spread": "自正交",
    "spectral-lipschitz": "谱归一化",
    "weight-norm-grows": "权重归一化",
    "log-is-not-fooled": "尺度偏移不变正则",
    "int8-balance": "`balance_`",
    "bn-batch-2": "批大小为 2 时的组归一化",
}


def pages() -> dict[Path, str]:
    """Every page with the tables that the results give."""
    found, written = _findings(), {}
    for folder, language, up in ((DOCS / "methods", ENGLISH, ".."), (DOCS / "zh" / "methods", CHINESE, "../..")):
        for name, (seed, cases) in METHODS.items():
            chosen = [one for one in found.values() if one.claim.seed == seed]
            tables = {"claims": _claims(chosen, language, f"{up}/claims"), "cost": _costs(cases, language)}
            written[folder / f"{name}.md"] = _filled(folder / f"{name}.md", tables)
    readme = ROOT / "README.zh-CN.md"
    rows = _claims([found[name] for name in README_METHODS], CHINESE, "docs/claims", names=README_METHODS)
    return written | {readme: _filled(readme, {"claims": rows}), DOCS / "zh" / "claims.md": _all_claims(found)}


def _filled(page: Path, tables: dict[str, str]) -> str:
    text = page.read_text(encoding="utf-8")
    for name, table in tables.items():
        head, _, rest = text.partition(f"<!-- {name} -->\n")
        if rest:
            text = f"{head}<!-- {name} -->\n{table}<!-- /{name} -->{rest.partition(f'<!-- /{name} -->')[2]}"
    return text


def _findings() -> dict[str, ClaimResult]:
    """The finding of each claim in the catalogue's order; full results replace quick ones."""
    found: dict[str, ClaimResult] = {}
    for path in sorted((RESULTS / "claims").glob("*.json"), key=lambda path: path.stem.startswith("full")):
        data = from_data(json.loads(path.read_text(encoding="utf-8")))
        found |= {one.claim.name: one for one in data.results if one.verdict != "not tried"}
    return {claim.name: found[claim.name] for claim in load_claims() if claim.name in found}


def _claims(found: list[ClaimResult], language: Language, to: str, *, names: dict[str, str] | None = None) -> str:
    head = (*((language.costs[0],) if names else ()), *language.claims)
    rows = [head, ("---",) * len(head)]
    for one in found:
        sentence = language.sentence(load_claim(one.claim.name))
        link = f"[{sentence}]({to}/{one.claim.seed}.md#{one.claim.name})"
        name = (names[one.claim.name],) if names else ()
        rows.append((*name, link, language.say(one.verdict), language.say(effect_text(one))))
    return _table(rows)


def _all_claims(found: dict[str, ClaimResult]) -> str:
    """The Chinese page of all claims, one table per topic; the English pages have pictures, arms and commands."""
    claims = load_claims()
    counts = "，".join(
        f"{number} 条{CHINESE.say(name)}"
        for name in VERDICTS
        if (number := sum(one.verdict == name for one in found.values()))
    )
    lines = [
        "<!-- Written by docs/build_methods.py from benchmarks/results/claims; do not edit. -->",
        "# 论文的论断与实测结论",
        "",
        f"共 {len(claims)} 条论断，检验了其中 {len(found)} 条：{counts}。"
        "`gonio reproduce` 在你的机器上检验用时短的那些。",
        "论断的出处见[来源](sources.md)，原文中的错误见[勘误](corrections.md)。"
        "每条论断链接到英文页面，那里有图、各组得分、随机种子和复现命令。",
    ]
    for seed, topic in TOPICS.items():
        rows = [CHINESE.claims, ("---",) * 3]
        for claim in (each for each in claims if each.seed == seed):
            one = found.get(claim.name)
            verdict = one.verdict if one else "not tried" if claim.not_tried else "not run yet"
            link = f"[{claim.claim_zh}](../claims/{seed}.md#{claim.name})"
            rows.append((link, CHINESE.say(verdict), CHINESE.say(effect_text(one)) if one else ""))
        lines += ["", f"## {topic}", "", _table(rows).rstrip("\n")]
    return "\n".join(lines) + "\n"


def _costs(cases: tuple[str, ...], language: Language) -> str:
    steps = json.loads((RESULTS / "whole_steps.json").read_text(encoding="utf-8"))["rows"]
    by_case = {(row["table"], row["case"]): row for row in steps}
    rows = [language.costs, ("---",) * 4]
    for case in cases:
        large, small = by_case["ResNet-18", case], by_case["digits-network", case]
        memory = large["candidates"][0]["peak_mib"] / large["floor"]["peak_mib"]
        times = [row["candidates"][0]["wall"]["median"] for row in (large, small)]
        shown = f"`{case.removesuffix(', add_grads_')}`" if "samples" in case else case.removesuffix(", add_grads_")
        name = shown if language is ENGLISH else language.words.get(case, shown)
        rows.append((name, f"×{times[0]:.2f}", f"×{memory:.2f}", f"×{times[1]:.2f}"))
    return _table(rows)


def _table(rows: list[tuple[str, ...]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


if __name__ == "__main__":
    different = {
        page: text for page, text in pages().items() if not page.is_file() or page.read_text(encoding="utf-8") != text
    }
    if "--check" in sys.argv[1:] and different:
        names = ", ".join(str(page.relative_to(ROOT)) for page in different)
        sys.exit(f"{names}: not what the results give; run python docs/build_methods.py")
    for page, text in different.items():
        page.write_text(text, encoding="utf-8")
