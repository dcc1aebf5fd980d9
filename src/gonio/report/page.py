"""The results as one HTML file that needs no network, no script and no other file."""

from __future__ import annotations

import os
import tempfile
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from gonio.compare.results import Results
from gonio.errors import MissingExtraError
from gonio.escaping import plain, redact
from gonio.report.contents import page_of

if TYPE_CHECKING:
    from jinja2 import Environment

__all__ = ["html", "write_html"]


def html(results: Results) -> str:
    """The comparison as one self-contained page.

    The verdict first, then effects, costs, learning curves, what became of each layer, what each recipe
    did, and everything that is needed to repeat the study. The page holds no script, loads nothing (a
    content security policy says so to the browser) and follows the reader's light or dark setting. The same
    results give the same bytes.

    Names, errors and notes come from other people's files: control and bidirectional characters are
    stripped, home directories and credentials in URLs left out, and everything escaped, in one place.

    Raises:
        MissingExtraError: if matplotlib or jinja2 is not installed.

    Example:
        >>> page = gonio.report.html(gonio.report.example())
        >>> "decoupled-tanh helps" in page, "<script" in page, len(page) < 200_000
        (True, False, True)
    """
    template = environment().get_template("page.html.j2")
    return template.render(page=page_of(results))


def write_html(results: Results, path: str | os.PathLike[str]) -> Path:
    """The page of :func:`html` as a file; a reader sees the old file or the new one, never half of it.

    Returns:
        The path.

    Example:
        >>> import tempfile, pathlib
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> gonio.report.write_html(gonio.report.example(), folder / "page.html").name
        'page.html'
        >>> [path.name for path in folder.iterdir()]
        ['page.html']
    """
    return write_text(html(results), path)


def write_text(content: str, path: str | os.PathLike[str]) -> Path:
    """Write `content` beside `path` and move it there when it is safely on disk."""
    target = Path(path)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name[:80]}.", suffix=".part", dir=target.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="\n") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return target


def _umask() -> int:
    """The process's file mode mask, which mkstemp ignores. Reading it takes setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


@cache
def environment() -> Environment:
    """Autoescape on, and every value goes through :func:`redact` first: the one place for escaping."""
    try:
        import jinja2
        from markupsafe import Markup
    except ImportError as error:
        raise MissingExtraError("The report page", "jinja2", "lab") from error

    def shown(value: object) -> object:
        return value if isinstance(value, (Markup, int, jinja2.Undefined)) else redact(value)

    folder = resources.files("gonio.report") / "templates"
    made = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: (folder / name).read_text(encoding="utf-8")),
        autoescape=True,
        finalize=shown,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.globals["key"] = color_key
    return made


def color_key(color: str, *, dotted: bool = False) -> object:
    """The small line that says which colour a recipe has; it is decoration, the name stands beside it."""
    from markupsafe import Markup

    dash = Markup(' stroke-dasharray="2 2"') if dotted else ""
    return Markup(
        '<svg class="key" viewBox="0 0 24 10" aria-hidden="true"><line x1="1" y1="5" x2="23" y2="5" '
        'stroke="var(--{})" stroke-width="{}"{}/></svg>'
    ).format(plain(color), "2" if dotted else "4.5", dash)
