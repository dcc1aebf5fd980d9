"""Planning a comparison: the plan, the checks before the first run, and the dry run."""
