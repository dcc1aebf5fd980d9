"""The site: `make site` builds it from these pages, the notebooks and the docstrings, without a network."""

from __future__ import annotations

import json
import os
import re
import sys
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.search.en import SearchEnglish
from sphinx.writers.html5 import HTML5Translator

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER))

import reference_pages  # noqa: E402

project, author, copyright = "gonio", "The authors of gonio", "2026, the authors of gonio"
release = version = installed_version("gonio")

exclude_patterns = ["examples/*.ipynb"]  # for Colab; offered as a file
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
html_theme, html_title, html_math_renderer = "furo", f"gonio {release}", "mathml"
html_extra_path, html_static_path, templates_path = ["llms.txt", "schemas"], ["_static"], ["_templates"]
html_css_files, html_js_files = ["site.css"], ["tables.js", "versions.js", "scrolling.js"]

myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 4
nb_execution_mode, nb_execution_raise_on_error, nb_execution_timeout = "cache", True, 300
nb_execution_in_temp = True  # notebooks write files
suppress_warnings = ["myst-nb.lexer"]  # cells that are not executed (NOTEBOOKS=off) have no language

autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 90
napoleon_numpy_docstring = False
napoleon_custom_sections = ["Shape", "Invariances", "Cost", "Folding", "Differs", "Source"]


def write_reference(app: Sphinx) -> None:
    """Write the pages of the reference; one that did not change is left, as Sphinx reads what is newer."""
    folder = FOLDER / "reference"
    folder.mkdir(exist_ok=True)
    written = {folder / f"{name}.md": text for name, text in reference_pages.pages().items()}
    for old in set(folder.glob("*.md")) - written.keys():
        old.unlink()
    for page, text in written.items():
        if not page.exists() or page.read_text(encoding="utf-8") != text:
            page.write_text(text, encoding="utf-8")


SECTION = re.compile(r"^(Shape|Invariances|Cost|Folding|Differs|Returns|Raises|Source|References|See also|Note): (.+)")
RAISED = re.compile(r"^(\w*Error) ((?:if|for|as|where|without|of|later)\b)")
MARKUP = re.compile(r"(?<![*`\\])\*(?=[a-z])|\|(?=[\w −]+\|)|(?<=\w)\|(?![\w|])|(?<=[a-z])_(?=…)")


def sections_on_one_line(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Docstrings may have a short section on the line of its name, and `*` and `|` as plain characters."""
    made: list[str] = []
    inside = False  # such a section, whose next lines may be as far left as its name
    for line in lines:
        found = SECTION.match(line)
        if found:
            text = RAISED.sub(r"\1: \2", found[2]) if found[1] == "Raises" else found[2]
            made += ["", f"{found[1]}:", f"    {text}"]
        else:
            made.append(f"    {line}" if inside and line.strip() and not line.startswith(" ") else line)
        inside = bool(found) or (inside and bool(line.strip()))
    code = False
    for i, line in enumerate(made):
        code = line.lstrip().startswith((">>>", "...")) or (code and bool(line.strip()))
        if not code and "`" not in line:
            made[i] = MARKUP.sub(lambda m: f"\\{m[0]}", line)
    lines[:] = made


def inline_math(self: HTML5Translator, node: nodes.math) -> None:
    self.body.append(convert(node.astext()))
    raise nodes.SkipNode


def display_math(self: HTML5Translator, node: nodes.math_block) -> None:
    self.body.append(f'<div class="math">{convert(node.astext(), display="block")}</div>')
    raise nodes.SkipNode


# What axe-core finds in the pages of the theme, and in tables whose first column has no title.
UNNAMED = (
    (r'role="heading"(?! aria-level)', 'role="heading" aria-level="2"'),
    (r'<aside class="sidebar-drawer', '<aside aria-label="{pages}" class="sidebar-drawer'),
    (r'<aside class="toc-drawer', '<aside aria-label="{headings}" class="toc-drawer'),
    (r'<div class="content-icon-container"', '<div role="region" aria-label="{tools}" class="content-icon-container"'),
    (r'<th class="head"><p>\s*</p></th>|<th class="head">\s*</th>', "<td></td>"),
    (r'(<div id="search-results">)', r"<h1>Search</h1>\1"),
)
TITLE = re.compile(r"<h1>([\w.]+)<")  # of a page of the reference: a long name, which breaks between its words
# The parameters of a long signature: a list of definitions without a word that is defined.
PARAMETERS = re.compile(r'<dl>\s*((?:<dd><em class="sig-param">.*?</dd>\s*)+)</dl>', re.DOTALL)
LABELS = {
    "en": {"pages": "All pages", "headings": "Headings of this page", "tools": "Source and colours"},
    "zh": {"pages": "所有页面", "headings": "本页标题", "tools": "源文件与颜色"},
}


def accessible(html: str, language: str) -> str:
    """A page of the theme with the names and levels that screen readers need."""
    for found, named in UNNAMED:
        html = re.sub(found, named.format_map(LABELS[language]), html)
    html = TITLE.sub(lambda m: f"<h1>{re.sub(r'(?<=[.])(?=[A-Za-z])|(?<=[a-z])(?=[A-Z])', '<wbr>', m[1])}<", html)
    return PARAMETERS.sub(lambda m: m[1].replace("<dd>", '<div class="parameter">').replace("</dd>", "</div>"), html)


def name_parts(app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: object) -> None:
    """Give the template `accessible`, and a Chinese page its language."""
    chinese = pagename.startswith("zh/")
    context["accessible"] = lambda html: accessible(html, "zh" if chinese else "en")
    if chinese:
        context["language"] = "zh-CN"


TREES: dict[tuple[str, str], str] = {}


def one_sidebar(app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: object) -> None:
    """Draw the sidebar of pages that are not in it once per folder: there are many, and it takes 0.1 s for each."""
    if "toctree" in context and "orphan" in app.env.metadata.get(pagename, {"orphan": ""}):
        folder, tree = pagename.rpartition("/")[0], context["toctree"]

        def drawn(**options: Any) -> str:
            key = folder, repr(options)
            if key not in TREES:
                TREES[key] = tree(**options)
            return TREES[key]

        context["toctree"] = drawn


class SearchWords(SearchEnglish):
    """English words; of Chinese, which has no spaces between words, every two neighbouring characters."""

    js_splitter_code = r"""
var splitQuery = (query) =>
  (query.match(/[\u4e00-\u9fff]+|(?:(?![\u4e00-\u9fff])[\p{L}\p{N}_])+/gu) ?? []).flatMap((word) =>
    /[\u4e00-\u9fff]/.test(word) && word.length > 1
      ? Array.from({ length: word.length - 1 }, (_, i) => word.slice(i, i + 2))
      : [word]);
"""

    def split(self, input: str) -> list[str]:
        """The words of the index; `js_splitter_code` splits what a reader types in the same way."""
        found = re.findall(r"[\u4e00-\u9fff]+|[^\W\u4e00-\u9fff]+", input)
        return [part for word in found for part in (pairs(word) if "\u4e00" <= word[0] <= "\u9fff" else [word])]


def pairs(word: str) -> list[str]:
    return [word[i : i + 2] for i in range(max(len(word) - 1, 1))]


def versions(released: str, earlier: str) -> list[dict[str, str]]:
    """The versions that have a site, this one first, each with the address of its site from this one's folder.

    Args:
        earlier: the `versions.json` of the site that is published; empty if there is none.
    """
    others = [{"version": str(one["version"]), "url": str(one["url"])} for one in json.loads(earlier or "[]")]
    return [{"version": released, "url": "./"}, *(one for one in others if one["version"] != released)]


def write_versions(app: Sphinx, exception: Exception | None) -> None:
    """Write `versions.json`, which the switch of versions reads where the site is served."""
    if exception is None and app.builder.format == "html":
        text = json.dumps(SITES, ensure_ascii=False, indent=1)
        (Path(app.outdir) / "versions.json").write_text(f"{text}\n", encoding="utf-8")


# VERSIONS names the list of the published site, whose addresses are from the folder of the new one, e.g. `../0.1.0/`.
SITES = versions(release, Path(os.environ["VERSIONS"]).read_text("utf-8") if os.environ.get("VERSIONS") else "")


def setup(app: Sphinx) -> None:
    """Search in two languages, pages for screen readers; MathML, which browsers show offline and without a script."""
    app.add_js_file(None, body=f"window.gonioVersions = {json.dumps(SITES)};")
    app.connect("build-finished", write_versions)
    app.add_search_language(SearchWords)  # of the whole site, whose language is English
    app.add_html_math_renderer("mathml", (inline_math, None), (display_math, None))
    app.connect("builder-inited", write_reference)
    app.connect("html-page-context", name_parts)
    app.connect("html-page-context", one_sidebar, priority=400)  # before the theme
    app.connect("autodoc-process-docstring", sections_on_one_line, priority=400)  # before napoleon
