"""Models by name: built-in ones, those of timm and torchvision, and the user's own."""

from __future__ import annotations

from gonio.models.byte_transformer import ByteTransformer, byte_transformer
from gonio.models.digits_cnn import digits_cnn
from gonio.models.pointnet import pointnet
from gonio.models.resolve import BUILT_IN, ModelFactory, resolve

__all__ = ["BUILT_IN", "ByteTransformer", "ModelFactory", "byte_transformer", "digits_cnn", "pointnet", "resolve"]
