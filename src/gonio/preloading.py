"""Imported by the server of :mod:`gonio.fork_server` alone, which forks its processes with what is imported here.

Imports make a million objects that stay. The garbage collector would go through them again and again, which takes a
third of the time; afterwards it passes over them, also in the forked processes.
"""

import gc
from contextlib import suppress
from importlib import import_module

gc.disable()
# torch.optim imports torch._dynamo when the first optimizer is made.
for _name in ("torch", "torch._dynamo", "torch.optim", "sklearn.datasets", "gonio.compare"):
    with suppress(ImportError):  # a process that needs it says so
        import_module(_name)
gc.freeze()
gc.enable()
