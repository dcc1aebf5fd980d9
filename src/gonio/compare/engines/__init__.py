"""Engines compute the runs of a comparison: in processes of this machine, or on an already running Ray cluster."""

from gonio.compare.engines.local import Devices, Engine, Future, Local, NodeLost, default_jobs
from gonio.compare.engines.ray import Ray

__all__ = ["Devices", "Engine", "Future", "Local", "NodeLost", "Ray", "default_jobs"]
__dir__ = __all__.copy  # the public names alone
