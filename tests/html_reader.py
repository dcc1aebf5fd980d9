"""What a browser would make of a page: its elements, its attributes and its text."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser

VOID = {"meta", "br", "hr", "img", "input", "link", "col"}
EMPTY_SVG = {"path", "use", "line", "rect", "circle"}


class Page(HTMLParser):
    """Reads a page and refuses unbalanced elements."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []  # (innermost element, text)
        self.open: list[str] = []
        self.feed(re.sub(r"<wbr[^>]*>", "", html))  # where a line may break: no part of a text
        self.close()
        if self.open:
            raise ValueError(f"never closed: {self.open}")

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            raise ValueError(f"</{tag}> closes something else; open: {self.open[-5:]}")

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    @property
    def text(self) -> str:
        return "".join(text for tag, text in self.texts if tag not in ("style", "title", "script"))

    def may_run(self) -> list[str]:
        """The scripts whose hash is in the page's own security policy; raises for any other."""
        (policy,) = (value for value in self.values("content") if "default-src" in value)
        scripts = [text for tag, text in self.texts if tag == "script"]
        for script in scripts:
            digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
            if f"script-src 'sha256-{digest}';" not in policy:
                raise ValueError(f"a script that the page does not allow: {script[:80]}")
        return scripts

    def names(self) -> set[str]:
        return {tag for tag, _ in self.tags}

    def attributes(self) -> set[str]:
        return {name for _, attrs in self.tags for name in attrs}

    def values(self, attribute: str) -> list[str]:
        return [attrs[attribute] or "" for _, attrs in self.tags if attribute in attrs]
