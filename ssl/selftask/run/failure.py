"""Failure of a run, in a form that ranks exchange."""

from __future__ import annotations

import json


class Failure(Exception):
    """Cause of a failed run.

    Args:
        rank: Rank on which the failure happened.
        message: Description of the failure.
        details: Traceback or stacks, if any.
        lost: True if the rank was killed from outside or its machine is gone.
    """

    def __init__(self, rank: int, message: str, details: str = "", *, lost: bool = False) -> None:
        super().__init__(message)
        self.rank, self.message, self.details, self.lost = rank, message, details, lost
        self.rank0_hears = True  # if False, this rank reports the end of the run

    def to_json(self) -> str:
        names = ("rank", "message", "details", "lost")
        return json.dumps({name: getattr(self, name) for name in names})

    @classmethod
    def from_json(cls, text: str) -> Failure:
        return cls(**json.loads(text))
