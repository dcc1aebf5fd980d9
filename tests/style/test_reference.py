"""The reference pages say what the docstrings say, in markdown, the same in every run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

from style.reference import builder, docstrings

DOCUMENT = r"""Length of a vector, :math:`\lVert x \rVert`, see :func:`gonio.geometry.safe_norm`.

Uses ``sqrt``:

.. math::
    \sqrt{\sum x^2}

Args:
    x: any vector, also one
        of two lines.
    dim: the axis.

Returns:
    A scalar.

Example:
    >>> 1 + 1
    2

Differs: not at all.
"""


def test_a_docstring_in_markdown() -> None:
    text = docstrings.render_docstring(DOCUMENT)
    assert text.startswith(r"Length of a vector, $\lVert x \rVert$, see `geometry.safe_norm`.")
    assert "Uses `sqrt`:\n\n$$\n\\sqrt{\\sum x^2}\n$$" in text
    assert "**Arguments**\n\n- `x`: any vector, also one of two lines.\n- `dim`: the axis." in text
    assert "**Returns**\n\nA scalar." in text
    assert "```pycon\n>>> 1 + 1\n2\n```" in text
    assert text.endswith("**Differs**\n\nnot at all.")


def test_a_table_stays_a_table() -> None:
    table = "==== ====\nkind size\n==== ====\na    1\n==== ===="
    assert docstrings.render_docstring(f"Sizes.\n\n{table}\n") == f"Sizes.\n\n```text\n{table}\n```"


@dataclasses.dataclass(frozen=True)
class _Record:
    size: int = 1


RELU = nn.ReLU()


def _short(x: int, /, y: str = "a", *rest: int, call=torch.tanh) -> None: ...


def _long(*, record: _Record = _Record(), module: nn.Module = RELU, names: tuple[str, ...] = ("a", "b")) -> None: ...


def test_a_signature_has_no_addresses() -> None:
    assert builder.signature(_short) == '(x: int, /, y: str = "a", *rest: int, call=tanh) -> None'
    lines = ["(", "    *,", "    record: _Record = _Record(),", "    module: nn.Module = ReLU(),"]
    assert builder.signature(_long) == "\n".join([*lines, "    names: tuple[str, ...] = ('a', 'b'),", ") -> None"])


def test_headings_that_differ_in_case_have_their_own_links() -> None:
    assert builder.anchors(["Fans", "fans", "gain"]) == {"Fans": "fans", "fans": "fans-1", "gain": "gain"}


def test_a_stale_page_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "FOLDER", tmp_path)
    for name, text in {"old.md": "gone", "kept.md": "same", "changed.md": "before"}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    pages = {tmp_path / name: text for name, text in {"kept.md": "same", "changed.md": "after", "new.md": "n"}.items()}
    assert [path.name for path in builder.stale(pages)] == ["changed.md", "new.md", "old.md"]
