"""Where a comparison's runs are computed: in processes of this machine, or on a cluster that exists."""

from __future__ import annotations

from gonio.compare.engines.engine import Engine, Job, NodeLost
from gonio.compare.engines.local import Local, default_jobs

__all__ = ["Engine", "Job", "Local", "NodeLost", "default_jobs"]
