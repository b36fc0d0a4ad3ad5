"""What Hugging Face's families share: the modules are theirs, made from configurations with random weights.

Nothing is downloaded, and none of them keeps a key-value cache.
"""

from __future__ import annotations

from typing import Any

import torch

from perfmodel.errors import PerfModelError


def transformers_module() -> Any:
    """Return the package ``transformers``.

    Raises
    ------
    PerfModelError
        If it is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise PerfModelError(
            "model.family: gpt2, llama and bert need transformers (not installed). Run `pip install .[torch]`."
        ) from error
    return transformers


def for_causal_blocks(config: Any, x: torch.Tensor) -> dict[str, Any]:
    """Return the keywords that Hugging Face's decoders call every block with.

    Parameters
    ----------
    config : PretrainedConfig
    x : torch.Tensor
        Embedded tokens, or hidden states, of which only shape, type and device matter.
    """
    from transformers.masking_utils import create_causal_mask

    positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
    mask = create_causal_mask(
        config=config, inputs_embeds=x, attention_mask=None, past_key_values=None, position_ids=positions
    )
    return {"attention_mask": mask, "position_ids": positions, "use_cache": False}


def next_token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss of Hugging Face's decoders, which take the next token as label, and float32 logits."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    loss: torch.Tensor = ForCausalLMLoss(logits, labels, vocab_size=logits.shape[-1])
    return loss
