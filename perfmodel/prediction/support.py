"""What this version can predict: everything else is refused in one sentence before any work is done."""

from __future__ import annotations

from pydantic import BaseModel

from perfmodel.cost.collectives import largest_group, measured_groups, nodes_of
from perfmodel.cost.routing import route_of
from perfmodel.cost.transfers import transfer_cost
from perfmodel.errors import PerfModelError
from perfmodel.hardware import host_calls
from perfmodel.hardware.interconnect import MESSAGES, Interconnect
from perfmodel.hardware.profile import Profile
from perfmodel.program.pipeline.orders import SPLITTING, check_schedule
from perfmodel.program.program import PIPELINE, REPLICATE, Members
from perfmodel.program.ranks import SHARDED
from perfmodel.program.sharding import replicas_of, resharing_of, sharing_of
from perfmodel.scenario.scenario import (
    FsdpSection,
    MixedPrecisionSection,
    ParallelismSection,
    PipelineSection,
    Scenario,
)
from perfmodel.scenario.stage_split import pipeline_of
from perfmodel.scenario.yaml_file import interconnect_in_use
from perfmodel.trace.kernel_key import optimizer_prefix

LARGEST_NODE = 72  # GPUs that NVLink joins in what is built today
# Settings of some strategies only, and their strategies.
OF_STRATEGIES = {
    "bucket_cap_mb": ("ddp", "zero1"),
    "gradient_as_bucket_view": ("ddp", "zero1"),
    "static_graph": ("ddp", "zero1"),
    "zero1_form": ("zero1",),
    "parameters_as_bucket_view": ("zero1",),
    "fsdp": ("zero2", "zero3"),
}


def check_supported(scenario: Scenario, profile: Profile) -> None:
    """Refuse what this version cannot predict, in one sentence."""
    _check_gpus(scenario, profile)
    speeds = scenario.hardware.gpu_speeds
    if speeds is not None and len(speeds) != scenario.hardware.gpus:
        raise PerfModelError(
            f"hardware.gpu_speeds must have one number for each of hardware.gpus={scenario.hardware.gpus} (got "
            f"{len(speeds)}). Leave it out where all are alike."
        )
    section = scenario.parallelism
    if section.pp is not None:
        check_pipeline(scenario, section.pp)
        if profile.device.kind == "cpu":
            raise PerfModelError(
                "parallelism.pp must be left out on the CPU (got a pipeline): messages between ranks are predicted of "
                "GPUs alone. Choose a GPU's profile, or strategy ddp."
            )
        _check_messages(scenario, profile)
    if section.static_graph and scenario.training.gradient_accumulation > 1:
        raise PerfModelError(
            "parallelism.static_graph must be false where gradients are accumulated (got true with "
            f"gradient_accumulation={scenario.training.gradient_accumulation}): torch then leaves out micro-batches."
            " Leave one out."
        )
    if section.pp is None and section.dp != scenario.hardware.gpus:
        raise PerfModelError(
            f"parallelism.dp must be hardware.gpus (got dp={section.dp}, gpus={scenario.hardware.gpus})."
            " Set them alike: every GPU is a data-parallel rank."
        )
    if section.dp > 1 and section.strategy == "none":
        raise PerfModelError(
            f"parallelism.strategy must say how {section.dp} ranks work together (got none). Use ddp, or another that "
            "`perfmodel schema` lists."
        )
    if section.dp > 1 and section.strategy in SHARDED and scenario.mode == "forward":
        raise PerfModelError(
            f"mode must be train with parallelism.strategy {section.strategy} (got forward): what is sharded is "
            "predicted in training alone. Use strategy ddp, where every rank holds all."
        )
    _check_settings(section)
    if section.strategy == "zero1":
        _check_zero1(scenario)
    if section.strategy in ("zero2", "zero3"):
        _check_fsdp(scenario, profile)
    if scenario.training.compile:
        raise PerfModelError("training.compile must be false in this version (got true). Eager steps are predicted.")
    _check_nodes(scenario, profile)


def _check_settings(section: ParallelismSection) -> None:
    """Settings that were given and would do nothing."""
    for name, strategies in OF_STRATEGIES.items():
        given = getattr(section, name)
        if given not in (None, False) and section.strategy not in strategies:
            raise PerfModelError(
                f"parallelism.{name} must be left out with strategy {section.strategy} (got {_shown(given)}). It "
                f"belongs to {' and '.join(strategies)}."
            )


def _shown(given: object) -> str:
    """A value as a scenario has it; of a section, the keys that were given."""
    if isinstance(given, BaseModel):
        return ", ".join(sorted(given.model_fields_set)) or "{}"
    return str(given).lower() if isinstance(given, bool) else str(given)


def _check_zero1(scenario: Scenario) -> None:
    if scenario.parallelism.zero1_form == "reduce-scatter" and scenario.precision == "amp-fp16":
        raise PerfModelError(
            "precision must not be amp-fp16 with zero1_form reduce-scatter (got amp-fp16): torch's gradient scaler "
            "would see the rank's own shard alone, and ranks would not skip the same steps. Use amp-bf16, or form "
            "broadcast."
        )


def check_pipeline(scenario: Scenario, section: PipelineSection, where: str = "") -> None:
    """What a pipeline cannot be, or cannot be combined with.

    Raises
    ------
    PerfModelError
        In one sentence that begins with ``where``.
    """
    pipeline_of(scenario)
    check_schedule(section.schedule, section.stages, section.micro_batches, section.virtual_stages)
    if scenario.hardware.gpus != scenario.parallelism.ranks:
        raise PerfModelError(
            f"{where}hardware.gpus must be parallelism.pp.stages x dp (got gpus={scenario.hardware.gpus}, "
            f"stages={section.stages}, dp={scenario.parallelism.dp}). Set {scenario.parallelism.ranks}."
        )
    must_be: list[tuple[str, object, object]] = [
        ("mode", scenario.mode, "train"),
        ("training.gradient_accumulation", scenario.training.gradient_accumulation, 1),
        ("optimizer.max_grad_norm", scenario.optimizer.max_grad_norm, None),
    ]
    for key, given, wanted in must_be:
        if given != wanted:
            only = "left out" if wanted is None else wanted
            raise PerfModelError(f"{where}{key} must be {only} with a pipeline (got {given}). Leave one out.")
    if scenario.precision == "amp-fp16":
        raise PerfModelError(
            f"{where}precision must not be amp-fp16 with a pipeline (it is): each rank's gradient "
            "scaler would see its own stages alone. Use amp-bf16."
        )
    _check_replicas(scenario.parallelism, section, where)


def _check_replicas(parallelism: ParallelismSection, section: PipelineSection, where: str) -> None:
    """Of several pipelines. torch's stages know more strategies, of which ddp is the one that is predicted."""
    if parallelism.strategy not in ("none", "ddp"):
        raise PerfModelError(
            f"{where}parallelism.strategy must be ddp with a pipeline (got {parallelism.strategy}), or left out where "
            "there is one. Use ddp."
        )
    if parallelism.dp > 1 and section.schedule in SPLITTING:
        raise PerfModelError(
            f"{where}parallelism.pp.schedule must not split backwards with dp={parallelism.dp} (got "
            f"{section.schedule}): DistributedDataParallel does not see gradients of weights that are computed by "
            "themselves, and ranks would train apart. Use interleaved-1f1b, or dp: 1."
        )
    if parallelism.static_graph:
        raise PerfModelError(
            f"{where}parallelism.static_graph must be false with a pipeline (got true): in the first step torch then "
            "reduces gradients of the first micro-batch alone. Leave it out."
        )


def _check_messages(scenario: Scenario, profile: Profile) -> None:
    interconnect_of(scenario, profile)
    name, wires, _ = route_of(Members(PIPELINE, 2), scenario, profile)
    for kind in MESSAGES:
        if f"{kind} 2" not in wires.segments:
            raise PerfModelError(
                f"profile {profile.name} must know messages over {name} for a pipeline (it has no {kind} of 2 ranks). "
                f"Measure them with `perfmodel calibrate --interconnect {name} --only p2p`."
            )


def _check_fsdp(scenario: Scenario, profile: Profile) -> None:
    """What fully_shard can do and this version cannot predict."""
    section = scenario.parallelism.fsdp or FsdpSection()
    if scenario.parallelism.dp == 1:
        _check_alone(section)
    _check_policy(scenario, section.mixed_precision)
    if optimizer_prefix(scenario.model_dump(include={"optimizer"})) in host_calls.NOT_OVER_DTENSORS:
        raise PerfModelError(
            f"optimizer.implementation must not be fused for sgd with parallelism.strategy "
            f"{scenario.parallelism.strategy} (got fused): torch cannot run it over sharded parameters. Use foreach."
        )
    if section.offload:
        check_offload(scenario, profile.device.kind)
        for direction in ("h2d", "d2h"):
            transfer_cost(direction, "pinned", 1, profile)
    check_fsdp_groups(scenario.parallelism)


def _check_alone(section: FsdpSection) -> None:
    """What one rank, which shards nothing, cannot be asked for."""
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


def check_offload(scenario: Scenario, device: str, where: str = "parallelism.fsdp") -> None:
    """What torch cannot do with shards in host memory.

    Raises
    ------
    PerfModelError
        In one sentence that begins with ``where``, the section.
    """
    if device == "cpu":
        raise PerfModelError(
            f"{where}.offload must be false on the CPU (got true): shards are in host memory, and torch pins none "
            "without a GPU. Leave it out."
        )
    if scenario.optimizer.max_grad_norm is not None or scenario.precision == "amp-fp16":
        raise PerfModelError(
            f"{where}.offload must be false with gradient clipping or amp-fp16 (got true): gradients in host memory "
            "would be reduced, which NCCL cannot. Leave one out."
        )


def check_fsdp_groups(parallelism: ParallelismSection, where: str = "parallelism.fsdp") -> None:
    """What torch refuses, or would not do as it says, of who shares with whom and what is gathered ahead.

    Raises
    ------
    PerfModelError
        In one sentence that begins with ``where``, the section.
    """
    section, dp = parallelism.fsdp or FsdpSection(), parallelism.dp
    if section.replicate > 1 and (dp % section.replicate or section.replicate == dp):
        raise PerfModelError(
            f"{where}.replicate must divide parallelism.dp={dp} into shards of two ranks or more (got "
            f"{section.replicate}). Choose another number, or use strategy ddp, where every rank holds all."
        )
    shards, reshard = sharing_of(parallelism).ranks, section.reshard_after_forward
    if type(reshard) is int and shards % reshard:
        raise PerfModelError(
            f"{where}.reshard_after_forward must divide the {shards} ranks that share a model (got {reshard}). "
            "Choose another number, true or false."
        )
    for name in ("forward_prefetch", "backward_prefetch"):
        given = getattr(section, name)
        if given is not None and section.wrap == "root":
            raise PerfModelError(
                f"{where}.{name} must be left out with wrap root (got {given}): there is one group. Use wrap blocks."
            )


def _check_policy(scenario: Scenario, policy: MixedPrecisionSection | None) -> None:
    if policy is None:
        return
    if scenario.precision != "fp32":
        raise PerfModelError(
            f"precision must be fp32 with parallelism.fsdp.mixed_precision (got {scenario.precision}): the policy says "
            "what is computed in. Leave one out."
        )


def _check_gpus(scenario: Scenario, profile: Profile) -> None:
    """More than the profile has need curves of collectives to extrapolate from; on a CPU, all share its cores."""
    gpus, name = scenario.hardware.gpus, interconnect_in_use(scenario, profile)
    wires = profile.interconnects.get(name or "")
    if wires is not None and wires.nodes == 1 and gpus > max(profile.gpus, LARGEST_NODE):
        raise PerfModelError(
            f"hardware.gpus must be at most {LARGEST_NODE} over {name}, which joins the GPUs of one node (got {gpus}). "
            "Use fewer, or an interconnect of several nodes."
        )
    grows = profile.device.kind == "cuda" and wires is not None and measured_groups("all_reduce", wires)
    if gpus > profile.gpus and not grows:
        raise PerfModelError(
            f"hardware.gpus must be at most {profile.gpus}, what profile {profile.name} has (got {gpus}), where it has "
            "no all_reduce of GPUs to extrapolate from. Use fewer, or measure it with `perfmodel calibrate "
            "--interconnect`."
        )


def _check_nodes(scenario: Scenario, profile: Profile) -> None:
    asked, gpus = scenario.hardware.nodes, scenario.hardware.gpus
    wires = interconnect_of(scenario, profile)
    if wires is None:
        if asked != 1:
            raise PerfModelError(f"hardware.nodes must be 1 for one GPU (got {asked}). Leave it out.")
        return
    nodes = nodes_of(gpus, wires)
    if asked != nodes:
        measured = largest_group("all_reduce", wires) or profile.gpus
        unit = "node" if wires.nodes == 1 else "nodes"
        raise PerfModelError(
            f"hardware.nodes must be {nodes} for {gpus} GPUs over {interconnect_in_use(scenario, profile)}, which was "
            f"measured with {measured} ranks on {wires.nodes} {unit} (got {asked}). Set it, or choose another "
            "hardware.interconnect."
        )
    section = scenario.parallelism
    groups = [sharing_of(section), replicas_of(section), resharing_of(section)]
    if section.pp is not None:
        groups = [Members(PIPELINE, 2), Members(REPLICATE, section.dp)]
    for members in filter(None, groups):
        route_of(members, scenario, profile)


def interconnect_of(scenario: Scenario, profile: Profile) -> Interconnect | None:
    """The wiring the scenario asks for, or the machine's own; None where one rank talks to nobody."""
    if scenario.parallelism.ranks == 1:
        return None
    name = interconnect_in_use(scenario, profile)
    if name is None or name not in profile.interconnects:
        known = ", ".join(profile.interconnects) or "none"
        raise PerfModelError(
            f"hardware.interconnect must be one that profile {profile.name} has measured (got {name}; it has {known})."
            " Measure it with `perfmodel calibrate --interconnect`."
        )
    return profile.interconnects[name]
