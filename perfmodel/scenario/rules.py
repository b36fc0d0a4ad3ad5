"""Every rule that follows from the keys of a scenario alone: which values a model can have, which keys go together.

To refuse two keys together, write a function here and call it in :func:`check_scenario`. ``predict``, ``sweep``,
``validate`` and ``calibrate`` apply all of them before any work is done. Rules that need more stand elsewhere: what a
profile has not measured in :mod:`perfmodel.prediction.support`, what this machine cannot run in :mod:`validate.run`.
"""

from __future__ import annotations

from pydantic import BaseModel

from perfmodel.errors import PerfModelError, did_you_mean
from perfmodel.hardware.host_calls import NOT_OVER_DTENSORS
from perfmodel.limits import MOST_LAYERS
from perfmodel.scenario.families import CUT_FAMILIES, FAMILIES
from perfmodel.scenario.scenario import (
    IN_ROUNDS,
    ONE_STAGE,
    SHARDED,
    SPLITTING,
    THERE_AND_BACK,
    FsdpSection,
    ModelSection,
    ParallelismSection,
    PipelineSection,
    Scenario,
    Schedule,
)

# Settings that some strategies alone have, and those strategies.
OF_STRATEGIES = {
    "bucket_cap_mb": ("ddp", "zero1"),
    "gradient_as_bucket_view": ("ddp", "zero1"),
    "static_graph": ("ddp", "zero1"),
    "zero1_form": ("zero1",),
    "parameters_as_bucket_view": ("zero1",),
    "fsdp": ("zero2", "zero3"),
}
_TARGET_ONLY = ("target", "arguments", "inputs", "loss", "blocks")
_REQUIRED_OF_TOKENS = ("layers", "width", "heads", "ffn_width")
_DIMENSIONS = (*_REQUIRED_OF_TOKENS, "kv_heads", "vocabulary", "attention", "dropout", "image_size", "classes")


def check_scenario(scenario: Scenario, device: str) -> None:
    """Refuse a scenario whose keys do not go together, in one sentence.

    Parameters
    ----------
    scenario : Scenario
    device : str
        ``cuda`` or ``cpu``: what the scenario is to be predicted or run on.

    Raises
    ------
    PerfModelError
        If a rule is broken.
    """
    check_workload(scenario)
    section = scenario.parallelism
    if section.pp is not None:
        _check_pipeline(scenario, section.pp)
    _check_ranks(scenario)
    _check_settings(section)
    _check_accumulation(scenario)
    if section.strategy == "zero1":
        _check_zero1(scenario)
    if section.strategy in ("zero2", "zero3"):
        _check_fsdp(scenario, section.fsdp or FsdpSection(), device)


def check_workload(scenario: Scenario) -> None:
    """Refuse what no rank could compute: the rules of model, batch and training. Every file is read with them.

    Raises
    ------
    PerfModelError
        If a rule is broken.
    """
    _check_model(scenario.model)
    _check_batch(scenario)
    if scenario.training.compile:
        raise PerfModelError("training.compile must be false (got true): only eager steps are modelled. Leave it out.")
    _check_checkpointing(scenario)


def _check_model(model: ModelSection) -> None:
    if (model.family is None) == (model.target is None):
        raise PerfModelError(
            "model must name either a family or a target. Set model.family, or model.target for a model of your own."
        )
    if model.family is None:
        return
    family = FAMILIES.get(model.family)
    if family is None:
        raise PerfModelError(
            f"model.family must be a known family (got {model.family!r}). {did_you_mean(model.family, FAMILIES)}"
        )
    if model.size is not None and model.size not in family.sizes:
        raise PerfModelError(
            f"model.size must be a size of {model.family} (got {model.size!r}). "
            f"{did_you_mean(model.size, family.sizes or ['(none: give dimensions)'])}"
        )
    for name in _DIMENSIONS:
        if getattr(model, name) is not None and name not in family.dimensions:
            raise PerfModelError(
                f"model.{name} must be left out for {model.family} (got {getattr(model, name)!r}). "
                f"It takes: {', '.join(family.dimensions)}."
            )
    for name in _TARGET_ONLY:
        if getattr(model, name) != type(model).model_fields[name].default:
            raise PerfModelError(
                f"model.{name} must be left out for family {model.family!r}. It belongs to model.target."
            )
    resolved = model.resolved()
    if resolved.layers is not None and resolved.layers > MOST_LAYERS:
        raise PerfModelError(
            f"model.layers must be at most {MOST_LAYERS:,} (got {resolved.layers:,}): each is traced. Ask for fewer: "
            "time and memory grow by the same amount with each layer."
        )
    if family.kind == "token":
        _check_transformer(resolved)


def _check_transformer(model: ModelSection) -> None:
    missing = [name for name in _REQUIRED_OF_TOKENS if getattr(model, name) is None]
    if missing:
        raise PerfModelError(
            f"model.{missing[0]} must be given where model.size is not. "
            f"Set a size or every one of {', '.join(_REQUIRED_OF_TOKENS)}."
        )
    assert model.width is not None and model.heads is not None
    if model.width % model.heads:
        raise PerfModelError(
            f"model.heads must divide model.width={model.width} (got {model.heads}). Use {_divisors(model.width, 64)}."
        )
    if model.kv_heads is not None and model.heads % model.kv_heads:
        raise PerfModelError(
            f"model.kv_heads must divide model.heads={model.heads} (got {model.kv_heads}). "
            f"Use {_divisors(model.heads, 64)}."
        )


def _divisors(number: int, most: int) -> str:
    divisors = [str(n) for n in range(1, min(number, most) + 1) if number % n == 0]
    return " or ".join([", ".join(divisors[:-1]), divisors[-1]]) if len(divisors) > 1 else divisors[0]


def _check_batch(scenario: Scenario) -> None:
    """Token models need a sequence length; image models must not have one."""
    model, length = scenario.model, scenario.batch.sequence_length
    if model.family is None:
        if length is None and any("sequence" in given.shape for given in model.inputs.values()):
            raise PerfModelError("batch.sequence_length must be given where model.inputs uses `sequence`. Add it.")
        return
    kind = FAMILIES[model.family].kind
    if kind == "token" and length is None:
        raise PerfModelError(f"batch.sequence_length must be given for {model.family}. Add it, in tokens.")
    if kind == "image" and length is not None:
        raise PerfModelError(
            f"batch.sequence_length must be left out for {model.family} (got {length}). Use model.image_size."
        )


def _check_checkpointing(scenario: Scenario) -> None:
    model, wanted = scenario.model, scenario.training.activation_checkpointing
    blocks = model.blocks if model.family is None else FAMILIES[model.family].blocks
    if scenario.mode == "train" and wanted != "none" and not blocks:
        raise PerfModelError(
            f"training.activation_checkpointing must be none for {model.family or model.target}, which names no "
            f"repeated blocks (got {wanted!r}). Use none, or set model.blocks of a target."
        )


def _check_ranks(scenario: Scenario) -> None:
    """Refuse numbers of GPUs, nodes and ranks that are not those of one another."""
    section, hardware = scenario.parallelism, scenario.hardware
    if section.pp is not None and hardware.gpus != section.ranks:
        raise PerfModelError(
            f"hardware.gpus must be parallelism.pp.stages x dp (got gpus={hardware.gpus}, stages={section.pp.stages}, "
            f"dp={section.dp}). Set {section.ranks}."
        )
    if section.pp is None and section.dp != hardware.gpus:
        raise PerfModelError(
            f"parallelism.dp must be hardware.gpus (got dp={section.dp}, gpus={hardware.gpus}). Set both to the same "
            "number: every GPU is a data-parallel rank."
        )
    if hardware.gpus == 1 and hardware.nodes != 1:
        raise PerfModelError(f"hardware.nodes must be 1 for one GPU (got {hardware.nodes}). Leave it out.")
    if hardware.gpu_speeds is not None and len(hardware.gpu_speeds) != hardware.gpus:
        raise PerfModelError(
            f"hardware.gpu_speeds must have one number for each of hardware.gpus={hardware.gpus} (got "
            f"{len(hardware.gpu_speeds)}). Leave it out where all GPUs are equal."
        )
    if section.dp > 1 and section.strategy == "none":
        raise PerfModelError(
            f"parallelism.strategy must say how {section.dp} ranks work together (got none). Use ddp, or another that "
            "`perfmodel schema` lists."
        )
    if section.dp > 1 and section.strategy in SHARDED and scenario.mode == "forward":
        raise PerfModelError(
            f"mode must be train with parallelism.strategy {section.strategy} (got forward): sharded models are "
            "predicted in training only. Use strategy ddp, where every rank holds the whole model."
        )


def _check_settings(section: ParallelismSection) -> None:
    """Refuse settings that would change nothing."""
    for name, strategies in OF_STRATEGIES.items():
        given = getattr(section, name)
        if given not in (None, False) and section.strategy not in strategies:
            raise PerfModelError(
                f"parallelism.{name} must be left out with strategy {section.strategy} (got {_shown(given)}). It "
                f"belongs to {' and '.join(strategies)}."
            )


def _shown(given: object) -> str:
    """Return a value as a scenario has it; of a section, the keys that were given."""
    if isinstance(given, BaseModel):
        return ", ".join(sorted(given.model_fields_set)) or "{}"
    return str(given).lower() if isinstance(given, bool) else str(given)


def _check_accumulation(scenario: Scenario) -> None:
    micro_batches = scenario.training.gradient_accumulation
    if scenario.parallelism.static_graph and micro_batches > 1:
        raise PerfModelError(
            f"parallelism.static_graph must be false with training.gradient_accumulation={micro_batches} (got true): "
            "torch then leaves out micro-batches, since no_sync does not work with a static graph. Leave one out."
        )


def _check_zero1(scenario: Scenario) -> None:
    if scenario.parallelism.zero1_form == "reduce-scatter" and scenario.precision == "amp-fp16":
        raise PerfModelError(
            "precision must not be amp-fp16 with parallelism.zero1_form reduce-scatter (got amp-fp16): the gradient "
            "scaler of each rank would see its own shard alone, and ranks would not skip the same steps. Use amp-bf16, "
            "or zero1_form broadcast."
        )


def _check_pipeline(scenario: Scenario, section: PipelineSection) -> None:
    """Refuse a pipeline that cannot be, or cannot be combined with the rest of the scenario."""
    _check_stages(scenario, section)
    check_schedule(section.schedule, section.stages, section.micro_batches, section.virtual_stages)
    must_be: list[tuple[str, object, object]] = [
        ("mode", scenario.mode, "train"),
        ("training.gradient_accumulation", scenario.training.gradient_accumulation, 1),
        ("optimizer.max_grad_norm", scenario.optimizer.max_grad_norm, None),
    ]
    for key, given, wanted in must_be:
        if given != wanted:
            only = "left out" if wanted is None else wanted
            raise PerfModelError(f"{key} must be {only} with a pipeline (got {given}). Leave one out.")
    if scenario.precision == "amp-fp16":
        raise PerfModelError(
            "precision must not be amp-fp16 with a pipeline (got amp-fp16): each rank's gradient scaler would see its "
            "own stages alone. Use amp-bf16."
        )
    _check_replicas(scenario.parallelism, section)


def _check_stages(scenario: Scenario, section: PipelineSection) -> None:
    """Refuse a model that is not cut, and numbers of blocks or micro-batches that do not come out even."""
    family, stages = scenario.model.family, section.number_of_stages
    if family not in CUT_FAMILIES:
        raise PerfModelError(
            f"parallelism.pp must be left out for {family or scenario.model.target} (got a pipeline of "
            f"{section.stages} stages): only {', '.join(CUT_FAMILIES)} can be cut into stages. Use one of these."
        )
    if scenario.batch.size % section.micro_batches:
        raise PerfModelError(
            f"parallelism.pp.micro_batches must divide batch.size={scenario.batch.size} (got {section.micro_batches}). "
            "Change one of them."
        )
    blocks = scenario.model.resolved().layers or 0
    if section.layers is not None and len(section.layers) != stages:
        raise PerfModelError(
            f"parallelism.pp.layers must have {stages} numbers, stages={section.stages} x "
            f"virtual_stages={section.virtual_stages} (got {len(section.layers)}). Change it, or leave it out."
        )
    if section.layers is not None and sum(section.layers) != blocks:
        raise PerfModelError(
            f"parallelism.pp.layers must add up to the model's {blocks} blocks (got {sum(section.layers)}). Change it, "
            "or leave it out."
        )
    if stages > blocks:
        raise PerfModelError(
            f"parallelism.pp.stages x virtual_stages must be at most the model's {blocks} blocks (got {stages}). Use "
            "fewer, or more model.layers."
        )


def check_schedule(schedule: Schedule, ranks: int, micro_batches: int, virtual_stages: int) -> None:
    """Refuse the numbers that torch's schedules refuse.

    Raises
    ------
    PerfModelError
        If the schedule cannot be made of them.
    """
    if schedule in ONE_STAGE and virtual_stages != 1:
        raise PerfModelError(
            f"parallelism.pp.virtual_stages must be 1 with schedule {schedule} (got {virtual_stages}). Leave it out, "
            "or use interleaved-1f1b."
        )
    if schedule in THERE_AND_BACK and virtual_stages != 2:
        raise PerfModelError(
            f"parallelism.pp.virtual_stages must be 2 with schedule {schedule} (got {virtual_stages}): each rank has "
            "one stage on the way there and one on the way back. Set 2."
        )
    least = {"1f1b": ranks, "dualpipev": 2 * ranks}.get(schedule, 1)
    if micro_batches < least:
        over = f"{ranks} stages" if schedule == "1f1b" else f"{ranks} ranks there and back"
        raise PerfModelError(
            f"parallelism.pp.micro_batches must be at least {least} with schedule {schedule} over {over} (got "
            f"{micro_batches}). Set {least} or more, or use another schedule."
        )
    rounds = rounds_of(ranks, micro_batches)
    if schedule in IN_ROUNDS and micro_batches % rounds:
        below, above = (_next_in_rounds(ranks, micro_batches, step) for step in (-1, 1))
        raise PerfModelError(
            f"parallelism.pp.micro_batches must divide into {rounds} equal rounds with schedule {schedule} over "
            f"{ranks} ranks (got {micro_batches}). Set {below} or {above}."
        )


def rounds_of(ranks: int, micro_batches: int) -> int:
    """Return the number of rounds in which interleaved schedules deal micro-batches to the stages of each rank.

    >>> rounds_of(4, 13), rounds_of(4, 3)
    (3, 1)
    """
    return max(1, micro_batches // ranks)


def _next_in_rounds(ranks: int, micro_batches: int, step: int) -> int:
    """Return the next number of micro-batches that divides into rounds, going by ``step``."""
    while micro_batches % rounds_of(ranks, micro_batches):
        micro_batches += step
    return micro_batches


def _check_replicas(parallelism: ParallelismSection, section: PipelineSection) -> None:
    """Refuse what replicas of a pipeline cannot be: of what torch's stages know, ddp alone is modelled."""
    if parallelism.strategy not in ("none", "ddp"):
        raise PerfModelError(
            f"parallelism.strategy must be ddp with a pipeline (got {parallelism.strategy}), or left out where there "
            "is one replica. Use ddp."
        )
    if parallelism.dp > 1 and section.schedule in SPLITTING:
        raise PerfModelError(
            f"parallelism.pp.schedule must not split backwards with dp={parallelism.dp} (got {section.schedule}): "
            "DistributedDataParallel does not see gradients of weights that are computed by themselves, and ranks "
            "would train apart. Use interleaved-1f1b, or dp: 1."
        )
    if parallelism.static_graph:
        raise PerfModelError(
            "parallelism.static_graph must be false with a pipeline (got true): in the first step torch then reduces "
            "gradients of the first micro-batch alone. Leave it out."
        )


def _check_fsdp(scenario: Scenario, section: FsdpSection, device: str) -> None:
    """Refuse what fully_shard cannot do."""
    if scenario.parallelism.dp == 1:
        _check_alone(section)
    if section.mixed_precision is not None and scenario.precision != "fp32":
        raise PerfModelError(
            f"precision must be fp32 with parallelism.fsdp.mixed_precision (got {scenario.precision}): the policy says "
            "what is computed in. Leave one out."
        )
    if f"optimizer {scenario.optimizer.name} {scenario.optimizer.implementation}" in NOT_OVER_DTENSORS:
        raise PerfModelError(
            f"optimizer.implementation must not be {scenario.optimizer.implementation} for {scenario.optimizer.name} "
            f"with parallelism.strategy {scenario.parallelism.strategy} (got {scenario.optimizer.implementation}): "
            "torch cannot run it over sharded parameters. Use foreach."
        )
    if section.offload:
        _check_offload(scenario, device)
    _check_groups(section, scenario.parallelism.dp)


def _check_alone(section: FsdpSection) -> None:
    """Refuse what would change nothing for a single rank, which shards nothing."""
    reshard = section.reshard_after_forward
    idle = {
        "mixed_precision": section.mixed_precision,
        "offload": section.offload or None,
        "replicate": None if section.replicate == 1 else section.replicate,
        "reshard_after_forward": None if isinstance(reshard, bool) else reshard,
    }
    for name, given in idle.items():
        if given is not None:
            raise PerfModelError(
                f"parallelism.fsdp.{name} must be left out with dp=1 (got {_shown(given)}): nothing is sharded. Leave "
                "it out."
            )


def _check_offload(scenario: Scenario, device: str) -> None:
    """Refuse what torch cannot do with shards in host memory."""
    if device == "cpu":
        raise PerfModelError(
            "parallelism.fsdp.offload must be false on the CPU (got true): shards are in host memory, and torch pins "
            "none without a GPU. Leave it out."
        )
    if scenario.optimizer.max_grad_norm is not None or scenario.precision == "amp-fp16":
        raise PerfModelError(
            "parallelism.fsdp.offload must be false with gradient clipping or amp-fp16 (got true): gradients in host "
            "memory would be reduced, which NCCL cannot. Leave one out."
        )


def _check_groups(section: FsdpSection, dp: int) -> None:
    """Refuse numbers of ranks that do not divide each other, and prefetching where there is one group."""
    if section.replicate > 1 and (dp % section.replicate or section.replicate == dp):
        raise PerfModelError(
            f"parallelism.fsdp.replicate must divide parallelism.dp={dp} into shards of two ranks or more (got "
            f"{section.replicate}). Choose another number, or use strategy ddp, where every rank holds the whole model."
        )
    shards, reshard = dp // section.replicate, section.reshard_after_forward
    if type(reshard) is int and shards % reshard:
        raise PerfModelError(
            f"parallelism.fsdp.reshard_after_forward must divide the {shards} ranks that share a model (got {reshard})."
            " Choose another number, true or false."
        )
    for name in ("forward_prefetch", "backward_prefetch"):
        given = getattr(section, name)
        if given is not None and section.wrap == "root":
            raise PerfModelError(
                f"parallelism.fsdp.{name} must be left out with wrap root (got {given}): there is one group. Use wrap "
                "blocks."
            )
