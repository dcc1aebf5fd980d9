"""Layers that treat the norm and the angle of a product separately, and norms that learn what to average over."""

from __future__ import annotations

from gonio.nn import angular, magnitude
from gonio.nn.blending import Blending, convert_gradually_
from gonio.nn.decoupled_conv import DecoupledConv1d, DecoupledConv2d, DecoupledConv3d
from gonio.nn.decoupled_conv_transpose import (
    DecoupledConvTranspose1d,
    DecoupledConvTranspose2d,
    DecoupledConvTranspose3d,
)
from gonio.nn.decoupled_linear import DecoupledLinear
from gonio.nn.norm_conversion import to_batch_norm, to_group_norm, to_instance_norm, to_layer_norm
from gonio.nn.projection import Projection, project_weights_
from gonio.nn.switchable_norm import SwitchableNorm1d, SwitchableNorm2d, SwitchableNorm3d

__all__ = [
    "Blending",
    "DecoupledConv1d",
    "DecoupledConv2d",
    "DecoupledConv3d",
    "DecoupledConvTranspose1d",
    "DecoupledConvTranspose2d",
    "DecoupledConvTranspose3d",
    "DecoupledLinear",
    "Projection",
    "SwitchableNorm1d",
    "SwitchableNorm2d",
    "SwitchableNorm3d",
    "angular",
    "convert_gradually_",
    "magnitude",
    "project_weights_",
    "to_batch_norm",
    "to_group_norm",
    "to_instance_norm",
    "to_layer_norm",
]
