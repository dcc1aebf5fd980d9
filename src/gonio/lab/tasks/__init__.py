"""Tasks by name: built-in ones, images on this machine, and the user's own."""

from gonio.lab.tasks.built_in import BUILT_IN, bytes_, digits, points, resolve
from gonio.lab.tasks.generative import digits_gan, digits_vae
from gonio.lab.tasks.images import fashion_mnist, image_folder, torchvision_dataset
from gonio.lab.tasks.metric import ACCURACY, Metric, accuracy

__all__ = [
    "ACCURACY",
    "BUILT_IN",
    "Metric",
    "accuracy",
    "bytes_",
    "digits",
    "digits_gan",
    "digits_vae",
    "fashion_mnist",
    "image_folder",
    "points",
    "resolve",
    "torchvision_dataset",
]
__dir__ = __all__.copy  # the public names alone
