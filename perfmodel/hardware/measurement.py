"""A measurement: one scenario run for real on one machine. Immutable, with raw samples, and it knows its machine.

Times come from event to event on the device (CUDA) or mark to mark (CPU) in a steady loop without synchronisation;
``synced`` times from a loop with a synchronisation after each step. A phase's time is what the device clock shows
between its marks, so phases add up to the step.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from perfmodel.errors import PerfModelError, naming
from perfmodel.files.kinds import MEASUREMENT
from perfmodel.files.reading import read_json
from perfmodel.files.sections import Section
from perfmodel.files.validation import validated
from perfmodel.files.versions import upgrade
from perfmodel.files.writing import write_atomically
from perfmodel.hardware.quantities import Bytes, Count, NotNegativeSeconds, PositiveBytes, Provenance, Seconds

# Format history
# 1  first
MEASUREMENT_VERSION = 1
REMEDY = "Measure it again with `perfmodel validate --again`."
UNSTABLE_SPREAD = 0.05  # relative: standard deviation over median
SHORTEST_SAMPLES = 8
# Steps whose memory is not that of later ones: DDP rebuilds its buckets in the second, while it still has the old ones.
# With static_graph it does so in the third, so that validate looks at four.
STEADY = 2

Steps = Annotated[tuple[Seconds, ...], Field(min_length=1)]
Phase = Annotated[tuple[NotNegativeSeconds, ...], Field(min_length=1)]


class StepMemory(Section):
    """The caching allocator around one step, bytes."""

    allocated_before_bytes: Bytes
    peak_allocated_bytes: Bytes
    peak_reserved_bytes: Bytes


class PipelineAction(Section):
    """One computation of a stage, in seconds since the first rank began the step.

    Waiting for messages before it is not counted.

    Attributes
    ----------
    kind : {"F", "B", "I", "W"}
        Forward (of the last stage with the loss), backward, backward for the stage's inputs alone, or for its weights.
    stage, micro_batch : int
        What it computed.
    start_s, end_s : float
        When it ran.
    """

    kind: Literal["F", "B", "I", "W"]
    stage: Count
    micro_batch: Count
    start_s: NotNegativeSeconds
    end_s: NotNegativeSeconds


class RankSamples(Section):
    """Samples of one of several ranks, in the columns of :class:`Measurement`."""

    step_s: Steps
    synced_step_s: Steps
    phases_s: dict[str, Phase]
    host_reference_s: tuple[Seconds, ...] = ()
    memory: tuple[StepMemory, ...] = ()
    device_used_bytes: Bytes | None = None
    actions: tuple[PipelineAction, ...] = ()

    @property
    def steady_memory(self) -> StepMemory | None:
        """Memory of a steady step; None if too few were read."""
        return self.memory[-1] if len(self.memory) > STEADY else None


class BucketLayout(Section):
    """Sizes of DistributedDataParallel's buckets as it reports them: in the first step, and once they are rebuilt."""

    initial_bytes: tuple[Bytes, ...]
    rebuilt_bytes: tuple[Bytes, ...] = ()
    rebuilt: bool = False


class RankCommunication(Section):
    """Collectives of a step as one rank's profiler trace shows them: medians over a few steps, in seconds.

    Attributes
    ----------
    communication_s : float
        Time in which any collective ran.
    exposed_s : float
        Time of it in which no other kernel ran.
    overlap_ratio : float
        1 - exposed_s / communication_s, as HolisticTraceAnalysis defines it.
    since_last_arrival_s, exposed_since_last_arrival_s : float or None
        The first two if a collective begins when the last rank has begun it; None if the ranks' traces do not hold the
        same collectives.
    exposed_beyond_pauses_s : float or None
        The latter without the short pauses between kernels, as predictions count it: a kernel's time contains the gap
        to the next.
    """

    communication_s: float
    exposed_s: float
    overlap_ratio: float
    since_last_arrival_s: float | None = None
    exposed_since_last_arrival_s: float | None = None
    exposed_beyond_pauses_s: float | None = None


class Measurement(Section):
    """The measured steps of one scenario; see the module.

    With several ranks, these columns are rank 0's, except step_s and synced_step_s: each step is the slowest rank's, so
    phases do not quite add up to it.

    Attributes
    ----------
    name, group, split : str
        Name, class on the accuracy card, and ``tuning`` or ``held-out``, which was fixed before it ran.
    scenario : dict
        The scenario as resolved when it ran.
    provenance : dict
        The machine and libraries, and when it ran.
    warmup_steps : int
        Steps before the measured ones.
    step_s, synced_step_s : tuple of float
        Raw samples.
    phases_s : dict
        Raw samples by phase (zero_grad, forward, backward, clip, optimizer), one a step, micro-batches added up. With
        several ranks it may have reduce, if communication follows backward; a pipeline has pipeline in place of forward
        and backward.
    blocks : tuple of int
        How many of the steps ran in a row before the next reference runs.
    host_reference_s : tuple of float
        After each block, seconds of the fixed host work whose time the profile's host key ``reference`` holds: the
        host's speed between these steps.
    memory : tuple of StepMemory
        Steps 1, 2, 3 and, if several ranks ran, one after the warm-up: what DDP rebuilt in step 2 may be held twice for
        0.1 s more.
    device_used_bytes : int or None
        All that the process held after warm-up.
    device_bytes : int or None
        Memory of the device.
    ranks : tuple of RankSamples
        Samples of every rank, rank 0 first; empty for one rank.
    ddp_buckets : BucketLayout or None
        Buckets of strategy ddp.
    communication : tuple of RankCommunication
        By rank, if profiler traces were recorded.
    actions : tuple of PipelineAction
        Actions of a pipeline in order, in one step after the others.
    """

    version: Literal[1] = 1
    name: str
    split: Literal["tuning", "held-out"]
    group: str
    scenario: dict[str, Any]
    provenance: Provenance
    warmup_steps: Count
    step_s: Steps
    synced_step_s: Steps
    phases_s: dict[str, Phase]
    blocks: tuple[Count, ...] = ()
    host_reference_s: tuple[Seconds, ...] = ()
    memory: tuple[StepMemory, ...] = ()
    device_used_bytes: Bytes | None = None
    device_bytes: PositiveBytes | None = None
    ranks: tuple[RankSamples, ...] = ()
    ddp_buckets: BucketLayout | None = None
    communication: tuple[RankCommunication, ...] = ()
    actions: tuple[PipelineAction, ...] = ()

    @property
    def median_step_s(self) -> float:
        return statistics.median(self.step_s)

    @property
    def median_synced_step_s(self) -> float:
        return statistics.median(self.synced_step_s)

    def median_phase_s(self, phase: str) -> float:
        return statistics.median(self.phases_s[phase])

    @property
    def host_reference_of_ranks_s(self) -> tuple[float, ...]:
        """Host references of all ranks, which share the host."""
        return tuple(each for rank in self.ranks for each in rank.host_reference_s) or self.host_reference_s

    @property
    def median_host_reference_s(self) -> float | None:
        return statistics.median(self.host_reference_of_ranks_s) if self.host_reference_of_ranks_s else None

    @property
    def spread(self) -> float:
        """Standard deviation of the steady steps over their median."""
        return statistics.stdev(self.step_s) / self.median_step_s if len(self.step_s) > 1 else 0.0

    @property
    def peak_allocated_bytes(self) -> int | None:
        """Peak of the steady steps on the rank that needs most."""
        return max((step.peak_allocated_bytes for step in self._steady()), default=None)

    @property
    def peak_reserved_bytes(self) -> int | None:
        return max((step.peak_reserved_bytes for step in self._steady()), default=None)

    def _steady(self) -> list[StepMemory]:
        """A steady step of each rank, where so many were looked at."""
        own = self.memory[-1] if len(self.memory) > STEADY else None
        return [each for each in (own, *(rank.steady_memory for rank in self.ranks)) if each is not None]

    def warnings(self) -> list[str]:
        """Why these numbers should not be trusted, by named thresholds, with what to do."""
        found = []
        if len(self.step_s) < SHORTEST_SAMPLES:
            found.append(f"{self.name}: only {len(self.step_s)} steps (want {SHORTEST_SAMPLES}). {REMEDY}")
        if self.spread > UNSTABLE_SPREAD:
            found.append(f"{self.name}: steps vary by {self.spread:.1%} (want {UNSTABLE_SPREAD:.0%}). {REMEDY}")
        return found


def save_measurement(measurement: Measurement, path: Path, replace: bool = False) -> None:
    """Write it atomically; an existing measurement is only overwritten with ``replace``.

    Raises
    ------
    PerfModelError
        If ``path`` exists; with ``replace``, if it is no measurement.
    """
    if path.exists() and not replace:
        raise PerfModelError(
            f"{path}: a measurement is never overwritten (the file exists). Choose another results folder or delete it."
        )
    write_atomically(path, measurement.model_dump_json(indent=1, exclude_none=True) + "\n", MEASUREMENT)


def load_measurement(path: Path) -> Measurement:
    """Read and check one measurement file.

    Raises
    ------
    PerfModelError
        If it is unreadable, truncated, newer than this perfmodel, or breaks a rule.
    """
    data = upgrade(path, read_json(path, "a measurement", REMEDY), MEASUREMENT_VERSION, {}, REMEDY)
    with naming(path):
        return validated(Measurement, data, "measurement")
