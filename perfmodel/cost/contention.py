"""How much computing and communicating slow each other while both run on one device.

A collective's kernels hold multiprocessors and draw on memory bandwidth, so operators take longer beside them, and they
beside operators. Both factors are measured in pairs (:class:`~perfmodel.hardware.interconnect.ContentionRecord`) for
kinds of operators that differ in what they need: a step's operator takes those of its own kind. An operator that fills
the device in one wave loses more than one of many waves: with a share s of the device gone, w waves become
ceil(w / (1 - s)).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from perfmodel.cost.kernels.cost import KernelCost
from perfmodel.hardware.interconnect import ContentionRecord
from perfmodel.hardware.profile import Profile
from perfmodel.program.program import Collective, Program
from perfmodel.simulate_types import Slowdown
