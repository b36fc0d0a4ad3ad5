"""How a model is cut into the stages of a pipeline: how many repeated blocks each has. No torch.

The modules themselves are made in ``models/stages.py``.
"""

from __future__ import annotations

from perfmodel.errors import PerfModelError
from perfmodel.scenario.families import FAMILIES
from perfmodel.scenario.parameter_counts import ParameterCounts
from perfmodel.scenario.scenario import PipelineSection, Scenario


def pipeline_of(scenario: Scenario) -> PipelineSection:
    """Return ``parallelism.pp`` of a scenario that has one.

    Raises
    ------
    PerfModelError
        If it has none.
    """
    section = scenario.parallelism.pp
    if section is None:
        raise PerfModelError("parallelism.pp must be given to cut a model (it is not). Add it.")
    return section


def micro_batch_size(scenario: Scenario) -> int:
    """Return how many samples a micro-batch has."""
    return scenario.batch.size // pipeline_of(scenario).micro_batches


def blocks_of_stages(scenario: Scenario) -> tuple[int, ...]:
    """Return how many repeated blocks each stage has, in order: ``parallelism.pp.layers``, or :func:`balanced` ones."""
    section = pipeline_of(scenario)
    if section.layers is not None:
        return section.layers
    return balanced(scenario.model.resolved().layers or 0, section.number_of_stages, parameter_counts(scenario))


def parameter_counts(scenario: Scenario) -> ParameterCounts:
    """Return how many parameters embeddings, a block and the head of a model have that can be cut."""
    cut = FAMILIES[scenario.model.family or ""].cut
    assert cut is not None, f"{scenario.model.family} is not cut"
    return cut.parameters(scenario.model.resolved(), scenario.batch.sequence_length or 0)


def balanced(blocks: int, stages: int, counts: ParameterCounts) -> tuple[int, ...]:
    """Return how many blocks each stage has, at least one, such that the largest has as few parameters as can be.

    Parameters
    ----------
    blocks, stages : int
        Numbers of each; there must be at least as many blocks.
    counts : ParameterCounts

    Notes
    -----
    Embeddings count to the first stage and the head to the last. Every stage begins with one block, and one block after
    another goes to the stage that is then smallest. That is exact, as blocks are equal: when the stage that is largest
    in the end took its last block, every other would have become as large. Among equals the last takes it: it keeps
    activations of the fewest micro-batches.

    Examples
    --------
    >>> balanced(12, 4, ParameterCounts(embeddings=0, block=1, head=0))
    (3, 3, 3, 3)
    >>> balanced(12, 4, ParameterCounts(embeddings=2, block=1, head=3))
    (2, 4, 4, 2)
    """
    blocks_of = [1] * stages
    sizes = [counts.block] * stages
    sizes[0] += counts.embeddings
    sizes[-1] += counts.head
    for _ in range(blocks - stages):
        smallest = min(reversed(range(stages)), key=sizes.__getitem__)
        blocks_of[smallest] += 1
        sizes[smallest] += counts.block
    return tuple(blocks_of)
