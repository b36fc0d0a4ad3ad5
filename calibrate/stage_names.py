"""What `perfmodel calibrate --only` may name besides kernels. No torch, so that the help can list it."""

from __future__ import annotations

POWER, WAITING, CACHE = OTHER_STAGES = ("power", "waiting", "cache")
GENERAL = ("calls", "collective calls", "collectives", "p2p", "contention", "transfers")  # of an interconnect
