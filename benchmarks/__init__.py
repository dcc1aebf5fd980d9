"""Speed and memory of the library, each figure a ratio to a floor measured in the same round.

`python -m benchmarks` runs every topic and writes `benchmarks/results/TOPIC.json`; `python -m
benchmarks.tables` writes the tables of README and docs from those files.
"""
