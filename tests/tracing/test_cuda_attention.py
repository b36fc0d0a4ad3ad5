"""Which attention backend CUDA would run, by dtype, heads, mask and layout."""

import pytest
import torch

from perfmodel.tracing.cuda_attention import choose_backend


def tensors(dtype=torch.bfloat16, heads=4, kv_heads=None, length=64, kv_length=None, head_dim=64, value_dim=None):
    kv_heads, kv_length, value_dim = kv_heads or heads, kv_length or length, value_dim or head_dim
    return (
        torch.empty(2, heads, length, head_dim, dtype=dtype, device="meta"),
        torch.empty(2, kv_heads, kv_length, head_dim, dtype=dtype, device="meta"),
        torch.empty(2, kv_heads, kv_length, value_dim, dtype=dtype, device="meta"),
    )


@pytest.mark.parametrize(
    ("keys", "backend"),
    [
        ({}, "cudnn"),
        ({"dtype": torch.float16}, "cudnn"),
        ({"dtype": torch.float32}, "efficient"),
        ({"dtype": torch.float64}, "math"),
        ({"head_dim": 256}, "cudnn"),
        ({"head_dim": 264}, "efficient"),
        ({"head_dim": 60}, "flash"),
        ({"head_dim": 60, "value_dim": 64}, "math"),
        ({"head_dim": 64, "value_dim": 128}, "cudnn"),
        ({"dtype": torch.float32, "head_dim": 6}, "math"),
        ({"kv_length": 1}, "flash"),
    ],
)
def test_the_first_backend_that_takes_the_tensors(keys, backend):
    assert choose_backend(*tensors(**keys), None, False, False) == backend


def test_grouped_heads_need_to_be_asked_for():
    assert choose_backend(*tensors(kv_heads=2), None, True, True) == "cudnn"
    assert choose_backend(*tensors(kv_heads=2), None, True, False) == "math"
    assert choose_backend(*tensors(torch.float32, kv_heads=2), None, True, True) == "math"


def test_flash_takes_no_mask_and_no_causal_rectangle():
    mask = torch.ones(64, 64, dtype=torch.bool)
    assert choose_backend(*tensors(head_dim=60), mask, False, False) == "math"
    assert choose_backend(*tensors(head_dim=60, kv_length=32), None, True, False) == "math"
    assert choose_backend(*tensors(head_dim=60, kv_length=32), None, False, False) == "flash"


def test_what_is_not_four_dimensional_or_is_empty_runs_the_composite():
    query, key, value = tensors()
    assert choose_backend(query[0], key[0], value[0], None, False, False) == "math"
    assert choose_backend(query[:0], key[:0], value[:0], None, False, False) == "math"


def test_last_dimensions_must_be_dense():
    query, key, value = (tensor.transpose(2, 3) for tensor in tensors())
    assert choose_backend(query, key, value, None, False, False) == "math"


def test_switched_off_backends_are_not_chosen():
    with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.FLASH_ATTENTION]):
        assert choose_backend(*tensors(), None, False, False) == "flash"
    with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.MATH]):
        assert choose_backend(*tensors(), None, False, False) == "math"
