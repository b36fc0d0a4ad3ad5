"""The model families by name: their sizes, the dimensions each takes, and what must hold between them. No torch.

The modules themselves are built in ``models``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from perfmodel.errors import PerfModelError, did_you_mean
from perfmodel.limits import MOST_LAYERS

if TYPE_CHECKING:
    from perfmodel.scenario.scenario import ModelSection, Scenario


@dataclass(frozen=True)
class Family:
    """kind: token or image models. sizes: dimensions by size name. defaults: dimensions where nothing is said."""

    kind: str
    sizes: dict[str, dict[str, int]]
    defaults: dict[str, object] = field(default_factory=dict)
    dimensions: tuple[str, ...] = ("layers", "width", "heads", "ffn_width", "vocabulary", "dropout", "attention")


def _transformer(layers: int, width: int, heads: int, ffn_width: int, **more: int) -> dict[str, int]:
    return {"layers": layers, "width": width, "heads": heads, "ffn_width": ffn_width, **more}


# gpt: sizes of seed report 001 (CS336 assignment 2). gpt2: OpenAI's. llama: shapes of Llama 3.2 1B and 3B and 3.1 8B,
# head untied. bert: Devlin et al.
FAMILIES: dict[str, Family] = {
    "gpt": Family(
        "token",
        {
            "tiny": _transformer(2, 64, 4, 256, vocabulary=512),
            "small": _transformer(12, 768, 12, 3072),
            "medium": _transformer(24, 1024, 16, 4096),
            "large": _transformer(36, 1280, 20, 5120),
            "xl": _transformer(48, 1600, 25, 6400),
            "2.7b": _transformer(32, 2560, 32, 10240),
        },
        {"vocabulary": 10000, "attention": "eager"},
        ("layers", "width", "heads", "ffn_width", "vocabulary", "attention"),
    ),
    "gpt2": Family(
        "token",
        {
            "124m": _transformer(12, 768, 12, 3072),
            "355m": _transformer(24, 1024, 16, 4096),
            "774m": _transformer(36, 1280, 20, 5120),
            "1.5b": _transformer(48, 1600, 25, 6400),
        },
        {"vocabulary": 50257, "dropout": 0.1, "attention": "sdpa"},
    ),
    "llama": Family(
        "token",
        {
            "1b": _transformer(16, 2048, 32, 8192, kv_heads=8, vocabulary=128256),
            "3b": _transformer(28, 3072, 24, 8192, kv_heads=8, vocabulary=128256),
            "8b": _transformer(32, 4096, 32, 14336, kv_heads=8, vocabulary=128256),
        },
        {"vocabulary": 32000, "attention": "sdpa"},
        ("layers", "width", "heads", "kv_heads", "ffn_width", "vocabulary", "attention"),
    ),
    "bert": Family(
        "token",
        {"base": _transformer(12, 768, 12, 3072), "large": _transformer(24, 1024, 16, 4096)},
        {"vocabulary": 30522, "dropout": 0.1, "attention": "sdpa"},
    ),
    "vgg16": Family(
        "image", {}, {"image_size": 224, "classes": 1000, "dropout": 0.5}, ("image_size", "classes", "dropout")
    ),
    "resnet50": Family("image", {}, {"image_size": 224, "classes": 1000}, ("image_size", "classes")),
    "conv_stack": Family(
        "image",
        {},
        {"layers": 4, "width": 64, "image_size": 224, "classes": 1000},
        ("layers", "width", "image_size", "classes"),
    ),
}

_TARGET_ONLY = ("target", "arguments", "inputs", "loss", "blocks")
_REQUIRED_TOKEN = ("layers", "width", "heads", "ffn_width")


def check_model(model: ModelSection) -> None:
    """Raise a PerfModelError where family, size and dimensions do not fit together."""
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
    for name in (
        "layers",
        "width",
        "heads",
        "kv_heads",
        "ffn_width",
        "vocabulary",
        "attention",
        "dropout",
        "image_size",
        "classes",
    ):
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
    whole = resolved(model)
    if whole.layers is not None and whole.layers > MOST_LAYERS:
        raise PerfModelError(
            f"model.layers must be at most {MOST_LAYERS:,} (got {whole.layers:,}): each is traced. Ask for fewer, from "
            "which more follow: time and memory grow by the same with each."
        )
    if family.kind == "token":
        _check_transformer(whole)


def _check_transformer(model: ModelSection) -> None:
    missing = [name for name in _REQUIRED_TOKEN if getattr(model, name) is None]
    if missing:
        raise PerfModelError(
            f"model.{missing[0]} must be given where model.size is not. "
            f"Set a size or every one of {', '.join(_REQUIRED_TOKEN)}."
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
    found = [str(n) for n in range(1, min(number, most) + 1) if number % n == 0]
    return " or ".join([", ".join(found[:-1]), found[-1]]) if len(found) > 1 else found[0]


def resolved(model: ModelSection) -> ModelSection:
    """The same model with its size written out as dimensions and every default filled in."""
    if model.family is None:
        return model
    family = FAMILIES[model.family]
    given = {name: getattr(model, name) for name in family.dimensions if getattr(model, name) is not None}
    dimensions = {**family.defaults, **family.sizes.get(model.size or "", {}), **given}
    if "kv_heads" in family.dimensions:
        dimensions.setdefault("kv_heads", dimensions.get("heads"))
    return model.model_copy(update={**dimensions, "size": None})


def check_batch(scenario: Scenario) -> None:
    """Token models need a sequence length; image models must not have one."""
    model, length = scenario.model, scenario.batch.sequence_length
    if model.family is None:
        uses = any("sequence" in given.shape for given in model.inputs.values())
        if uses and length is None:
            raise PerfModelError("batch.sequence_length must be given where model.inputs uses `sequence`. Add it.")
        return
    kind = FAMILIES[model.family].kind
    if kind == "token" and length is None:
        raise PerfModelError(f"batch.sequence_length must be given for {model.family}. Add it, in tokens.")
    if kind == "image" and length is not None:
        raise PerfModelError(
            f"batch.sequence_length must be left out for {model.family} (got {length}). Use model.image_size."
        )
