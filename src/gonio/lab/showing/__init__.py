"""A comparison's results as one self-contained page, a terminal table, JSON, CSV, markdown or LaTeX."""

from gonio.lab.showing.example import example
from gonio.lab.showing.exports import to_csv, to_json, to_latex, to_markdown
from gonio.lab.showing.page import html, write_html
from gonio.lab.showing.tables import text

__all__ = ["example", "html", "text", "to_csv", "to_json", "to_latex", "to_markdown", "write_html"]
FORMATS = {"html": html, "json": to_json, "csv": to_csv, "md": to_markdown, "tex": to_latex}
__dir__ = __all__.copy  # the public names alone
