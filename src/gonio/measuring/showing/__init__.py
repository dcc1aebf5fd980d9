"""Measurements and differences on a terminal, as a page, and as CSV, markdown and data frames."""
