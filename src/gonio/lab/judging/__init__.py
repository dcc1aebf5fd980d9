"""Statistics, verdicts, costs and robustness: from stored runs to results."""
