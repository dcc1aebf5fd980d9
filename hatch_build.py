"""The published metadata: addresses of the project, and the README with absolute links and badges, for a package index.

The address is set in one place, `[tool.hatch.metadata.hooks.custom] repository` of pyproject.toml; the variable
GONIO_REPOSITORY, which the release workflow sets to the repository that it runs in, takes its place. Without either the
links stay as they are and no address is published.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?![a-z]+:|#)([^)\s]+)\)")
PICTURE = re.compile(r'(<(?:img|source)\b[^>]*?\b(?:src|srcset)=")(?![a-z]+:)([^"\s]+)"')
VERSION = re.compile(r'^__version__ = "([^"]+)"', flags=re.M)


def absolute(text: str, repository: str, tag: str) -> str:
    """A page at the root of the repository with its links as addresses of that tag; images as the files themselves."""

    def address(found: re.Match[str]) -> str:
        image, words, target = found.groups()
        return f"{image}[{words}]({repository}/{'raw' if image else 'blob'}/{tag}/{target})"

    text = LINK.sub(address, text)
    return PICTURE.sub(lambda found: f'{found[1]}{repository}/raw/{tag}/{found[2]}"', text)


def with_badges(text: str, repository: str) -> str:
    """A page with the states of its workflows below its title, from the repository's own address.

    The README itself has none: without an address a badge is a broken picture.
    """
    title, _, rest = text.partition("\n")
    names = {"Tests": "tests", "Weekly": "weekly"}  # the titles and the files of the workflows
    flows = {name: f"{repository}/actions/workflows/{file}.yml" for name, file in names.items()}
    return f"{title}\n\n{' '.join(f'[![{name}]({flow}/badge.svg)]({flow})' for name, flow in flows.items())}\n{rest}"


def urls(repository: str, tag: str) -> dict[str, str]:
    return {
        "Repository": repository,
        "Documentation": f"{repository}/blob/{tag}/docs/index.md",
        "Changelog": f"{repository}/blob/{tag}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }


class CustomMetadataHook(MetadataHookInterface):
    """Sets `readme` and `urls`, which pyproject.toml declares as dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        root = Path(self.root)
        text = (root / "README.md").read_text(encoding="utf-8")
        version = VERSION.search((root / "src" / "gonio" / "__init__.py").read_text(encoding="utf-8"))
        if version is None:
            raise ValueError('src/gonio/__init__.py has no line __version__ = "…"')
        repository = (os.environ.get("GONIO_REPOSITORY") or self.config.get("repository", "")).rstrip("/")
        if repository:
            text = with_badges(absolute(text, repository, f"v{version[1]}"), repository)
            metadata["urls"] = urls(repository, f"v{version[1]}")
        else:
            metadata["urls"] = {}
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
