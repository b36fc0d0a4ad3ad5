"""Operators that CPU tensors would run otherwise than CUDA tensors: dropout, softmax, norms, attention's wrapper."""

import pytest
import torch

from perfmodel.errors import PerfModelError
from perfmodel.tracing.cuda_composites import cuda_composites
from tests.tracing.examples import forward_of, module_operations, texts, trace_target
from tests.tracing.recordings import names_of

X = "float32[2,16,64]"


def layer_names(layer, precision="fp32", shape=("batch", "sequence", 64), **keys):
    trace = trace_target("Layer", {"layer": layer}, precision, shape, **keys)
    return [op.base_name for op in module_operations(trace)]


@pytest.mark.parametrize(
    ("function", "operators"),
    [
        ("dropout", [f"native_dropout({X}) -> {X}, bool[2,16,64]"]),
        ("dropout_of_nothing", []),
        ("dropout_of_everything", ["zeros() -> float32[]", f"mul({X}, float32[]) -> {X}"]),
        ("half_softmax", [f"_to_copy({X}) -> float16[2,16,64]", f"_softmax(float16[2,16,64]) -> {X}"]),
        ("half_log_softmax", [f"_to_copy({X}) -> float16[2,16,64]", f"_log_softmax(float16[2,16,64]) -> {X}"]),
        (
            "bfloat16_softmax",
            [f"_to_copy({X}) -> bfloat16[2,16,64]", f"_to_copy(bfloat16[2,16,64]) -> {X}", f"_softmax({X}) -> {X}"],
        ),
        (
            "layer_norm",
            [
                f"_to_copy({X}) -> bfloat16[2,16,64]",
                "native_layer_norm(bfloat16[2,16,64]) -> bfloat16[2,16,64], float32[2,16,1], float32[2,16,1]",
            ],
        ),
    ],
)
def test_functions(function, operators):
    assert texts(forward_of(function))[:-2] == operators  # the weight's row and a product end every example


@pytest.mark.parametrize(
    ("layer", "precision", "name"),
    [
        ("nn.BatchNorm1d(16)", "fp32", "cudnn_batch_norm"),
        ("nn.BatchNorm1d(16)", "bf16", "native_batch_norm"),
        ("nn.BatchNorm1d(16, affine=False)", "fp32", "native_batch_norm"),
        ("nn.LayerNorm(64)", "bf16", "native_layer_norm"),
        ("nn.RMSNorm(64)", "fp32", "_fused_rms_norm"),
        ("nn.RMSNorm(64)", "bf16", "_fused_rms_norm"),
    ],
)
def test_norms(layer, precision, name):
    dtype = "bfloat16" if precision == "bf16" else "float32"
    assert name in layer_names(f"nn.Sequential(nn.Linear(64, 64), {layer})", precision, dtype=dtype)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_rms_norm_in_another_dtype_than_its_weight_is_composed():
    layers = "nn.Sequential(nn.Linear(64, 64, dtype=torch.bfloat16), nn.RMSNorm(64))"
    operators = layer_names(layers, dtype="bfloat16")
    assert "_fused_rms_norm" not in operators
    assert "rsqrt" in operators


def test_the_fused_rms_norm_has_its_own_backward():
    trace = trace_target("Layer", {"layer": "nn.RMSNorm(64)"})
    assert "_fused_rms_norm_backward" in names_of(trace, trace.steady, "backward")


def test_attention_inside_a_layer_of_torch():
    trace = trace_target("SelfAttention", {}, "amp-bf16")
    assert "_scaled_dot_product_cudnn_attention" in names_of(trace, trace.steady, "forward")
    assert "_scaled_dot_product_cudnn_attention_backward" in names_of(trace, trace.steady, "backward")


@pytest.mark.parametrize("layer", ["LSTM", "GRU", "RNN"])
def test_recurrent_layers_are_refused(layer):
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # this build of torch says that it has no cuDNN
        with pytest.raises(PerfModelError, match="LSTM, GRU and RNN layers cannot be traced"):
            trace_target("Layer", {"layer": f"nn.{layer}(64, 64)"})


def test_cpu_runs_its_own_operators_afterwards():
    torch.manual_seed(0)
    before = torch.nn.functional.dropout(torch.ones(100), 0.5)
    with cuda_composites():
        pass
    torch.manual_seed(0)
    assert torch.equal(torch.nn.functional.dropout(torch.ones(100), 0.5), before)
    assert torch.nn.functional.softmax(torch.ones(4), 0).tolist() == [0.25] * 4
