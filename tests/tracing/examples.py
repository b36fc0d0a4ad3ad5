"""Small modules of a user's own, one behaviour each, to be traced as targets."""

import torch
from torch import nn

from perfmodel.trace.trace import EventKind
from perfmodel.tracing.step import trace_step
from tests.tracing.recordings import scenario_of

F = nn.functional
WIDTH, LENGTH, BATCH = 64, 16, 2


class Example(nn.Module):
    """Calls the function of that name, below, with its input and one square weight."""

    def __init__(self, function):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
        self.function = globals()[function]

    def forward(self, x):
        return self.function(x, self.weight)


class Layer(nn.Module):
    """Wraps a layer of torch.nn, made by an expression."""

    def __init__(self, layer):
        super().__init__()
        self.layer = eval(layer, {"nn": nn, "torch": torch})

    def forward(self, x):
        return self.layer(x)


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, dropout=0.1, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


def mean_square(module, inputs):
    """The loss of every example."""
    output = module(inputs["x"])
    return output.float().pow(2).mean()


def trace_target(name, arguments, precision="fp32", shape=("batch", "sequence", WIDTH), dtype="float32", **keys):
    model = {
        "target": f"tests.tracing.examples:{name}",
        "arguments": arguments,
        "inputs": {"x": {"shape": shape, "dtype": dtype}},
        "loss": "tests.tracing.examples:mean_square",
    }
    batch = {"size": BATCH, "sequence_length": LENGTH}
    return trace_step(scenario_of({"model": model, "batch": batch, "precision": precision, **keys}), allow_import=True)


def forward_of(function, precision="fp32", **keys):
    """Every operator that the example of this name runs in forward."""
    return module_operations(trace_target("Example", {"function": function}, precision, **keys))


def module_operations(trace):
    """The operators between entering the module and leaving it, in the steady step."""
    steady, module = trace.steady, 0
    entered = (steady.kind == EventKind.MODULE_ENTER) & (steady.a == module)
    left = (steady.kind == EventKind.MODULE_EXIT) & (steady.a == module)
    within = slice(int(entered.argmax()), int(left.argmax()))
    return [trace.operations[a] for a in steady.a[within][steady.kind[within] == EventKind.OP]]


def texts(operations):
    """``mm(float32[2,2], float32[2,2]) -> float32[2,2]``: tensors only."""
    return [
        f"{op.base_name}({', '.join(t.text for t in op.input_tensors())}) -> {', '.join(t.text for t in op.outputs)}"
        for op in operations
    ]


# Functions of x [2, 16, 64] and weight [64, 64]


def linear(x, weight):
    return F.linear(x, weight)


def linear_twice(x, weight):
    return F.linear(F.linear(x, weight), weight)


def linear_outside_autocast(x, weight):
    with torch.autocast("cuda", enabled=False):
        return F.linear(x, weight)


def scaled_where_autocast_is_on(x, weight):
    assert torch.is_autocast_enabled() == torch.is_autocast_enabled("cuda")
    return x.mul(2) * weight[0] if torch.is_autocast_enabled("cuda") else x * weight[0]


def default_autocast_dtype(x, weight):
    with torch.autocast("cuda"):
        return F.linear(x, weight).float()


def matvec_twice(x, weight):
    return (torch.mv(weight, x[0, 0]) + torch.mv(weight, x[0, 1])).float()


def total(x, weight):
    return x.bfloat16().sum() * weight


def explicit_total(x, weight):
    return x.bfloat16().sum(dtype=torch.bfloat16) * weight


def norm(x, weight):
    return x.bfloat16().norm() * weight


def power(x, weight):
    return x.bfloat16().pow(2) @ weight


def promoted(x, weight):
    return torch.addcmul(x.bfloat16(), x.bfloat16(), x) * weight[0]


def concatenated(x, weight):
    return torch.cat([x.bfloat16(), x]) * weight[0]


def layer_norm(x, weight):
    return F.layer_norm(x.bfloat16(), (WIDTH,)) * weight[0]


def dropout(x, weight):
    return F.dropout(x, 0.1) * weight[0]


def dropout_of_nothing(x, weight):
    return F.dropout(x, 0.0) * weight[0]


def dropout_of_everything(x, weight):
    return F.dropout(x, 1.0) * weight[0]


def half_softmax(x, weight):
    return F.softmax(x.half(), -1, dtype=torch.float32) * weight[0]


def bfloat16_softmax(x, weight):
    return F.softmax(x.bfloat16(), -1, dtype=torch.float32) * weight[0]


def half_log_softmax(x, weight):
    return F.log_softmax(x.half(), -1, dtype=torch.float32) * weight[0]


def cuda_answers(x, weight):
    assert x.is_cuda and not x.is_cpu and x.device == torch.device("cuda", 0) and x.get_device() == 0
    assert weight.device.type == "cuda" and torch.zeros_like(x).device.type == "cuda"
    return x * weight[0]


def made_on_host(x, weight):
    assert torch.zeros(3).device.type == "cpu" and torch.tensor(1.0).is_cpu
    return x * weight[0]


def made_on_device(x, weight):
    assert torch.zeros(3, device="cuda").is_cuda and torch.arange(3, device=x.device).is_cuda
    return x * weight[0]


def moved_to_device(x, weight):
    return x * torch.arange(WIDTH).to("cuda") * torch.ones(WIDTH).cuda() * weight[0]


def moved_without_waiting(x, weight):
    return x * torch.ones(WIDTH).to(x.device, non_blocking=True) * weight[0]


def already_there(x, weight):
    return x.to("cuda").cuda().to(weight).to(weight.device) * weight[0]


def tensor_of_numbers(x, weight):
    return x * torch.tensor(2.0, device=x.device) * weight[0]


def moved_to_host(x, weight):
    assert not x.detach().mean().cpu().is_cuda
    return x * weight[0]


def reads_data(x, weight):
    return x * weight.sum().item()


def reads_counts(x, weight):
    counts = torch.arange(4, device=x.device)
    return x * weight[int(counts.sum() > 5)] if bool((counts == 3).any()) else x


def selects_by_data(x, weight):
    return x + x[x > 0].sum() * weight[0]


def sums_in_backward(x, weight):
    y = x * weight[0]
    return y.tanh() + y.sigmoid()


def sums_shared_in_backward(x, weight):
    runs_last = x * weight[1]
    y = x * weight[0]
    return y + y.tanh() + runs_last
