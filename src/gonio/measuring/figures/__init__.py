"""Figures of one tensor, of a batch on its way through a model, and of a model's graph, from `gonio.geometry`."""
