"""README and the pages of docs/ do what they say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.pages import ROOT, agrees, commands, is_long, run_page

WRITTEN = [
    *sorted(ROOT.glob("README*.md")),
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if not {"reference", "jupyter_execute"} & {*page.parts}),
]
# Of the Chinese pages only commands.md has outputs of its own; the others are those of test_translations.py.
PAGES = [p for p in WRITTEN if p.name != "README.zh-CN.md" and ("zh" not in p.parts or p.name == "commands.md")]
HEAVY = {  # what they run takes longer than ten seconds: `make test-slow` runs them whole
    "command-line.md",
    "commands.md",
    "any-model.md",
    "claim.md",
    "compare.md",
    "fine-tuning.md",
    "quantise.md",
    "recipes.md",
    "self-orthogonality.md",
    "start.md",
    "task.md",
    "transformer-to-int4.md",
    "width.md",
}
FENCE = re.compile(r"^```(?:console|bash)\n(.*?)^```", flags=re.M | re.S)


def trains(page: Path) -> bool:
    blocks = FENCE.findall(page.read_text(encoding="utf-8"))
    return any(is_long(words) for block in blocks for words, _ in commands(block))


def over(pages: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", [pytest.param(p, id=str(p.relative_to(ROOT))) for p in pages])


@over([page for page in PAGES if page.name not in HEAVY])
def test_page(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    run_page(page, tmp_path)


@pytest.mark.slow
@over([page for page in PAGES if trains(page) or page.name in HEAVY])
def test_page_with_its_comparisons(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    run_page(page, tmp_path, long=True)


LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
HEADING = re.compile(r"^#+ +(.*?) *#*$", flags=re.M)


def without_code(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site name them."""
    titles = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in HEADING.findall(without_code(page))]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(page: Path) -> list[str]:
    """Links to a file that is not there, or to a heading that its page does not have."""
    broken = []
    for target, anchor in LINK.findall(without_code(page)):
        path = page.parent / target if target else page
        if "://" in target or target.startswith("mailto:"):
            continue
        if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors(path)):
            broken.append(f"{target}#{anchor}" if anchor else target)
    return broken


@over([*WRITTEN, *sorted((ROOT / "docs" / "reference").glob("*.md"))])
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A title, with `code`\n", encoding="utf-8")
    page = _page(tmp_path, "[a](other.md#a-title-with-code) [b](other.md#no) [c](gone.md) [d](#no)")
    assert broken_links(page) == ["other.md#no", "gone.md", "#no"]


def test_the_index_links_every_page() -> None:
    index = ROOT / "docs" / "index.md"
    pages = [index, ROOT / "docs" / "claims" / "README.md", ROOT / "docs" / "gallery" / "index.md"]
    linked = {(page.parent / found[0]).resolve() for page in pages for found in LINK.findall(page.read_text("utf-8"))}
    docs = [page for page in WRITTEN if page.parent != ROOT]
    missing = [page.name for page in docs if page.resolve() not in linked | {index.resolve()}]
    assert not missing, f"docs/index.md does not link {missing}"


# --- negative controls ----------------------------------------------------------------------------


def _page(folder: Path, text: str) -> Path:
    page = folder / "page.md"
    page.write_text(text, encoding="utf-8")
    return page


def test_blocks_share_a_namespace(tmp_path: Path) -> None:
    page = _page(tmp_path, "```python\nx = 1\n```\n\n```python\nassert x == 1\n```\n")
    assert run_page(page, tmp_path) == 2


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("```python\nassert 1 == 2, 'wrong block'\n```\n", AssertionError, "wrong block"),
        ("```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n", AssertionError, "the page shows\n3"),
        ("```python\ntorch.ones(2)\n```\n", NameError, "torch"),
        ("```console\n$ gonio no-such\n```\n", AssertionError, "gonio no-such exited with 2, not 0"),
        ("```bash\nmake no-such-target\n```\n", AssertionError, "make no-such-target exited with 2"),
    ],
    ids=["block", "output", "import", "command", "make target"],
)
def test_what_is_wrong_is_found(text: str, error: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        run_page(_page(tmp_path, text), tmp_path)


def test_a_command_may_say_that_it_fails(tmp_path: Path) -> None:
    assert run_page(_page(tmp_path, "```bash\ngonio no-such-command  # exits 2\n```\n"), tmp_path) == 1


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("z +0.0", "z −0.0", True),
        ("angle 90.1 ± 3.42", "angle  90.1 ± 3.44", True),
        ("angle 90.1", "angle 93.1", False),
        ("64 filters", "65 filters", False),
        ("conv1: 0.5", "conv2: 0.5", False),
        ("first … last", "first 17 words last", True),
        ("True", "False", False),
        ("≈98%", "99%", True),
        ("98%", "99%", False),
        ("≈98%", "92%", False),
        ("≈98%", "about 98%", False),
        ("error=<1e-12", "error=0", True),
        ("error=<1e-12", "error=-4.44e-16", True),
        ("error=<1e-12", "error=2e-12", False),
        ("error=<1e-12", "error=nan", False),
        ("p <0.001", "p <0.001", True),
        ("p 0.001", "p <0.001", False),
        ("4e-16", "9e-16", False),
    ],
)
def test_which_outputs_agree(shown: str, printed: str, same: bool) -> None:
    assert agrees(shown, printed) == same


def test_which_commands_are_run() -> None:
    block = "$ pip install gonio\ngonio measure x.pt \\\n  --json -  # exits 1\n\nTable of results\nmake test"
    assert commands(block) == [(["gonio", "measure", "x.pt", "--json", "-"], 1), (["make", "test"], 0)]
    assert is_long(["gonio", "compare"])
    assert not is_long(["gonio", "compare", "--dry-run"])
    assert not is_long(["gonio", "measure", "x.pt"])


def test_the_heavy_pages_are_there() -> None:
    assert {page.name for page in PAGES} >= HEAVY
