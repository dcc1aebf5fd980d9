"""Engines compute the runs of a comparison: in processes of this machine, or on an already running Ray cluster."""

from gonio.lab.running.engines.local import Devices, Engine, Future, Local, NodeLost, default_jobs
from gonio.lab.running.engines.ray import Ray

__all__ = ["Devices", "Engine", "Future", "Local", "NodeLost", "Ray", "default_jobs"]
__dir__ = __all__.copy  # the public names alone
