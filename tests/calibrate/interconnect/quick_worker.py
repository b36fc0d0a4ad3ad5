"""The interconnect's worker with few rounds: every stage is run, nothing is measured well.

``python -m tests.calibrate.interconnect.quick_worker REQUEST RESULT FOLDER``, in place of the worker itself.
"""

from __future__ import annotations

import sys

from calibrate.host import reference
from calibrate.interconnect import collectives, worker
from calibrate.interconnect.wrappers import small_models

ROUNDS = 3


def lessen() -> None:
    """Lower the rounds; modules that take them from these are imported afterwards."""
    assert {collectives.CALL_ROUNDS, small_models.ROUNDS} == {25}, "they are called otherwise now"
    collectives.CALL_ROUNDS = small_models.ROUNDS = ROUNDS
    reference.RUNS, reference.LEAD_IN = 1, 0
    from calibrate.interconnect.wrappers import fsdp

    fsdp.LOOP_ROUNDS, fsdp.LOOP_WARM_UP = 1, 1


if __name__ == "__main__":
    lessen()
    worker.main(*sys.argv[1:])
