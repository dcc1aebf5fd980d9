"""Method pages hold the tables of the results, and the Chinese pages the structure and code of the English ones."""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path

import pytest

from docs.pages import ROOT, builder_of

HOWTO = ("check", "measure", "compare", "fine-tuning")
METHODS = ("initialisation", "normalisation", "decoupled", "angular-regularisation", "scale-shift-invariant")
PAIRS = {
    "README.md": "README.zh-CN.md",
    "docs/start.md": "docs/zh/start.md",
    "docs/sources.md": "docs/zh/sources.md",
    "docs/claims/corrections.md": "docs/zh/corrections.md",
    **{f"docs/howto/{name}.md": f"docs/zh/howto/{name}.md" for name in HOWTO},
    **{f"docs/methods/{name}.md": f"docs/zh/methods/{name}.md" for name in METHODS},
}
BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", flags=re.M | re.S)
HEADING = re.compile(r"^(#+) ", flags=re.M)
CHINESE = re.compile(r"[\u4e00-\u9fff]")


def code(block: str, language: str) -> list[str]:
    """The code without comments, which are translated."""
    if language not in ("python", "{code-cell}"):
        return [re.sub(r"(^|\s+)# .*", "", line) for line in block.splitlines()]
    source = re.sub(r"^:[\w-]+:.*", "", block, flags=re.M)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [token.string for token in tokens if token.type not in (tokenize.COMMENT, tokenize.NL) and token.string]


def structure(text: str) -> tuple[list[int], list[tuple[str, list[str]]]]:
    """Levels of headings, and the language and code of every block."""
    blocks = [(match[1], code(match[2], match[1])) for match in BLOCK.finditer(text)]
    return [len(found) for found in HEADING.findall(BLOCK.sub("", text))], blocks


@pytest.mark.parametrize(("english", "chinese"), PAIRS.items(), ids=PAIRS)
def test_a_chinese_page_follows_the_english_one(english: str, chinese: str) -> None:
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in (english, chinese)]
    levels, blocks = zip(*map(structure, texts), strict=True)
    assert levels[0] == levels[1], f"{chinese}: other headings than {english}"
    assert blocks[0] == blocks[1], f"{chinese}: other code than {english}"


@pytest.mark.parametrize("page", [*PAIRS.values(), "docs/zh/glossary.md", "docs/zh/claims.md", "docs/zh/commands.md"])
def test_a_chinese_page_is_chinese(page: str) -> None:
    """Every paragraph outside code has Chinese characters, apart from markers and tables that are generated."""
    text = re.sub(r"^---\n.*?\n---\n", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.S)
    prose = BLOCK.sub("", text)
    if "/howto/" in page:
        prose = builder_of("build_translations").MARKED.sub("", prose)
    prose = re.sub(r"\$\$.*?\$\$|<!--.*?-->", "", prose, flags=re.S)
    foreign = [part for part in prose.split("\n\n") if part.strip() and not CHINESE.search(part)]
    assert foreign in ([], ["# gonio"])


def test_outputs_and_tables_are_those_of_the_english_pages() -> None:
    builder = builder_of("build_translations")
    stale = [str(page.relative_to(ROOT)) for page, text in builder.pages().items() if page.read_text("utf-8") != text]
    assert stale == [], "run python docs/build_translations.py"
    assert {ROOT / page for page in PAIRS.values()} - {ROOT / "docs/zh/corrections.md"} == builder.pairs().keys()


def test_an_output_or_a_table_that_was_left_behind_is_found() -> None:
    builder = builder_of("build_translations")
    page = "```text\n{0}\n```\n\n<!-- benchmark usual -->\n| {0} |\n<!-- /benchmark -->\n"
    new, old = page.format("new"), page.format("old")
    once = builder.copied(new, old, builder.OUTPUT)
    assert once == old.replace("old\n```", "new\n```")
    assert builder.copied(new, once, builder.MARKED) == new
    with pytest.raises(ValueError, match=r"has 2 of .* the Chinese one 1"):
        builder.copied(new + new, old, builder.OUTPUT)


@pytest.mark.parametrize("change", ["## More\n", "```python\nx = 1\n```\n"])
def test_a_page_that_was_left_behind_is_found(change: str) -> None:
    text = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
    assert structure(text) != structure(text + change)


def test_a_translated_comment_is_no_difference() -> None:
    a, b = (f"```python\nx = '# no comment'  # {comment}\n```\n" for comment in ("kept", "保留"))
    assert structure(a) == structure(b)
    assert structure(a) != structure(a.replace("no comment", "other"))


def test_the_tables_are_those_of_the_results() -> None:
    pages = builder_of("build_methods").pages()
    stale = [str(page.relative_to(ROOT)) for page, text in pages.items() if page.read_text("utf-8") != text]
    assert stale == [], "run python docs/build_methods.py"


@pytest.mark.parametrize("name", METHODS)
def test_cost_tables_name_the_same_settings_in_both_languages(name: str) -> None:
    pages = (ROOT / folder / "methods" / f"{name}.md" for folder in ("docs", "docs/zh"))
    texts = (page.read_text(encoding="utf-8") for page in pages)
    tables = (text.partition("<!-- cost -->")[2].partition("<!-- /cost -->")[0] for text in texts)
    english, chinese = (re.findall(r"`(.*?)`", table) for table in tables)
    assert english == chinese


def test_every_method_page_has_the_same_parts() -> None:
    parts = {
        name: re.findall(r"^## (.*)", (ROOT / "docs" / "methods" / f"{name}.md").read_text("utf-8"), flags=re.M)
        for name in METHODS
    }
    wanted = ["What it is", "When to try it", "How to use it", "What it did here", "Cost", "Pitfalls"]
    assert parts == dict.fromkeys(METHODS, wanted)
    assert tuple(builder_of("build_methods").METHODS) == METHODS
    pages = sorted(page.stem for page in Path(ROOT / "docs" / "methods").glob("*.md"))
    assert pages == sorted(METHODS)


def test_the_search_of_the_site_knows_chinese_words() -> None:
    pytest.importorskip("sphinx")
    pytest.importorskip("latex2mathml")
    words = builder_of("conf").SearchWords({})
    assert words.split("卷积核 align 的G104 层") == ["卷积", "积核", "align", "的", "G104", "层"]
    assert words.stem("norms") == "norm"
