"""Messages in the reader's language: English, or one that has a catalogue in this folder.

Code composes every message in English, as a :class:`Message`: a string that knows its template and the values in it.
Exports, comparisons and logs see the English string. What is shown to a person goes through :func:`local`, which looks
up the template in the catalogue (`zh.json`: English template to translated template). The language belongs to the
context (`contextvars`): another thread or task has its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextvars import ContextVar, Token
from functools import cache
from importlib import resources
from typing import Any

LANGUAGES: Mapping[str, str] = {"en": "en", "zh": "zh-Hans"}
"""Every language, and its tag in HTML."""
_WORD = re.compile(r"[A-Za-z]+(?![^{]*\})")  # outside of fields
_CURRENT: ContextVar[str] = ContextVar("gonio_language", default="en")


class Message(str):
    """An English text that can be shown in another language.

    Attributes:
        template: the key of the catalogue, with named fields; empty for parts that are joined.
        values: of the fields; those that are messages are translated too, other strings are not.
    """

    template: str
    values: Mapping[str, Any]

    def __new__(cls, text: str, template: str = "", values: Mapping[str, Any] | None = None) -> Message:
        made = super().__new__(cls, text)
        made.template, made.values = template, values or {}
        return made

    def __getnewargs__(self) -> tuple[str, str, Mapping[str, Any]]:  # type: ignore[override]
        return str(self), self.template, self.values


def say(template: str, /, **values: Any) -> Message:
    """A message of a template, whose fields are those of :meth:`str.format`.

    The template has to be a literal: a test reads every one from the source and looks it up in the catalogues. A field
    that only English grammar needs (`are`, `have`, `s`) may be left out of a translation.

    Example:
        >>> from gonio.messages import local, say
        >>> found = say("{zeros} of {total} filters {are} 0", zeros=2, total=8, are="are")
        >>> found == "2 of 8 filters are 0", local(found)
        (True, '2 of 8 filters are 0')
    """
    return Message(template.format(**values) if values else template, template, values)


def fixed(text: str) -> Message:
    """A text without fields as a message; a message as it is."""
    return text if isinstance(text, Message) else Message(str(text), str(text))


def said_by(error: Exception) -> Message:
    """What an exception says, as the message that it was made of where there is one."""
    first = error.args[0] if error.args else ""
    return first if isinstance(first, Message) else Message(str(error))


def counted(number: int, noun: str) -> Message:
    """A number and its noun, which agree.

    Example:
        >>> from gonio.messages import counted
        >>> counted(1, "layer"), counted(2_000, "layer")
        ('1 layer', '2,000 layers')
    """
    return Message(f"{number:,} {noun}{'' if number == 1 else 's'}", f"{{n:,}} {noun}", {"n": number})


def are(number: int) -> str:
    """The verb of a number of things: `is` for 1."""
    return "is" if number == 1 else "are"


def recognised(text: str, templates: Sequence[str]) -> Message:
    """A text of another package as a message of the first of these templates that it has; without one as it is.

    A field `message` is recognised in the same way; other fields are taken as they are.

    Example:
        >>> from gonio.messages import recognised
        >>> recognised("No such option: --x", ["Missing {name}.", "No such option: {name}"]).values
        {'name': '--x'}
    """
    for template in templates:
        pattern = re.sub(r"\\{(\w+)\\}", r"(?P<\1>.+)", re.escape(template))
        if found := re.fullmatch(pattern, text, re.DOTALL):
            parts = found.groupdict()
            values = {name: recognised(part, templates) if name == "message" else part for name, part in parts.items()}
            return Message(text, template, values)
    return Message(text)


def joined(parts: Sequence[str], by: str = ", ", last: str | None = None) -> Message:
    """Parts as one message, each in the language of the reader; `last`: what stands before the last one.

    Example:
        >>> from gonio.messages import joined
        >>> joined(["a", "b", "c"], last=" and ")
        'a, b and c'
    """
    return Message(_join(parts, by, last), "", {"parts": tuple(parts), "by": by, "last": last})


def _join(parts: Sequence[str], by: str, last: str | None) -> str:
    if last is None or len(parts) < 2:
        return by.join(parts)
    return f"{by.join(parts[:-1])}{last}{parts[-1]}"


def local(text: str) -> str:
    """A text in the language of the context; in English where its catalogue lacks it.

    Args:
        text: a message, or a fixed text of the catalogue.
    """
    catalogue = _catalogue(_CURRENT.get())
    if not catalogue:
        return str(text)
    return _translated(text, catalogue) if isinstance(text, Message) else catalogue.get(text, text)


def _translated(message: Message, catalogue: Mapping[str, str]) -> str:
    values = {
        name: _translated(value, catalogue) if isinstance(value, Message) else value
        for name, value in message.values.items()
    }
    if message.template:
        template = catalogue.get(message.template, None if _WORD.search(message.template) else message.template)
        if template is None:
            return str(message)
        return template.format(**values) if values else template
    if not values:
        return str(message)
    parts = [_translated(part, catalogue) if isinstance(part, Message) else part for part in values["parts"]]
    by, last = (None if each is None else catalogue.get(each, each) for each in (values["by"], values["last"]))
    return _join(parts, by or "", last)


@cache
def _catalogue(name: str) -> Mapping[str, str]:
    """The translations of a language by English template; empty for English."""
    if name == "en":
        return {}
    text = (resources.files("gonio.messages") / f"{name}.json").read_text(encoding="utf-8")
    content: dict[str, str] = json.loads(text)
    return content


def tag() -> str:
    """The tag of the language of the context, for the attribute `lang` of a page."""
    return LANGUAGES[_CURRENT.get()]


def speak(name: str) -> Token[str]:
    """Set the language of the context; `silence` with the token sets it back."""
    return _CURRENT.set(name)


def silence(token: Token[str]) -> None:
    """Set back what :func:`speak` changed."""
    _CURRENT.reset(token)
