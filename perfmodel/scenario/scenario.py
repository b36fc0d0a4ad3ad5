"""A scenario: the question a person asks, as a YAML file checked key by key.

Every key but model, batch and hardware has a default. Loading never executes code. ``perfmodel schema`` prints the JSON
Schema of :class:`Scenario`.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    PrivateAttr,
    StrictBool,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import PydanticCustomError

from perfmodel.files.sections import Section
from perfmodel.limits import MOST_GPUS, MOST_LAYERS
from perfmodel.scenario.families import FAMILIES

# Format history
# 1  first
SCENARIO_VERSION = 1
MICRO_BATCHES = "parallelism.pp.micro_batches"

Count = Annotated[int, Field(ge=1, le=10**7, strict=True)]  # beyond, sizes of tensors overflow
MicroBatches = Annotated[int, Field(ge=1, le=1024, strict=True)]  # each is simulated
Ranks = Annotated[int, Field(ge=1, le=MOST_GPUS, strict=True)]
Precision = Literal["fp32", "tf32", "bf16", "fp16", "amp-bf16", "amp-fp16"]


class ModelInput(Section):
    """One keyword argument of a user's forward: shape of integers and the symbols ``batch`` and ``sequence``."""

    shape: tuple[Annotated[int, Field(ge=0, le=10**12)] | Literal["batch", "sequence"], ...]
    dtype: str = "float32"
    high: Count | None = None


class ModelSection(Section):
    """A family with a size or dimensions, or a target of the user's own."""

    family: str | None = None
    size: str | None = None
    layers: Count | None = None
    width: Count | None = None
    heads: Count | None = None
    kv_heads: Count | None = None
    ffn_width: Count | None = None
    vocabulary: Count | None = None
    attention: Literal["eager", "sdpa"] | None = None
    dropout: Annotated[float, Field(ge=0, lt=1)] | None = None
    image_size: Count | None = None
    classes: Count | None = None
    target: str | None = None
    arguments: dict[str, Any] = {}
    inputs: dict[str, ModelInput] = {}
    loss: str = "output.loss"
    blocks: str | None = None

    def resolved(self) -> ModelSection:
        """Return the same model with its size written out as dimensions and every default filled in."""
        if self.family is None:
            return self
        family = FAMILIES[self.family]
        given = {name: getattr(self, name) for name in family.dimensions if getattr(self, name) is not None}
        dimensions = {**family.defaults, **family.sizes.get(self.size or "", {}), **given}
        if "kv_heads" in family.dimensions:
            dimensions.setdefault("kv_heads", dimensions.get("heads"))
        return self.model_copy(update={**dimensions, "size": None})


class BatchSection(Section):
    """size: samples of one forward call of a data-parallel rank; of a pipeline, of all its micro-batches together, in
    each replica of it. sequence_length: tokens a sample (token models).
    """

    size: Count
    sequence_length: Count | None = None


class OptimizerSection(Section):
    name: Literal["adamw", "sgd"] = "adamw"
    implementation: Literal["foreach", "fused", "for-loop"] = "foreach"
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    max_grad_norm: Annotated[float, Field(gt=0)] | None = None


class EveryK(Section):
    every: Count


class TrainingSection(Section):
    gradient_accumulation: MicroBatches = 1
    activation_checkpointing: Literal["none", "full", "selective"] | EveryK = "none"
    compile: bool = False
    memory_format: Literal["contiguous", "channels_last"] = "contiguous"


class MixedPrecisionSection(Section):
    """FSDP's policy. param: what forward and backward compute in; absent: the parameters' own. reduce: what gradients
    are reduced in; absent: as param.
    """

    param: Literal["fp32", "bf16", "fp16"] | None = None
    reduce: Literal["fp32", "bf16", "fp16"] | None = None


def _resharding(value: object, check: ValidatorFunctionWrapHandler) -> object:
    """One rule for a value that may be of several types, of which pydantic would name the first alone."""
    try:
        return check(value)
    except ValidationError:
        raise PydanticCustomError("resharding", "Input should be true, false or a number of ranks") from None


Resharding = Annotated[StrictBool | Count | None, WrapValidator(_resharding)]


class FsdpSection(Section):
    """How zero2 and zero3 shard, as torch's fully_shard does.

    wrap: a group of parameters for each block and one for the rest (``blocks``), or one for all (``root``).
    reshard_after_forward: overrides the strategy's own, false for zero2 and true for zero3; a number of ranks keeps
    a part of so many's (1: false). replicate: copies of the sharded model (HSDP), each over consecutive ranks. offload:
    shards, their gradients and optimizer states live in pinned host memory, and the CPU runs the optimizer.
    forward_prefetch, backward_prefetch: how many of the next blocks in forward, or of those before in backward, each
    block gathers ahead; absent: torch's implicit way.
    """

    mixed_precision: MixedPrecisionSection | None = None
    wrap: Literal["blocks", "root"] = "blocks"
    reshard_after_forward: Resharding = None
    replicate: Count = 1
    offload: bool = False
    forward_prefetch: Count | None = None
    backward_prefetch: Count | None = None


Schedule = Literal[
    "gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "interleaved-zero-bubble", "zbv-zero-bubble", "dualpipev"
]
ONE_STAGE: tuple[Schedule, ...] = ("gpipe", "1f1b")
THERE_AND_BACK: tuple[Schedule, ...] = ("zbv-zero-bubble", "dualpipev")  # ranks have two stages, the last rank's meet
SPLITTING: tuple[Schedule, ...] = ("interleaved-zero-bubble", *THERE_AND_BACK)  # of inputs and weights, by themselves
IN_ROUNDS: tuple[Schedule, ...] = ("interleaved-1f1b", "interleaved-zero-bubble")


class PipelineSection(Section):
    """A pipeline, as torch.distributed.pipelining runs it.

    With ``dp`` there are so many replicas of it, under strategy ddp: ranks 0 to stages - 1 are the first, the next ones
    the second, ..., each with ``batch.size`` samples of its own; ranks that have the same stages reduce their gradients
    together, in the last of their backwards. Schedules that split backwards cannot.

    stages: ranks that the model is cut over. schedule: in which order they work. micro_batches: parts of the batch that
    follow each other through the pipeline. virtual_stages: parts of the model that each rank has, dealt out in turns
    (by ``zbv-zero-bubble`` and ``dualpipev``, which need two, there and back). layers: repeated blocks of each part of
    the model, in order; absent: such that the largest part has as few parameters as can be. That balances parameters,
    not time: embeddings count like all others, though looking tokens up takes hardly any time, so that the first part
    may have fewer blocks than it has time for. What was chosen is in the report; ``layers`` chooses otherwise.
    """

    stages: Annotated[int, Field(ge=2, le=MOST_LAYERS, strict=True)]
    schedule: Schedule = "1f1b"
    micro_batches: MicroBatches
    virtual_stages: Count = 1
    layers: tuple[Count, ...] | None = None

    @property
    def number_of_stages(self) -> int:
        """Stages of the model, in torch's sense: each rank has ``virtual_stages`` of them."""
        return self.stages * self.virtual_stages


SHARDED = ("zero1", "zero2", "zero3")  # strategies by which ranks share optimizer states, gradients or parameters


class ParallelismSection(Section):
    """dp: data-parallel ranks. strategy: naive (all-reduce of each gradient after backward), flat (one of all
    gradients), overlap (one a parameter, from hooks), ddp (torch's DistributedDataParallel), zero1 (ddp with a sharded
    optimizer), zero2 and zero3 (torch's fully_shard, parameters kept or gathered again for backward).
    bucket_cap_mb: in MiB; absent: torch's default, 25 after a first bucket of 1. zero1_form: broadcast (torch's
    ZeroRedundancyOptimizer; the default) or reduce-scatter (the paper's). parameters_as_bucket_view: of the former.
    fsdp: of zero2 and zero3. pp: a pipeline, of which dp counts the replicas.
    """

    dp: Ranks = 1
    strategy: Literal["none", "naive", "flat", "overlap", "ddp", "zero1", "zero2", "zero3"] = "none"
    bucket_cap_mb: Annotated[float, Field(gt=0, le=10**6)] | None = None
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    zero1_form: Literal["broadcast", "reduce-scatter"] | None = None
    parameters_as_bucket_view: bool | None = None
    fsdp: FsdpSection | None = None
    pp: PipelineSection | None = None

    @property
    def ranks(self) -> int:
        """In all."""
        return self.dp * (1 if self.pp is None else self.pp.stages)


class HardwareSection(Section):
    """profile: a catalog name or a file. gpus: in all, over the nodes. gpu_speeds: what each GPU does in the time in
    which one of the profile does 1; None: all are alike. nodes: those of the interconnect.
    """

    profile: str
    gpus: Ranks = 1
    gpu_speeds: tuple[Annotated[float, Field(gt=0, le=100)], ...] | None = None
    nodes: Ranks = 1
    interconnect: str | None = None


class Scenario(Section):
    """The whole question; see the module."""

    version: Literal[1] = 1
    name: str = "scenario"
    mode: Literal["train", "forward"] = "train"
    model: ModelSection
    batch: BatchSection
    precision: Precision = "fp32"
    optimizer: OptimizerSection = OptimizerSection()
    training: TrainingSection = TrainingSection()
    parallelism: ParallelismSection = ParallelismSection()
    hardware: HardwareSection
    _folder: Path | None = PrivateAttr(default=None)

    @property
    def folder(self) -> Path | None:
        """The folder of the file that the scenario was read from, where the module of its target is looked for first;
        None where there was no file, or there is no target.
        """
        return self._folder

    def found_in(self, folder: Path | None) -> Scenario:
        """The same scenario, read from a file in ``folder``."""
        if self.model.target is None:
            return self
        found = self.model_copy()
        found._folder = folder
        return found

    @property
    def matmul_tf32(self) -> bool:
        """Whether float32 matrix products may use TF32. Convolutions always may: torch's default."""
        return self.precision == "tf32"


def workload_of(scenario: Scenario) -> dict[str, Any]:
    """The part of the scenario that decides which operators run: what a trace is looked up by.

    Accumulation over two or more micro-batches is traced with two. TF32 changes kernels, not operators.
    """
    data = scenario.model_dump(mode="json", include={"mode", "model", "batch", "precision", "optimizer", "training"})
    data["model"] = scenario.model.resolved().model_dump(mode="json", exclude_none=True)
    data["precision"] = "fp32" if scenario.precision == "tf32" else scenario.precision
    data["training"]["gradient_accumulation"] = min(scenario.training.gradient_accumulation, 2)
    if scenario.mode == "forward":
        del data["optimizer"]
        data["training"] = {"memory_format": scenario.training.memory_format}
    return data


def workload_digest(workload: dict[str, Any]) -> str:
    """Twelve hexadecimal digits that name a workload."""
    return hashlib.sha256(json.dumps(workload, sort_keys=True).encode()).hexdigest()[:12]
