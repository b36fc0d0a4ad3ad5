"""Small steps that cover what no recording of a whole training run covers: optimizers, precisions, checkpointing, ..."""

import gzip
import json
from functools import cache

from perfmodel.tracing.step import trace_step
from tests.places import TESTS
from tests.tracing.recordings import scenario_of

DATA = TESTS / "data" / "cuda_variants" / "variants.json.gz"

_GPT = {"family": "gpt", "layers": 2, "width": 256, "heads": 4, "ffn_width": 512, "vocabulary": 1000}
_GPT2 = _GPT | {"family": "gpt2"}
_LLAMA = _GPT | {"family": "llama", "kv_heads": 2}
_BERT = _GPT | {"family": "bert"}
_RESNET = {"family": "resnet50", "image_size": 64}

VARIANTS = {
    "for-loop": {"model": _GPT, "optimizer": {"implementation": "for-loop"}},
    "fused": {"model": _GPT, "optimizer": {"implementation": "fused"}},
    "sgd-momentum-for-loop": {
        "model": _GPT,
        "optimizer": {"name": "sgd", "momentum": 0.9, "implementation": "for-loop"},
    },
    "sgd-fused": {"model": _GPT, "optimizer": {"name": "sgd", "momentum": 0.9, "implementation": "fused"}},
    "clipping": {"model": _GPT, "optimizer": {"max_grad_norm": 1.0}},
    "fp16": {"model": _GPT, "precision": "amp-fp16"},
    "fp16-clipping": {"model": _GPT, "precision": "amp-fp16", "optimizer": {"max_grad_norm": 1.0}},
    "fp16-fused": {"model": _GPT, "precision": "amp-fp16", "optimizer": {"implementation": "fused"}},
    "fp16-gpt2": {"model": _GPT2, "precision": "amp-fp16"},
    "accumulation": {"model": _GPT, "training": {"gradient_accumulation": 2}},
    "accumulation-amp": {"model": _GPT2, "precision": "amp-bf16", "training": {"gradient_accumulation": 2}},
    "checkpointing": {"model": _GPT, "training": {"activation_checkpointing": "full"}},
    "checkpointing-amp": {"model": _GPT2, "precision": "amp-bf16", "training": {"activation_checkpointing": "full"}},
    "checkpointing-selective": {
        "model": _GPT,
        "precision": "amp-bf16",
        "training": {"activation_checkpointing": "selective"},
    },
    "forward": {"model": _GPT, "mode": "forward"},
    "forward-gpt2-amp": {"model": _GPT2, "mode": "forward", "precision": "amp-bf16"},
    "forward-resnet": {"model": _RESNET, "mode": "forward"},
    "gpt-sdpa-amp": {"model": _GPT | {"attention": "sdpa"}, "precision": "amp-bf16"},
    "gpt-sdpa-fp32": {"model": _GPT | {"attention": "sdpa"}},
    "gpt-sdpa-large-head": {"model": _GPT | {"attention": "sdpa", "heads": 1}, "precision": "amp-bf16"},
    "gpt2-odd-head": {"model": _GPT2 | {"width": 240, "heads": 20}, "precision": "amp-bf16"},
    "llama-fp32": {"model": _LLAMA},
    "llama-eager-fp16": {"model": _LLAMA | {"attention": "eager"}, "precision": "amp-fp16"},
    "bert-fp32": {"model": _BERT},
    "bert-eager-amp": {"model": _BERT | {"attention": "eager"}, "precision": "amp-bf16"},
    "resnet-fp32": {"model": _RESNET},
    "resnet-fp16-channels-last": {
        "model": _RESNET,
        "precision": "amp-fp16",
        "training": {"memory_format": "channels_last"},
    },
    "resnet-bf16": {"model": _RESNET, "precision": "bf16"},
    "vgg-amp": {"model": {"family": "vgg16", "image_size": 64}, "precision": "amp-bf16"},
}


def variant(name):
    keys = VARIANTS[name]
    tokens = keys["model"]["family"] in ("gpt", "gpt2", "llama", "bert")
    batch = {"size": 2, "sequence_length": 64} if tokens else {"size": 2}
    return scenario_of(keys | {"batch": batch})


@cache
def traced_variant(name):
    return trace_step(variant(name))


@cache
def _recorded():
    return json.loads(gzip.decompress(DATA.read_bytes()))["variants"]


def recorded_variant(name):
    """``ops`` of a steady step on an H200, and ``requests`` to the allocator of another one, run without any mode."""
    return _recorded()[name]
