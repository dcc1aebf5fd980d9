"""Writes docs/sources.md and docs/zh/sources.md from docs/sources.yaml, and the table of articles into both READMEs.

`python docs/build_sources.py` writes them; with `--check` it fails if a page differs from what it would write. A row of
the data is one sentence of an article, the names and tests that answer it, and whether they do.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import committed
import yaml

from gonio.lab.claims import load_claim

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
HEAD = "<!-- Written by docs/build_sources.py from docs/sources.yaml; do not edit. -->"
STATES = ("met", "partly", "missing")


@dataclass(frozen=True)
class Language:
    """The words of a page; `key` is the suffix of the fields of the data, `up` leads from the page to docs/."""

    key: str
    up: str
    corrections: str
    title: str
    intro: str
    counts: str
    columns: tuple[str, ...]
    labels: tuple[str, ...]
    states: dict[str, str]
    not_stated: str
    colon: str


ENGLISH = Language(
    key="",
    up="",
    corrections="claims/corrections.md",
    title="Sources",
    intro="gonio began with five Chinese articles: four on one paper or one subject each, and one survey (002). "
    "This page says what each teaches, where that stands in the library, and what it gets wrong. Each table goes "
    "through an article sentence by sentence: the public names that do what it describes and the test that holds it. "
    "A quotation finds the sentence. "
    "Claims are tried by `gonio reproduce NAME`. [中文](zh/sources.md)",
    counts="{rows} sentences: {met} met, {partly} partly, and {missing} missing for lack of data or hardware.",
    columns=("sentence", "what it needs", "in gonio", "held by", "state"),
    labels=("Author", "Date", "Address", "On", "Teaches", "In gonio", "Gets wrong", "Claims", "all corrections"),
    states={state: state for state in STATES},
    not_stated="not stated",
    colon=": ",
)
CHINESE = Language(
    key="_zh",
    up="../",
    corrections="corrections.md",
    title="来源",
    intro="gonio 起始于五篇中文文章：四篇各讲一篇论文或一个主题，一篇是综述（002）。"
    "本页说明每篇讲了什么、在库中的位置、有哪些错误。"
    "每个表逐句对照一篇文章：哪些公开的名称实现了它，哪个测试保证它。"
    "引文用来定位原句。论断用 `gonio reproduce NAME` 检验。"
    "[English](../sources.md)",
    counts="共 {rows} 句：{met} 句做到，{partly} 句部分做到，{missing} 句因缺少数据或硬件未做到。",
    columns=("原句", "需要什么", "在 gonio 中", "由什么保证", "状态"),
    labels=("作者", "日期", "地址", "所讲的论文或主题", "内容", "在 gonio 中", "错误", "论断", "全部勘误"),
    states={"met": "做到", "partly": "部分", "missing": "未做到"},
    not_stated="文中没有写明",
    colon="：",
)


def sources() -> dict[str, dict[str, Any]]:
    """The articles by number."""
    data: dict[str, dict[str, Any]] = yaml.safe_load((DOCS / "sources.yaml").read_text(encoding="utf-8"))
    return data


def heading(number: str, article: dict[str, Any], language: Language) -> str:
    if language is CHINESE:
        return f"文章 {number}：{article['title']}"
    return f"{number}: {article['english']}"


def pages() -> dict[Path, str]:
    """Every page with its content."""
    readmes = {ROOT / "README.md": ENGLISH, ROOT / "README.zh-CN.md": CHINESE}
    return {
        DOCS / "sources.md": _page(ENGLISH),
        DOCS / "zh" / "sources.md": _page(CHINESE),
        **{path: _with_articles(path, language) for path, language in readmes.items()},
    }


def _page(language: Language) -> str:
    articles = sources()
    states = Counter(row["state"] for article in articles.values() for row in article["rows"])
    counts = language.counts.format(rows=states.total(), **{state: states[state] for state in STATES})
    lines = [HEAD, f"# {language.title}", "", language.intro, "", counts]
    for number, article in articles.items():
        lines += ["", f"## {heading(number, article, language)}", "", *_facts(number, article, language), ""]
        lines += [
            _line(language.columns),
            _line(("---",) * 5),
            *(_line(_cells(row, language)) for row in article["rows"]),
        ]
    return "\n".join(lines) + "\n"


def _facts(number: str, article: dict[str, Any], language: Language) -> list[str]:
    author, date, address, about, teaches, place, wrong, claims, corrections = language.labels
    pages = [f"[{Path(page).stem}]({_page_link(page, language)})" for page in article["pages"]]
    claim_page = f"{language.up}claims/{committed.PAGE[number]}.md"
    facts = {
        author: article["author"] if language is CHINESE else f"{article['author_en']}, *{article['title']}*",
        date: article["date"] or language.not_stated,
        address: f"<{article['address']}>" if article["address"] else language.not_stated,
        about: article["about"],
        teaches: article[f"teaches{language.key}"],
        place: ", ".join(pages),
        wrong: f"{article[f'wrong{language.key}']} [{corrections}]({language.corrections})",
        claims: f"[{committed.PAGE[number]}]({claim_page})",
    }
    return [f"- {label}{language.colon}{text}" for label, text in facts.items()]


def _page_link(page: str, language: Language) -> str:
    """A method page has a Chinese twin."""
    return page if language is CHINESE and page.startswith("methods/") else f"{language.up}{page}"


def _cells(row: dict[str, Any], language: Language) -> tuple[str, ...]:
    names = ", ".join(f"`gonio.{name}`" for name in row["names"])
    tests = [f"`{test.partition('::')[2]}`" for test in row.get("tests", ()) if "test_the_verdicts_follow" not in test]
    pages = {name: committed.PAGE[load_claim(name).seed] for name in row.get("claims", ())}
    claims = [f"[{name}]({language.up}claims/{page}.md#{name})" for name, page in pages.items()]
    why = row.get(f"why{language.key}", "")
    state = language.states[row["state"]] + (f"{language.colon}{why}" if why else "")
    quote = row["quote"].replace("|", "\\|")
    return f"“{quote}”", row[f"needs{language.key}"], names, ", ".join([*tests, *claims]), state


def _with_articles(path: Path, language: Language) -> str:
    """A README with the table of the articles' methods between its comments."""
    chinese = language is CHINESE
    head = ("article", "method", "one line", "recipe", "verdict here")
    if chinese:
        head = ("文章", "方法", "用法", "配方", "实测结论")
    rows = [_line(head), _line(("---",) * len(head))]
    found = committed.findings()
    for number, article in sources().items():
        folder, claim = "docs/zh" if chinese else "docs", load_claim(article["claim"])
        anchor = re.sub(r"[^\w\- ]", "", heading(number, article, language).lower()).replace(" ", "-")
        author = article["author"] if chinese else article["author_en"]
        method = f"[{article[f'method{language.key}']}]({folder}/methods/{article['page']}.md)"
        sentence = claim.claim_zh if chinese else claim.claim.rstrip(".")
        said = f"{committed.word_of(claim, found.get(claim.name))} ({claim.scope})"
        if chinese:
            said = f"{committed.CHINESE[said.partition(' (')[0]]}（{committed.CHINESE[claim.scope]}）"
        verdict = f"{said}{language.colon}"
        link = f"[{sentence}](docs/claims/{committed.PAGE[claim.seed]}.md#{claim.name})"
        where = f"[{number}, {author}]({folder}/sources.md#{anchor})"
        rows.append(_line((where, method, f"`{article['line']}`", f"`{article['recipe']}`", verdict + link)))
    text = path.read_text(encoding="utf-8")
    table = "\n".join(rows) + "\n"
    return re.sub(
        r"(<!-- articles -->\n).*?(<!-- /articles -->)", lambda found: f"{found[1]}{table}{found[2]}", text, flags=re.S
    )


def _line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    different = {
        page: text for page, text in pages().items() if not page.is_file() or page.read_text(encoding="utf-8") != text
    }
    if "--check" in sys.argv[1:] and different:
        names = ", ".join(str(page.relative_to(ROOT)) for page in different)
        sys.exit(f"{names}: not what the data give; run python docs/build_sources.py")
    for page, text in different.items():
        page.write_text(text, encoding="utf-8")
