"""Random numbers as pure functions of their keys, which need no generator state.

The algorithms are in ``splitmix`` and ``philox``. They are used by ``views`` (augmentation),
``keyed`` (draws of methods and of dropout) and ``permutation`` (sample order). Code that draws from
the global generators of Python, NumPy and torch is covered by ``process_state``, which saves and
restores their states.
"""
