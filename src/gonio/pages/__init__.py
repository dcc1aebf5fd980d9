"""Pages as one offline HTML file: the frame, style sheet and script that all share, the security policy; charts.

A package keeps its own templates in its folder `templates`; they extend `frame.html.j2` of this package. Every value
is escaped by Jinja, and goes through :func:`gonio.escaping.redact` first.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from gonio.escaping import plain, redact
from gonio.messages import Message, fixed, local, say, tag

if TYPE_CHECKING:
    from jinja2 import Environment


def render(package: str, template: str, *, whole: bool = True, **values: Any) -> str:
    """A template of a package with these values.

    Args:
        package: whose folder `templates` has the template, such as `"gonio.lab.showing"`.
        whole: one self-contained page; False: a part for a notebook, with its style and without the script.
    """
    made = environment(package).get_template(template).render(whole=whole, **values)
    # the outputs of a notebook lie in one document, so that each has ids of its own
    return made if whole else _ID.sub(rf"\g<1>g{next(_PARTS)}-", made)


_PARTS = itertools.count(1)
_ID = re.compile(r'(\s(?:id|for|aria-labelledby|aria-controls|aria-describedby)="|\shref="#)')


@cache
def environment(package: str) -> Environment:
    """Jinja with autoescape for the templates of a package and those that all pages share."""
    import jinja2  # only a page needs it
    from markupsafe import Markup

    def shown(value: object) -> object:
        value = local(value) if isinstance(value, Message) else value
        return value if isinstance(value, (Markup, int, float, jinja2.Undefined)) else redact(value)

    def breakable(path: str) -> Markup:
        """A path that breaks behind dots and slashes, and in titles and on narrow pages behind underscores too."""
        escaped = re.sub(r"(?<=[./])(?=\w)", "<wbr>", str(Markup.escape(redact(path))))
        return Markup(re.sub(r"(?<=_)(?=\w)", '<wbr class="low">', escaped))

    own = jinja2.PackageLoader("gonio.pages")
    made = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader(package), own]),
        autoescape=True,
        finalize=shown,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    # The package's own files, so they may stand in the page as they are.
    style, script = (own.get_source(made, name)[0] for name in ("style.css", "script.js"))
    made.globals.update(
        style=Markup(style), script=Markup(script), policy=_policy(style, script), plain=plain, breakable=breakable
    )
    made.globals.update(say=say, local=local, fixed=fixed, capitalised=_capitalised, language=tag, words=_words)
    return made


def made_by(versions: Mapping[str, str], *, command: str, date: str) -> tuple[tuple[Message, str], ...]:
    """How a page came about: titles and values; empty values are not shown."""
    used = " · ".join(map(" ".join, versions.items()))
    return (say("Date"), date), (say("Versions"), used), (say("Command"), command)


# What the script of a page shows, by the names that it uses.
_WORDS = {
    "placeholder": say("name, type or code"),
    "search": say("Search"),
    "type": say("Type of layer"),
    "kind": say("type"),
    "all": say("all types"),
    "rows": say("{} of {} rows"),
    "find": say("search"),
    "move": say("rows"),
    "open": say("open"),
    "hint": say("Point at a layer, or use the arrow keys; a click or Enter opens its row."),
    "layer": say("Layer"),
    "first": say("first layer"),
    "low": say("unusually low; usual {} to {}"),
    "high": say("unusually high; usual {} to {}"),
    "usual": say("usual, {} to {}"),
    "spread": say("std/mean {}: "),
    "error": say("error"),
    "warn": say("warn"),
    "info": say("info"),
}


def _capitalised(text: str) -> str:
    """A text in the language of the page, with a capital letter first."""
    said = local(text)
    return said[:1].upper() + said[1:]


def _words() -> str:
    """The words of the script in the language of the page, as JSON; empty for English, which the script has."""
    return "" if tag() == "en" else json.dumps({name: local(word) for name, word in _WORDS.items()}, ensure_ascii=False)


def _policy(style: str, script: str) -> str:
    """Nothing is loaded; only this style sheet applies and only this script runs. Charts need `style` attributes."""
    return (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src 'unsafe-inline'; "
        f"style-src-elem '{_digest(style)}'; base-uri 'none'; form-action 'none'"
    )


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
