"""Tasks by name: built-in ones, images on this machine, and the user's own."""

from __future__ import annotations

from gonio.compare.tasks.bytes import bytes_
from gonio.compare.tasks.digits import digits
from gonio.compare.tasks.images import image_folder, torchvision_dataset
from gonio.compare.tasks.points import points
from gonio.compare.tasks.resolve import BUILT_IN, resolve

__all__ = ["BUILT_IN", "bytes_", "digits", "image_folder", "points", "resolve", "torchvision_dataset"]


def __dir__() -> list[str]:
    return sorted(__all__)
