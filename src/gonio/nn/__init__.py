"""Layers that treat norm and angle of a product separately, or bound it, and norms with a mixture of statistics."""

from gonio.nn import angular, magnitude
from gonio.nn.layers import (
    DecoupledConv1d,
    DecoupledConv2d,
    DecoupledConv3d,
    DecoupledConvTranspose1d,
    DecoupledConvTranspose2d,
    DecoupledConvTranspose3d,
    DecoupledLinear,
)
from gonio.nn.norm_conversion import to_batch_norm, to_group_norm, to_instance_norm, to_layer_norm
from gonio.nn.operator import Operator
from gonio.nn.projection import project_weights_
from gonio.nn.qk_norm import QKNormLinear
from gonio.nn.switchable_norm import SwitchableNorm1d, SwitchableNorm2d, SwitchableNorm3d

__all__ = [
    "DecoupledConv1d",
    "DecoupledConv2d",
    "DecoupledConv3d",
    "DecoupledConvTranspose1d",
    "DecoupledConvTranspose2d",
    "DecoupledConvTranspose3d",
    "DecoupledLinear",
    "Operator",
    "QKNormLinear",
    "SwitchableNorm1d",
    "SwitchableNorm2d",
    "SwitchableNorm3d",
    "angular",
    "magnitude",
    "project_weights_",
    "to_batch_norm",
    "to_group_norm",
    "to_instance_norm",
    "to_layer_norm",
]
__dir__ = __all__.copy  # the public names alone
