"""`check`: whether a checkpoint is intact, and what it holds, reading no tensor more often than its format asks."""
