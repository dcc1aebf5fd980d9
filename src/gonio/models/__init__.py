"""Models by name: built-in models, models of timm, torchvision and transformers, and the user's own."""

from gonio.models.built_in import (
    BUILT_IN,
    ByteTransformer,
    byte_transformer,
    deep_cnn,
    deep_mlp,
    digits_cnn,
    plain_cnn9,
    pointnet,
    residual_mlp,
    resnet20,
)
from gonio.models.by_name import ModelFactory, resolve
from gonio.models.generative import byte_gru, digits_gan, digits_vae

__all__ = [
    "BUILT_IN",
    "ByteTransformer",
    "ModelFactory",
    "byte_gru",
    "byte_transformer",
    "deep_cnn",
    "deep_mlp",
    "digits_cnn",
    "digits_gan",
    "digits_vae",
    "plain_cnn9",
    "pointnet",
    "residual_mlp",
    "resnet20",
    "resolve",
]
__dir__ = __all__.copy  # the public names alone
