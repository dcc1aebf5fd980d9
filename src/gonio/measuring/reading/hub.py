"""Names of models on a hub: found in the cache of this machine, and never downloaded."""

from __future__ import annotations

import os
import re
from pathlib import Path

from gonio.escaping import redact
from gonio.messages import Message, say

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")  # `name` or `org/name`
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/+([^/]+)/(.*)", re.DOTALL)  # pathlib makes one slash of two
_HOSTS = ("huggingface.co", "hf.co")
_COMMIT = re.compile(r"[0-9a-f]{1,64}")


def is_address(word: str) -> bool:
    """Whether a word is the address of something elsewhere, such as `https://huggingface.co/gpt2`.

    Example:
        >>> from gonio.measuring.reading.hub import is_address
        >>> is_address("https://huggingface.co/gpt2"), is_address("C:/models/gpt2.pt"), is_address("gpt2")
        (True, False, False)
    """
    return _ADDRESS.fullmatch(word) is not None


def name_on_hub(word: str) -> str | None:
    """The name, `name` or `org/name`, of the model that a word or an address of a hub's page may stand for.

    Example:
        >>> from gonio.measuring.reading.hub import name_on_hub
        >>> name_on_hub("https://huggingface.co/org/model/tree/main"), name_on_hub("gpt2"), name_on_hub("../gpt2")
        ('org/model', 'gpt2', None)
    """
    if address := _ADDRESS.fullmatch(word):
        if address[1] not in _HOSTS:
            return None
        parts = re.split(r"[?#]", address[2])[0].strip("/").split("/")
        word = "/".join(parts[: 1 if parts[1:2] in (["tree"], ["blob"], ["resolve"]) else 2])
    return word if _NAME.fullmatch(word) else None


def cache() -> Path:
    """The folder in which the hub's own programs keep what they download: HF_HUB_CACHE, or `hub` in HF_HOME."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or home / "hub")


def snapshot(word: str) -> Path | None:
    """The folder of a model in the cache; None if the word names none, or none that is there."""
    name = name_on_hub(word)
    if name is None:
        return None
    folder = cache() / f"models--{name.replace('/', '--')}"
    named = folder / "refs" / "main"
    if not named.is_file():
        return None
    commit = named.read_text(encoding="utf-8").strip()
    found = folder / "snapshots" / commit
    return found if _COMMIT.fullmatch(commit) and found.is_dir() else None


def how_to_fetch(word: str) -> Message:
    """What to do about a name that is not in the cache."""
    name = name_on_hub(word)
    if name is None:
        return say("Nothing is downloaded: fetch the file first, and give its path on this machine.")
    return say(
        "Nothing is downloaded: give a folder or a file of its weights on this machine. A model of a hub is looked for "
        "in {folder} (HF_HOME, HF_HUB_CACHE), where `hf download {name}` puts it.",
        folder=redact(cache()),
        name=name,
    )
