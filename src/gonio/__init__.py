"""Measure and control the norms and angles of neural-network weights."""

__version__ = "0.1.0"
