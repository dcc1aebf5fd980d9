"""The everyday tasks take few lines, and the index of the notebooks counts them."""

from __future__ import annotations

import re

import pytest

from docs.pages import ROOT

GALLERY = ROOT / "docs" / "gallery"
# Notebook: the number of lines that its task may take.
TASKS = {
    "orthogonal-initialisation": 2,
    "batch-norm-to-group-norm": 1,
    "spectral-norm": 1,
    "certified-network": 2,
    "self-orthogonality-lightning": 2,
    "soft-orthogonality-hugging-face": 2,
    "compare-two-checkpoints": 1,
    "duplicate-filters": 1,
    "angle-histogram": 6,
    "decoupled-network-and-back": 2,
    "balance-for-int8": 2,
    "transformer-to-int4": 3,
    "tensorboard": 2,
    "compare-with-your-own-script": 1,
    "scale-shift-invariant-decay": 1,
    "find-what-is-unusual": 1,
    "batch-norm-imported-wrongly": 1,
    "adapter-that-dwarfs-its-base": 1,
    "network-that-does-not-start": 1,
}
TASK = re.compile(
    r"^```\{code-cell\}\n:tags: \[task\]\n(.*?)^```$|^<!-- task -->\n```\w+\n(.*?)^```$", flags=re.M | re.S
)
ROW = re.compile(r"^\| [^|]+ \| (\d+) \| \[[^\]]+\]\(([\w-]+)\.md\) \|$", flags=re.M)


def lines(text: str) -> int:
    """Lines of code of the one task of a notebook."""
    found = TASK.findall(text)
    assert len(found) == 1, f"{len(found)} tasks"
    return sum(bool(line.strip()) and not line.lstrip().startswith("#") for line in "".join(found[0]).splitlines())


def test_the_index_counts_the_lines_of_every_notebook() -> None:
    rows = {name: int(count) for count, name in ROW.findall((GALLERY / "index.md").read_text(encoding="utf-8"))}
    counts = {page.stem: lines(page.read_text("utf-8")) for page in GALLERY.glob("*.md") if page.stem != "index"}
    assert rows == counts
    assert rows.keys() == TASKS.keys()


@pytest.mark.parametrize(("name", "most"), TASKS.items(), ids=TASKS)
def test_a_task_takes_few_lines(name: str, most: int) -> None:
    assert lines((GALLERY / f"{name}.md").read_text(encoding="utf-8")) <= most


def test_how_lines_are_counted() -> None:
    cell = "```{code-cell}\n:tags: [task]\n# remark\na = 1\n\nf(\n    a,\n)\n```\n"
    assert lines(cell) == 4
    with pytest.raises(AssertionError, match="0 tasks"):
        lines("```{code-cell}\na = 1\n```\n")
