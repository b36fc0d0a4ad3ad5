"""What `perfmodel calibrate --only` may name besides kernels. No torch, so that the help can list it."""

from __future__ import annotations

POWER, WAITING, CACHE = OTHER_STAGES = ("power", "waiting", "cache")
GROUP = "group of "  # begins the names of the stages that connect groups and time their collectives
GENERAL = ("calls", "collective calls", "collectives", "p2p", "contention", "transfers")  # of an interconnect
