"""Random numbers as pure functions of their keys; there is no generator state to save.

The algorithms are in ``splitmix`` and ``philox``. They are used by ``views`` (augmentation),
``keyed`` (draws of methods and of dropout, on the device) and ``permutation`` (sample order).
``process_state`` saves and restores the global generators of Python, NumPy and torch.
"""
