"""Copies what the tests and the results write into English pages into the Chinese ones: nobody copies it by hand.

    python docs/build_translations.py

Outputs (```text) of every page with an English one of the same name, and in docs/zh/howto what stands between a marker
(`<!-- planted -->`, `<!-- benchmark TOPIC -->`) and its end. Both pages have as many of each, in the same order.
"""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
OUTPUT = re.compile(r"^```text\n.*?^```$", flags=re.M | re.S)
MARKED = re.compile(r"^<!-- (?P<mark>\w+)[^\n]* -->\n.*?^<!-- /(?P=mark) -->$", flags=re.M | re.S)


def pairs() -> dict[Path, Path]:
    """The English page of each Chinese one that has any."""
    found = {page: DOCS / page.relative_to(DOCS / "zh") for page in sorted((DOCS / "zh").rglob("*.md"))}
    found = {page: english for page, english in found.items() if english.is_file()}
    return found | {ROOT / "README.zh-CN.md": ROOT / "README.md"}


def pages() -> dict[Path, str]:
    """Every Chinese page of `pairs` with the outputs and tables of the English one."""
    written = {}
    for page, english in pairs().items():
        text, source = page.read_text(encoding="utf-8"), english.read_text(encoding="utf-8")
        # Tables of other pages are written in Chinese by scripts of their own.
        for part in (OUTPUT, MARKED) if page.parent.name == "howto" else (OUTPUT,):
            text = copied(source, text, part)
        written[page] = text
    return written


def copied(source: str, text: str, part: re.Pattern[str]) -> str:
    """`text` with each match of `part` replaced by the one at its place in `source`."""
    new = [match[0] for match in part.finditer(source)]
    if len(new) != (count := sum(1 for _ in part.finditer(text))):
        raise ValueError(f"the English page has {len(new)} of {part.pattern!r}, and the Chinese one {count}")
    parts = iter(new)
    return part.sub(lambda _: next(parts), text)


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text, encoding="utf-8")
