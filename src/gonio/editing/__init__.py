"""What every verb that changes a model uses: the selection of modules, and changes that are recorded and undone.

:mod:`gonio.surgery` exports the public names.
"""
