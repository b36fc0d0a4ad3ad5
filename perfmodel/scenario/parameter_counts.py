"""How many parameters a family's embeddings, blocks and head have, in closed form, so that cutting needs no torch.

A linear layer from m to n features has m n weights and, with a bias, n more; a norm of width w has w weights and, as a
LayerNorm, w biases. Norms of ``gpt`` and ``llama`` are RMSNorms, and their linear layers have no biases. Each function
takes the resolved ``model`` of a scenario and the sequence length: ``gpt`` learns a position for each token.

The modules themselves are built in ``models``; tests/models/test_stages.py holds these numbers against theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

GPT2_POSITIONS, BERT_POSITIONS = 1024, 512  # of which a longer sequence needs more
BERT_SEGMENTS = 2


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of parameters of the pieces that a model is cut between.

    Attributes
    ----------
    embeddings : int
        Of everything before the blocks.
    block : int
        Of one repeated block.
    head : int
        Of everything behind the blocks, a matrix that the whole model shares with the embeddings included: the last
        stage has a copy of it.
    """

    embeddings: int
    block: int
    head: int


def gpt_parameters(model: Any, sequence_length: int) -> ParameterCounts:
    width = model.width
    return ParameterCounts(
        embeddings=(model.vocabulary + sequence_length) * width,
        block=4 * width * width + 2 * width * model.ffn_width + 2 * width,
        head=width + width * model.vocabulary,
    )


def gpt2_parameters(model: Any, sequence_length: int) -> ParameterCounts:
    width = model.width
    return ParameterCounts(
        embeddings=(model.vocabulary + max(GPT2_POSITIONS, sequence_length)) * width,
        block=_block_with_biases(width, model.ffn_width),
        head=2 * width + width * model.vocabulary,
    )


def llama_parameters(model: Any, sequence_length: int) -> ParameterCounts:
    width = model.width
    key_width = width // model.heads * model.kv_heads
    return ParameterCounts(
        embeddings=model.vocabulary * width,
        block=2 * width * width + 2 * width * key_width + 3 * width * model.ffn_width + 2 * width,
        head=width + width * model.vocabulary,
    )


def bert_parameters(model: Any, sequence_length: int) -> ParameterCounts:
    width, vocabulary = model.width, model.vocabulary
    rows = vocabulary + max(BERT_POSITIONS, sequence_length) + BERT_SEGMENTS
    transform = width * width + width + 2 * width  # a linear layer and a norm before the decoder, which has a bias
    return ParameterCounts(
        embeddings=rows * width + 2 * width,
        block=_block_with_biases(width, model.ffn_width),
        head=transform + width * vocabulary + vocabulary,
    )


def _block_with_biases(width: int, ffn_width: int) -> int:
    """Count four projections of attention, two of the feed-forward network, and two LayerNorms."""
    attention, feed_forward = 4 * (width * width + width), 2 * width * ffn_width + ffn_width + width
    return attention + feed_forward + 2 * 2 * width
