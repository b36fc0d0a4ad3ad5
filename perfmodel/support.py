"""What this version can predict: everything else is refused in one sentence before any work is done."""

from __future__ import annotations

from perfmodel.cost.collectives import largest_group, measured_groups, nodes_of
from perfmodel.errors import PerfModelError
from perfmodel.hardware.interconnect import Interconnect
from perfmodel.hardware.profile import Profile
from perfmodel.workload.scenario import FsdpSection, MixedPrecisionSection, ParallelismSection, Scenario
from perfmodel.workload.scenario_file import interconnect_in_use

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
    if section.static_graph and scenario.training.gradient_accumulation > 1:
        raise PerfModelError(
            "parallelism.static_graph must be false where gradients are accumulated (got true with "
            f"gradient_accumulation={scenario.training.gradient_accumulation}): torch then leaves out micro-batches."
            " Leave one out."
        )
    if section.dp != scenario.hardware.gpus:
        raise PerfModelError(
            f"parallelism.dp must be hardware.gpus (got dp={section.dp}, gpus={scenario.hardware.gpus})."
            " Set them alike: every GPU is a data-parallel rank."
        )
    if section.dp > 1 and section.strategy == "none":
        raise PerfModelError(
            f"parallelism.strategy must say how {section.dp} ranks work together (got none). Use ddp, or another that "
            "`perfmodel schema` lists."
        )
    _check_settings(section)
    if section.strategy == "zero1":
        _check_zero1(scenario)
    if section.strategy in ("zero2", "zero3"):
        _check_fsdp(scenario)
    if scenario.training.compile:
        raise PerfModelError("training.compile must be false in this version (got true). Eager steps are predicted.")
    _check_nodes(scenario, profile)


def _check_settings(section: ParallelismSection) -> None:
    """Settings that were given and would do nothing."""
    for name, strategies in OF_STRATEGIES.items():
        given = getattr(section, name)
        if given not in (None, False) and section.strategy not in strategies:
            raise PerfModelError(
                f"parallelism.{name} must be left out with strategy {section.strategy} (got {given}). It belongs to "
                f"{' and '.join(strategies)}."
            )


def _check_zero1(scenario: Scenario) -> None:
    if scenario.parallelism.zero1_form == "reduce-scatter" and scenario.optimizer.max_grad_norm is not None:
        raise PerfModelError(
            "optimizer.max_grad_norm must be left out with zero1_form reduce-scatter in this version (got "
            f"{scenario.optimizer.max_grad_norm}): the norm of shards is not predicted. Use form broadcast."
        )
    if scenario.precision == "amp-fp16":
        raise PerfModelError(
            "precision must not be amp-fp16 with strategy zero1 in this version (got amp-fp16): its gradient scaler "
            "works on all gradients and the optimizer on a share. Use amp-bf16."
        )


def _check_fsdp(scenario: Scenario) -> None:
    """What fully_shard can do and this version cannot predict."""
    section = scenario.parallelism.fsdp or FsdpSection()
    plain = section.model_copy(
        update={"replicate": 1, "offload": False, "forward_prefetch": None, "backward_prefetch": None}
    )
    _check_policy(scenario, section.mixed_precision)
    for name in FsdpSection.model_fields:
        given = getattr(section, name)
        if given != getattr(plain, name) or (name == "reshard_after_forward" and type(given) is int):
            raise PerfModelError(
                f"parallelism.fsdp.{name} must be left out in this version (got {given}). What torch does by "
                "default is predicted."
            )
    if scenario.optimizer.max_grad_norm is not None:
        raise PerfModelError(
            f"optimizer.max_grad_norm must be left out with strategy {scenario.parallelism.strategy} in this version "
            f"(got {scenario.optimizer.max_grad_norm}): the norm of shards is not predicted. Leave it out."
        )
    if scenario.precision == "amp-fp16":
        raise PerfModelError(
            f"precision must not be amp-fp16 with strategy {scenario.parallelism.strategy} in this version (got "
            "amp-fp16). Use amp-bf16."
        )


def _check_policy(scenario: Scenario, policy: MixedPrecisionSection | None) -> None:
    if policy is None:
        return
    if "fp16" in (policy.param, policy.reduce):
        raise PerfModelError(
            "parallelism.fsdp.mixed_precision must be fp32 or bf16 in this version (got fp16, which divides gradients "
            "before and after they are reduced). Use bf16."
        )
    if scenario.precision != "fp32":
        raise PerfModelError(
            f"precision must be fp32 with parallelism.fsdp.mixed_precision (got {scenario.precision}): the policy says "
            "what is computed in. Leave one out."
        )
    if scenario.training.gradient_accumulation > 1 and policy.reduce not in (None, policy.param or "fp32"):
        raise PerfModelError(
            "training.gradient_accumulation must be 1 where mixed_precision reduces in another dtype than it computes "
            f"in, in this version (got {scenario.training.gradient_accumulation}). Leave mixed_precision.reduce out."
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


def interconnect_of(scenario: Scenario, profile: Profile) -> Interconnect | None:
    """The wiring the scenario asks for, or the machine's own; None where one rank talks to nobody."""
    if scenario.parallelism.dp == 1:
        return None
    name = interconnect_in_use(scenario, profile)
    if name is None or name not in profile.interconnects:
        known = ", ".join(profile.interconnects) or "none"
        raise PerfModelError(
            f"hardware.interconnect must be one that profile {profile.name} has measured (got {name}; it has {known})."
            " Measure it with `perfmodel calibrate --interconnect`."
        )
    return profile.interconnects[name]
