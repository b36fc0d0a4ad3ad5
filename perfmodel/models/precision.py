"""The dtypes that a scenario's precision stands for."""

from __future__ import annotations

import torch

HALF: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}  # of parameters
AUTOCAST_DTYPES = {"amp-bf16": torch.bfloat16, "amp-fp16": torch.float16}
