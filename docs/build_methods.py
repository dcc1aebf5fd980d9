"""Writes the tables of claims and costs into the method pages of both languages, README.zh-CN.md and docs/zh/claims.md.

`python docs/build_methods.py` writes them from benchmarks/results; with `--check` it fails if a page differs. The text
around the tables is written by hand.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import committed

from gonio.lab.claims import Claim, ClaimResult, load_claim, load_claims, tally
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
    claims=("claim", "scope", "verdict here", "effect (95 % interval)"),
    costs=("method", "time, ResNet-18", "peak memory, ResNet-18", "time, small network"),
    words={},
    sentence=lambda claim: claim.claim.rstrip("."),
)
CHINESE = Language(
    claims=("论断", "范围", "实测结论", "效应（95% 区间）"),
    costs=("方法", "耗时，ResNet-18", "内存峰值，ResNet-18", "耗时，小网络"),
    words={
        **committed.CHINESE,
        "points": "个百分点",
        "within": "不超过",
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
    "weight-norm-grows": "权重归一化",
    "int8-balance": "`balance_`",
    "bn-batch-2": "批大小为 2 时的组归一化",
}


def pages() -> dict[Path, str]:
    """Every page with the tables that the results give."""
    found, written = committed.findings(), {}
    for folder, language, up in ((DOCS / "methods", ENGLISH, ".."), (DOCS / "zh" / "methods", CHINESE, "../..")):
        for name, (seed, cases) in METHODS.items():
            chosen = [claim.name for claim in load_claims() if claim.seed == seed and not claim.not_tried]
            tables = {"claims": _claims(found, chosen, language, f"{up}/claims"), "cost": _costs(cases, language)}
            written[folder / f"{name}.md"] = _filled(folder / f"{name}.md", tables)
    readme = ROOT / "README.zh-CN.md"
    rows = _claims(found, README_METHODS, CHINESE, "docs/claims")
    return written | {readme: _filled(readme, {"claims": rows}), DOCS / "zh" / "claims.md": _all_claims(found)}


def _filled(page: Path, tables: dict[str, str]) -> str:
    text = page.read_text(encoding="utf-8")
    for name, table in tables.items():
        head, _, rest = text.partition(f"<!-- {name} -->\n")
        if rest:
            text = f"{head}<!-- {name} -->\n{table}<!-- /{name} -->{rest.partition(f'<!-- /{name} -->')[2]}"
    return text


def _claims(found: dict[str, ClaimResult], names: Iterable[str], language: Language, to: str) -> str:
    """One row for each claim; with names of methods, in a column of their own."""
    titles = names if isinstance(names, dict) else {}
    head = (*((language.costs[0],) if titles else ()), *language.claims)
    rows = [head, ("---",) * len(head)]
    for name in names:
        claim, one = load_claim(name), found.get(name)
        link = f"[{language.sentence(claim)}]({to}/{committed.PAGE[claim.seed]}.md#{name})"
        verdict, effect = committed.word_of(claim, one), effect_text(one) if one else ""
        method = (titles[name],) if titles else ()
        rows.append((*method, link, *(language.say(text) for text in (claim.scope, verdict, effect))))
    return _table(rows)


def _all_claims(found: dict[str, ClaimResult]) -> str:
    """The Chinese page of all claims, one table per topic; the English pages have pictures, arms and commands."""
    claims = load_claims()
    lines = [
        "<!-- Written by docs/build_methods.py from benchmarks/results/claims; do not edit. -->",
        "# 论文的论断与实测结论",
        "",
        f"共 {len(claims)} 条论断，检验了其中 {len(found)} 条：{_tally(found)}。"
        "`gonio reproduce` 在你的机器上检验用时短的那些。",
        "论断的出处见[来源](sources.md)，原文中的错误见[勘误](corrections.md)。"
        "每条论断链接到英文页面，那里有图、各组得分、随机种子和复现命令。",
    ]
    for seed, topic in TOPICS.items():
        rows = [CHINESE.claims, ("---",) * 4]
        for claim in (each for each in claims if each.seed == seed):
            one = found.get(claim.name)
            link = f"[{claim.claim_zh}](../claims/{committed.PAGE[seed]}.md#{claim.name})"
            texts = (claim.scope, committed.word_of(claim, one), effect_text(one) if one else "")
            rows.append((link, *map(CHINESE.say, texts)))
        lines += ["", f"## {topic}", "", _table(rows).rstrip("\n")]
    return "\n".join(lines) + "\n"


def _tally(found: dict[str, ClaimResult]) -> str:
    """The verdicts by scope."""
    text = tally([*found.values()])
    for english, own in (
        ("identities", "恒等式"),
        ("mechanisms", "机理"),
        ("small scope", "小规模"),
        ("field scope", "实际规模"),
    ):
        text = text.replace(f"{english}: ", f"{own}：")
    said = re.sub(r"(\d+) ([a-z][a-z ]*)", lambda found: f"{found[1]} 条{committed.CHINESE[found[2]]}", text)
    return said.replace("; ", "；").replace(", ", "，")


def _costs(cases: tuple[str, ...], language: Language) -> str:
    steps = json.loads((RESULTS / "whole_steps.json").read_text(encoding="utf-8"))["rows"]
    by_case = {(row["table"], row["case"]): row for row in steps}
    rows = [language.costs, ("---",) * 4]
    for case in cases:
        large, small = by_case["ResNet-18", case], by_case["digits-network", case]
        memory = large["candidates"][0]["peak_mib"] / large["floor"]["peak_mib"]
        times = [row["candidates"][0]["wall"]["median"] for row in (large, small)]
        shown = re.sub(r", (add_grads_|samples=\d+)$", r" (`\1`)", case)
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
