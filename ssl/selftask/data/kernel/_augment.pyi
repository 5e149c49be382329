from collections.abc import Sequence

import numpy as np

def run(
    image: np.ndarray, program: Sequence[float] | np.ndarray, out: np.ndarray, variant: str = ..., /
) -> None: ...
def variants() -> tuple[str, ...]: ...
