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
    """A keyword argument of a user's forward.

    Attributes
    ----------
    shape : tuple of int or str
        Integers, and the words ``batch`` and ``sequence`` for ``batch.size`` and ``batch.sequence_length``.
    dtype : str
    high : int, optional
        Integers are random numbers below it.
    """

    shape: tuple[Annotated[int, Field(ge=0, le=10**12)] | Literal["batch", "sequence"], ...]
    dtype: str = "float32"
    high: Count | None = None


class ModelSection(Section):
    """A model: a family with a size or dimensions, or a target of the user's own.

    Attributes
    ----------
    family : str, optional
        A row of :data:`~perfmodel.scenario.families.FAMILIES`, which says what dimensions it takes: the keys from
        ``layers`` to ``classes``.
    size : str, optional
        One of the family's sizes; dimensions that are given as well override the size's.
    target : str, optional
        A callable that returns the module, as ``package.module:name``, called with ``arguments``.
    inputs : dict
        What its forward is called with.
    loss : str
        ``output.loss``, ``cross_entropy`` or a function ``package.module:name`` of the module and its inputs.
    blocks : str, optional
        The submodule of the target whose children are the repeated blocks.
    """

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
    """What one forward call computes.

    Attributes
    ----------
    size : int
        Samples of one forward call of a data-parallel rank; of a pipeline, of all its micro-batches together, in each
        replica of it.
    sequence_length : int, optional
        Tokens of a sample (token models).
    """

    size: Count
    sequence_length: Count | None = None


class OptimizerSection(Section):
    """The optimizer, one of torch's, in the implementation that is named.

    Attributes
    ----------
    max_grad_norm : float, optional
        Gradients are clipped to it; None: they are not clipped.
    """

    name: Literal["adamw", "sgd"] = "adamw"
    implementation: Literal["foreach", "fused", "for-loop"] = "foreach"
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    max_grad_norm: Annotated[float, Field(gt=0)] | None = None


class EveryK(Section):
    """Checkpointing of one block in ``every``."""

    every: Count


class TrainingSection(Section):
    """How a step is trained.

    Attributes
    ----------
    gradient_accumulation : int
        Micro-batches of ``batch.size`` samples before each optimizer step.
    activation_checkpointing : str or EveryK
        ``none``; ``full``: every repeated block is recomputed in backward; ``selective``: all of it but GEMMs,
        convolutions and attention; ``{every: k}``: one block in k.
    compile : bool
        Must be false: only eager steps are modelled.
    """

    gradient_accumulation: MicroBatches = 1
    activation_checkpointing: Literal["none", "full", "selective"] | EveryK = "none"
    compile: bool = False
    memory_format: Literal["contiguous", "channels_last"] = "contiguous"


class MixedPrecisionSection(Section):
    """FSDP's policy of dtypes.

    Attributes
    ----------
    param : str, optional
        What forward and backward compute in; None: in the parameters' own dtype.
    reduce : str, optional
        What gradients are reduced in; None: as ``param``.
    """

    param: Literal["fp32", "bf16", "fp16"] | None = None
    reduce: Literal["fp32", "bf16", "fp16"] | None = None


def _resharding(value: object, check: ValidatorFunctionWrapHandler) -> object:
    """Give one rule for a value that may be of several types, of which pydantic would name the first alone."""
    try:
        return check(value)
    except ValidationError:
        raise PydanticCustomError("resharding", "Input should be true, false or a number of ranks") from None


Resharding = Annotated[StrictBool | Count | None, WrapValidator(_resharding)]


class FsdpSection(Section):
    """How zero2 and zero3 shard, as torch's fully_shard does.

    Attributes
    ----------
    wrap : {"blocks", "root"}
        A group of parameters for each block and one for the rest, or one for all.
    reshard_after_forward : bool or int, optional
        Overrides the strategy's own value, which is false for zero2 and true for zero3. With a number of ranks, that
        many share the parameters between forward and backward (1 is the same as false).
    replicate : int
        Copies of the sharded model (HSDP), each over consecutive ranks.
    offload : bool
        Shards, their gradients and optimizer states live in pinned host memory, and the CPU runs the optimizer.
    forward_prefetch, backward_prefetch : int, optional
        How many of the following blocks, in the order of forward or of backward, each block gathers ahead; None:
        torch's implicit way.
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

    Attributes
    ----------
    stages : int
        Ranks that the model is cut over.
    schedule : str
        The order in which they work.
    micro_batches : int
        Pieces of the batch that follow each other through the pipeline.
    virtual_stages : int
        Stages of the model, in torch's sense, that each rank has. They are dealt out in turns; ``zbv-zero-bubble`` and
        ``dualpipev``, which need two, deal them out there and back.
    layers : tuple of int, optional
        Repeated blocks of each stage of the model, in order; None: such that the largest stage has as few parameters
        as can be. That balances parameters, not time: embeddings count like all others, though looking tokens up takes
        hardly any time, so that the first stage may have fewer blocks than it has time for. What was chosen is in the
        report; ``layers`` chooses otherwise.

    Notes
    -----
    With ``dp`` there are so many replicas of the pipeline, under strategy ddp: ranks 0 to stages - 1 are the first, the
    next ones the second, and so on, each with ``batch.size`` samples of its own. Ranks that have the same stages reduce
    their gradients together, in the last of their backwards. Schedules that split backwards cannot.
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
    """How ranks share the work.

    Attributes
    ----------
    dp : int
        Data-parallel ranks; with a pipeline, its replicas.
    strategy : str
        ``naive`` (all-reduce of each gradient after backward), ``flat`` (one all-reduce of all gradients), ``overlap``
        (one for each parameter, from hooks), ``ddp`` (torch's DistributedDataParallel), ``zero1`` (ddp with a sharded
        optimizer), ``zero2`` and ``zero3`` (torch's fully_shard, which keeps parameters for backward or gathers them
        again).
    bucket_cap_mb : float, optional
        Size of a bucket in MiB; None: torch's default, 25 after a first bucket of 1.
    zero1_form : str, optional
        ``broadcast`` (torch's ZeroRedundancyOptimizer; the default) or ``reduce-scatter`` (the paper's).
    parameters_as_bucket_view : bool, optional
        A setting of zero1's form ``broadcast``.
    fsdp : FsdpSection, optional
        Settings of zero2 and zero3.
    pp : PipelineSection, optional
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
        """Number of ranks: data-parallel ones x stages."""
        return self.dp * (1 if self.pp is None else self.pp.stages)


class HardwareSection(Section):
    """What the scenario runs on.

    Attributes
    ----------
    profile : str
        A name of the catalog or a file.
    gpus : int
        GPUs of all nodes together.
    gpu_speeds : tuple of float, optional
        For each GPU, its speed relative to the profile's; None: all are equal to it.
    nodes : int
        Nodes of the interconnect.
    interconnect : str, optional
        One that the profile has measured; None: the profile's own.
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
        """Folder of the file that the scenario was read from, or None if there was no file or there is no target.

        The module of the target is looked for there first.
        """
        return self._folder

    def found_in(self, folder: Path | None) -> Scenario:
        """Return the same scenario as if it was read from a file in ``folder``."""
        if self.model.target is None:
            return self
        copy = self.model_copy()
        copy._folder = folder
        return copy

    @property
    def matmul_tf32(self) -> bool:
        """Whether float32 GEMMs may use TF32. Convolutions always may: torch's default."""
        return self.precision == "tf32"


def workload_of(scenario: Scenario) -> dict[str, Any]:
    """Return the keys that decide which operators run: what a trace is looked up by.

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
    """Return twelve hexadecimal digits that name a workload."""
    return hashlib.sha256(json.dumps(workload, sort_keys=True).encode()).hexdigest()[:12]
