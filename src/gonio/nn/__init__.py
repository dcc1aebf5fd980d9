"""Layers that treat the norm and the angle of a product separately, and norms that learn what to average over."""

from __future__ import annotations

from gonio.nn import angular, magnitude
from gonio.nn.decoupled_conv import DecoupledConv2d
from gonio.nn.decoupled_linear import DecoupledLinear
from gonio.nn.switchable_norm import SwitchableNorm2d

__all__ = ["DecoupledConv2d", "DecoupledLinear", "SwitchableNorm2d", "angular", "magnitude"]
