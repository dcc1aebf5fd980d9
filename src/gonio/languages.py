"""The language of what is shown: printed results, explanations, pages and errors of the command line.

Exports (JSON, CSV, Markdown, LaTeX) and exceptions stay English, because programs read them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

from gonio.errors import UnknownNameError
from gonio.messages import LANGUAGES, silence, speak

__all__ = ["language"]
__dir__ = __all__.copy  # the public names alone

Language = Literal["en", "zh"]


def language_of(environment: Mapping[str, str]) -> Language:
    """The language that the variables LC_ALL, LC_MESSAGES and LANG ask for, the first one that is set.

    Example:
        >>> from gonio.languages import language_of
        >>> language_of({"LANG": "zh_CN.UTF-8"}), language_of({"LC_ALL": "C", "LANG": "zh_CN.UTF-8"})
        ('zh', 'en')
    """
    words = next(filter(None, (environment.get(name) for name in ("LC_ALL", "LC_MESSAGES", "LANG"))), "")
    return "zh" if words.lower().replace("-", "_").partition("_")[0].partition(".")[0] == "zh" else "en"


@contextmanager
def language(name: Language) -> Iterator[None]:
    """Inside, printed results, explanations and pages are in this language; exports and exceptions stay English.

    It holds for the current thread or task.

    Args:
        name: `en`, or `zh` for Chinese.

    Raises:
        UnknownNameError: for another language.

    Example:
        >>> with gonio.language("zh"):
        ...     print(gonio.measuring.explain("G001").splitlines()[0])
        G001（错误）：值为 NaN 或无穷大
    """
    if name not in LANGUAGES:
        raise UnknownNameError("language", str(name), LANGUAGES)
    token = speak(name)
    try:
        yield
    finally:
        silence(token)
