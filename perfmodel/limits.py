"""How much is read and predicted: sizes beyond which it would take minutes or gigabytes, each with its reason.

Legitimate questions lie well inside: a model of 96 layers with 64 micro-batches takes 1.3 million operators, 46 seconds
and 1.5 GB. What lies outside is refused in one sentence, before the work or, where only the work tells, in its midst.
"""

from __future__ import annotations

from perfmodel.units import MIB

MOST_LAYERS = 1024  # each is traced, 0.1 to 1 s; the deepest transformers that were published have 1,000
MOST_MODULES = 200_000  # of a user's model, likewise; DeepSeek-V3, every expert on its own, has about 80,000
MOST_PARAMETERS = 10**13  # of a model; the launches of an optimizer over more number in millions
MOST_BYTES = 2**59  # of all tensors that a step makes, one after another; beyond, sums of sizes overflow
MOST_TRACED_OPERATORS = 1_000_000  # of a step of at most two micro-batches: a quarter of an hour of tracing
MOST_OPERATORS = 5_000_000  # of a step, over all ranks whose programs differ: three minutes and 6 GB
MOST_GPUS = 10**6  # each has its place in an answer; the largest clusters have a few hundred thousand
MOST_MEASUREMENTS = 5_000  # in a folder to compare, three predictions each
MOST_CONFIGURATIONS = 1000  # of a sweep, a prediction each
MOST_TOPOLOGY_GPUS = 1024  # of a described topology, so that it is answered within seconds
MOST_TOPOLOGY_NICS = 1024  # likewise
MOST_TOPOLOGY_BONDS = 32_640  # between two GPUs each, likewise: all pairs of 256 GPUs
MOST_YAML_VALUES = 10_000  # of a scenario or a list of cases, once aliases are followed, which may multiply
LARGEST_YAML_BYTES = MIB  # a scenario has a few hundred bytes
LARGEST_FILE_BYTES = 64 * MIB  # of other files, unpacked; profiles and measurements have up to a few MB
LARGEST_TRACE_BYTES = (
    512 * MIB
)  # of traces, perfmodel's own and the profiler's, unpacked; in memory they take several times that
