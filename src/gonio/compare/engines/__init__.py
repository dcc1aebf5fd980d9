"""Where a comparison's runs are computed: in processes of this machine, or on a cluster that exists."""

from __future__ import annotations

from gonio.compare.engines.engine import Engine, Job, NodeLost
from gonio.compare.engines.local import Local, default_jobs
from gonio.compare.engines.ray_cluster import Ray

__all__ = ["Engine", "Job", "Local", "NodeLost", "Ray", "default_jobs"]
