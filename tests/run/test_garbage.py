"""When Python looks for unreachable cycles: seldom in a command, as usual in training."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

import tiny
from selftask.distributed.garbage import seldom_collected, usually_collected

USUAL = gc.get_threshold()


def test_seldom_in_a_command_and_usually_in_its_training() -> None:
    with seldom_collected():
        assert gc.get_threshold()[0] > 10 * USUAL[0]
        with usually_collected():
            assert gc.get_threshold() == USUAL
            assert gc.get_freeze_count() > 0
        assert gc.get_freeze_count() == 0
        assert gc.get_threshold()[0] > 10 * USUAL[0]
    assert gc.get_threshold() == USUAL


def test_after_an_error_all_is_as_before() -> None:
    with pytest.raises(ValueError, match="ours"), seldom_collected(), usually_collected():
        raise ValueError("ours")
    assert gc.get_threshold() == USUAL
    assert gc.get_freeze_count() == 0


@pytest.mark.slow
@pytest.mark.parametrize(("reader", "code"), [("cat", 0), ("true", 1)])
def test_a_command_that_leaves_at_once_says_all(reader: str, code: int) -> None:
    plan = f"{sys.executable} -m selftask plan simclr/digits"
    piped = f"set -o pipefail; {plan} | {reader}"
    done = subprocess.run(
        ["bash", "-c", piped], env=tiny.environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == code
    assert not done.stderr
    if reader == "cat":
        assert done.stdout.startswith("plan of simclr/digits")
        assert done.stdout.endswith("\n")
