"""Tasks by name: built-in ones, images on this machine, and the user's own."""

from gonio.compare.tasks.built_in import bytes_, digits, points
from gonio.compare.tasks.images import fashion_mnist, image_folder, torchvision_dataset
from gonio.compare.tasks.task import BUILT_IN, SOURCES, resolve

__all__ = ["BUILT_IN", "bytes_", "digits", "fashion_mnist", "image_folder", "points", "resolve", "torchvision_dataset"]

BUILT_IN.update({"bytes": bytes_, "digits": digits, "points": points})
SOURCES.update({
    "fashion-mnist:FOLDER": fashion_mnist,
    "torchvision:NAME:FOLDER": torchvision_dataset,
    "imagefolder:FOLDER": image_folder,
})  # fmt: skip
__dir__ = __all__.copy  # the public names alone
