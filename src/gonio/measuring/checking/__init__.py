"""`check`: whether a checkpoint is intact, and what it holds, in one pass over its bytes."""
