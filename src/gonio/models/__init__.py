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

__all__ = [
    "BUILT_IN",
    "ByteTransformer",
    "ModelFactory",
    "byte_transformer",
    "deep_cnn",
    "deep_mlp",
    "digits_cnn",
    "plain_cnn9",
    "pointnet",
    "residual_mlp",
    "resnet20",
    "resolve",
]
__dir__ = __all__.copy  # the public names alone
