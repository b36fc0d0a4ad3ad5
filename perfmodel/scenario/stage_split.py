"""How a model is cut into the stages of a pipeline: how many repeated blocks each has. No torch.

The modules themselves are made in ``models/stages.py``.
"""

from __future__ import annotations

from perfmodel.errors import PerfModelError
from perfmodel.scenario import families
from perfmodel.scenario.parameter_counts import ParameterCounts, parameter_counts
from perfmodel.scenario.scenario import PipelineSection, Scenario

CUT_FAMILIES = ("gpt", "gpt2", "llama", "bert")  # stages.py knows their embeddings, blocks and head


def pipeline_of(scenario: Scenario) -> PipelineSection:
    """``parallelism.pp`` of a scenario that can be cut.

    Raises
    ------
    PerfModelError
        If there is none, if the model is one that is not cut, if micro-batches do not divide the batch, or if
        ``layers`` does not have a number for each stage.
    """
    section, family = scenario.parallelism.pp, scenario.model.family
    if section is None:
        raise PerfModelError("parallelism.pp must be given to cut a model (it is not). Add it.")
    if family not in CUT_FAMILIES:
        raise PerfModelError(
            f"parallelism.pp must be left out for {family or scenario.model.target} (got a pipeline of "
            f"{section.stages} stages): where to cut is known of {', '.join(CUT_FAMILIES)}. Use one of these."
        )
    if scenario.batch.size % section.micro_batches:
        raise PerfModelError(
            f"parallelism.pp.micro_batches must divide batch.size={scenario.batch.size} (got {section.micro_batches}). "
            "Change one of them."
        )
    if section.layers is not None and len(section.layers) != number_of_stages(section):
        raise PerfModelError(
            f"parallelism.pp.layers must have {number_of_stages(section)} numbers, stages={section.stages} x "
            f"virtual_stages={section.virtual_stages} (got {len(section.layers)}). Change it, or leave it out."
        )
    return section


def number_of_stages(section: PipelineSection) -> int:
    """Return how many stages the model is cut into: torch's, of which each rank has ``virtual_stages``."""
    return section.stages * section.virtual_stages


def micro_batch_size(scenario: Scenario) -> int:
    """Return how many samples a micro-batch has."""
    return scenario.batch.size // pipeline_of(scenario).micro_batches


def blocks_of_stages(scenario: Scenario) -> tuple[int, ...]:
    """Return how many repeated blocks each stage has, in order: ``parallelism.pp.layers``, or :func:`balanced` ones.

    Raises
    ------
    PerfModelError
        As :func:`pipeline_of`; and if ``layers`` does not add up to the model's, or there are fewer than stages.
    """
    section = pipeline_of(scenario)
    blocks = families.resolved(scenario.model).layers or 0
    if section.layers is None:
        return balanced(blocks, number_of_stages(section), parameter_counts(scenario))
    if sum(section.layers) != blocks:
        raise PerfModelError(
            f"parallelism.pp.layers must add up to the model's {blocks} blocks (got {sum(section.layers)}). Change it, "
            "or leave it out."
        )
    return section.layers


def balanced(blocks: int, stages: int, counts: ParameterCounts) -> tuple[int, ...]:
    """Return how many blocks each stage has, at least one, such that the largest has as few parameters as can be.

    Embeddings count to the first stage and the head to the last. One block after another goes to the stage that is then
    smallest. That is exact, as blocks are equal: when the stage that is largest in the end took its last block, every
    other would have become as large. Among equals the last takes it: it keeps activations of the fewest micro-batches.

    Parameters
    ----------
    blocks, stages : int
        Numbers of each.
    counts : ParameterCounts

    Raises
    ------
    PerfModelError
        If there are fewer blocks than stages.

    Examples
    --------
    >>> balanced(12, 4, ParameterCounts(embeddings=0, block=1, head=0))
    (3, 3, 3, 3)
    >>> balanced(12, 4, ParameterCounts(embeddings=2, block=1, head=3))
    (2, 4, 4, 2)
    """
    if blocks < stages:
        raise PerfModelError(
            f"parallelism.pp.stages x virtual_stages must be at most the model's {blocks} blocks (got {stages} "
            "stages). Use fewer, or more model.layers."
        )
    blocks_of = [1] * stages
    sizes = [counts.block] * stages
    sizes[0] += counts.embeddings
    sizes[-1] += counts.head
    for _ in range(blocks - stages):
        smallest = min(reversed(range(stages)), key=sizes.__getitem__)
        blocks_of[smallest] += 1
        sizes[smallest] += counts.block
    return tuple(blocks_of)
