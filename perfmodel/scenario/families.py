"""The table of model families, one row each: what a scenario may say of a family, and how its modules are named.

To add a family, add a row here and a module of its name to :mod:`perfmodel.models.families`, which builds it. No torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from perfmodel.scenario.parameter_counts import (
    ParameterCounts,
    bert_parameters,
    gpt2_parameters,
    gpt_parameters,
    llama_parameters,
)


@dataclass(frozen=True)
class Cut:
    """Where a family is cut into the stages of a pipeline: names of the submodules that are no repeated blocks.

    Parameters
    ----------
    embeddings : tuple of str
        What the first stage has.
    head : tuple of str
        What the last stage has.
    parameters : callable
        Parameters of embeddings, of a block and of the head, by the resolved model and the sequence length.
    every : tuple of str
        What every stage has.
    """

    embeddings: tuple[str, ...]
    head: tuple[str, ...]
    parameters: Callable[[Any, int], ParameterCounts]
    every: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """One row of the table.

    Parameters
    ----------
    kind : {"token", "image"}
        What the inputs are: a batch of token sequences or of images.
    dimensions : tuple of str
        The keys of ``model`` that the family takes besides ``size``.
    defaults : dict
        Values of dimensions that neither the scenario nor its size gives.
    sizes : dict
        Dimensions by the name of a size; none if every scenario gives dimensions.
    blocks : tuple of str
        Names of the submodules whose children are the repeated blocks: what checkpointing, fully_shard and pipelines
        go by. Empty where nothing repeats. A family that is cut has one name.
    cut : Cut, optional
        None if the family cannot be cut into stages.
    """

    kind: Literal["token", "image"]
    dimensions: tuple[str, ...]
    defaults: dict[str, object]
    sizes: dict[str, dict[str, int]] = field(default_factory=dict)
    blocks: tuple[str, ...] = ()
    cut: Cut | None = None


_TRANSFORMER = ("layers", "width", "heads", "ffn_width", "vocabulary", "attention")


def _transformer(layers: int, width: int, heads: int, ffn_width: int, **more: int) -> dict[str, int]:
    return {"layers": layers, "width": width, "heads": heads, "ffn_width": ffn_width, **more}


# gpt: sizes of seed report 001 (CS336 assignment 2). gpt2: OpenAI's. llama: shapes of Llama 3.2 1B and 3B and 3.1 8B,
# head untied. bert: Devlin et al.
FAMILIES: dict[str, Family] = {
    "gpt": Family(
        kind="token",
        dimensions=_TRANSFORMER,
        defaults={"vocabulary": 10000, "attention": "eager"},
        sizes={
            "tiny": _transformer(2, 64, 4, 256, vocabulary=512),
            "small": _transformer(12, 768, 12, 3072),
            "medium": _transformer(24, 1024, 16, 4096),
            "large": _transformer(36, 1280, 20, 5120),
            "xl": _transformer(48, 1600, 25, 6400),
            "2.7b": _transformer(32, 2560, 32, 10240),
        },
        blocks=("layers",),
        cut=Cut(
            embeddings=("token_embeddings", "position_embeddings"),
            head=("ln_final", "lm_head"),
            parameters=gpt_parameters,
        ),
    ),
    "gpt2": Family(
        kind="token",
        dimensions=(*_TRANSFORMER, "dropout"),
        defaults={"vocabulary": 50257, "dropout": 0.1, "attention": "sdpa"},
        sizes={
            "124m": _transformer(12, 768, 12, 3072),
            "355m": _transformer(24, 1024, 16, 4096),
            "774m": _transformer(36, 1280, 20, 5120),
            "1.5b": _transformer(48, 1600, 25, 6400),
        },
        blocks=("transformer.h",),
        cut=Cut(
            embeddings=("transformer.wte", "transformer.wpe", "transformer.drop"),
            head=("transformer.ln_f", "lm_head"),
            parameters=gpt2_parameters,
        ),
    ),
    "llama": Family(
        kind="token",
        dimensions=(*_TRANSFORMER, "kv_heads"),
        defaults={"vocabulary": 32000, "attention": "sdpa"},
        sizes={
            "1b": _transformer(16, 2048, 32, 8192, kv_heads=8, vocabulary=128256),
            "3b": _transformer(28, 3072, 24, 8192, kv_heads=8, vocabulary=128256),
            "8b": _transformer(32, 4096, 32, 14336, kv_heads=8, vocabulary=128256),
        },
        blocks=("model.layers",),
        cut=Cut(
            embeddings=("model.embed_tokens",),
            head=("model.norm", "lm_head"),
            parameters=llama_parameters,
            every=("model.rotary_emb",),
        ),
    ),
    "bert": Family(
        kind="token",
        dimensions=(*_TRANSFORMER, "dropout"),
        defaults={"vocabulary": 30522, "dropout": 0.1, "attention": "sdpa"},
        sizes={"base": _transformer(12, 768, 12, 3072), "large": _transformer(24, 1024, 16, 4096)},
        blocks=("bert.encoder.layer",),
        cut=Cut(embeddings=("bert.embeddings",), head=("cls",), parameters=bert_parameters),
    ),
    "vgg16": Family(
        kind="image",
        dimensions=("image_size", "classes", "dropout"),
        defaults={"image_size": 224, "classes": 1000, "dropout": 0.5},
    ),
    "resnet50": Family(
        kind="image",
        dimensions=("image_size", "classes"),
        defaults={"image_size": 224, "classes": 1000},
        blocks=("layer1", "layer2", "layer3", "layer4"),
    ),
    "conv_stack": Family(
        kind="image",
        dimensions=("layers", "width", "image_size", "classes"),
        defaults={"layers": 4, "width": 64, "image_size": 224, "classes": 1000},
        blocks=("blocks",),
    ),
}
CUT_FAMILIES = tuple(name for name, family in FAMILIES.items() if family.cut is not None)
