"""The cause of a run's end, in the form that ranks exchange."""

from __future__ import annotations

import json


class Failure(Exception):
    """Cause of the run's end, as reported by the rank on which it happened.

    ``lost``: the rank was killed from outside, or its machine is gone; the run is not to blame.
    """

    def __init__(self, rank: int, message: str, details: str = "", *, lost: bool = False) -> None:
        super().__init__(message)
        self.rank, self.message, self.details, self.lost = rank, message, details, lost
        self.rank0_hears = True  # else this rank has to write the end of the run

    def to_json(self) -> str:
        names = ("rank", "message", "details", "lost")
        return json.dumps({name: getattr(self, name) for name in names})

    @classmethod
    def from_json(cls, text: str) -> Failure:
        return cls(**json.loads(text))
