"""The step: its phases, what each variant does to gradients, and what it leaves behind."""

import gc
import weakref

import pytest
import torch

from perfmodel.models.step import Reducer, TrainingStep, build_module, make_inputs, make_optimizer, precision_switches
from perfmodel.scenario.scenario import Scenario

TINY = {"family": "gpt", "size": "tiny"}
GPT2 = {"family": "gpt2", "layers": 2, "width": 16, "heads": 2, "ffn_width": 32, "vocabulary": 50, "dropout": 0.0}
STACK = {"family": "conv_stack", "layers": 2, "width": 4, "image_size": 8, "classes": 3}


def made(model=TINY, **keys):
    """A step with its module, seeded; the batch fits the model."""
    batch = {"size": 2} if model["family"] == "conv_stack" else {"size": 2, "sequence_length": 8}
    scenario = Scenario(model=model, batch=batch, hardware={"profile": "none"}, **keys)
    torch.manual_seed(0)
    module = build_module(scenario)
    inputs = make_inputs(scenario, "cpu", torch.Generator().manual_seed(0))
    optimizer = make_optimizer(module.parameters(), scenario) if scenario.mode == "train" else None
    return TrainingStep(module, inputs, optimizer, scenario)


def phases(step):
    marks = []
    step.run(lambda phase, micro_batch: marks.append((phase, micro_batch)))
    return marks


def gradients(step):
    """Gradients that one step computes."""
    step.run()
    return [parameter.grad.clone() for parameter in step.module.parameters()]


PLAIN = [("zero_grad", -1), ("forward", 0), ("backward", 0), ("optimizer", -1), ("end", -1)]


def test_phases_of_a_plain_step():
    assert phases(made()) == PLAIN


def test_phases_with_accumulation_and_clipping():
    step = made(training={"gradient_accumulation": 2}, optimizer={"max_grad_norm": 1.0})
    assert phases(step) == [
        ("zero_grad", -1),
        ("forward", 0),
        ("backward", 0),
        ("forward", 1),
        ("backward", 1),
        ("clip", -1),
        ("optimizer", -1),
        ("end", -1),
    ]


class Told(Reducer):
    """Writes down what it is called for, and whether the optimizer has moved anything yet."""

    phase = "reduce"

    def __init__(self, module):
        self.calls = []
        self.weight = next(module.parameters())
        self.before = self.weight.detach().clone()

    def tell(self, name):
        self.calls.append((name, not torch.equal(self.weight, self.before)))

    def micro_batch(self, last):
        self.tell(f"last={last}")
        return super().micro_batch(last)

    def after_backward(self):
        self.tell("after_backward")

    def clip(self, module, max_norm):
        self.tell(f"clip {max_norm}")

    def after_step(self):
        self.tell("after_step")


def test_a_reducer_is_called_around_what_it_shares():
    step = made(training={"gradient_accumulation": 2}, optimizer={"max_grad_norm": 1.0})
    step.reducer = Told(step.module)
    assert [phase for phase, _ in phases(step)][5:] == ["reduce", "clip", "optimizer", "end"]
    names = ["last=False", "last=True", "after_backward", "clip 1.0", "after_step"]
    assert step.reducer.calls == [(name, name == "after_step") for name in names]


def test_forward_only_has_one_phase_and_no_gradients():
    step = made(mode="forward")
    assert phases(step) == [("forward", 0), ("end", -1)]
    assert all(parameter.grad is None for parameter in step.module.parameters())


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "amp-bf16", "amp-fp16"])
@pytest.mark.parametrize("model", [TINY, GPT2, STACK], ids=["gpt", "gpt2", "conv_stack"])
def test_every_precision_moves_the_weights(model, precision):
    step = made(model, precision=precision, optimizer={"max_grad_norm": 1.0})
    before = [parameter.clone() for parameter in step.module.parameters()]
    assert phases(step) == [*PLAIN[:3], ("clip", -1), *PLAIN[3:]]
    after = list(step.module.parameters())
    assert all(torch.isfinite(parameter).all() for parameter in after)
    assert any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_autocast_computes_in_its_type_and_keeps_parameters():
    step = made(precision="amp-bf16")
    seen = []
    step.module.lm_head.register_forward_hook(lambda module, arguments, output: seen.append(output.dtype))
    step.run()
    assert seen == [torch.bfloat16]
    assert {parameter.grad.dtype for parameter in step.module.parameters()} == {torch.float32}


def test_accumulated_gradients_are_the_mean_over_micro_batches():
    once, thrice = gradients(made()), gradients(made(training={"gradient_accumulation": 3}))
    for one, three in zip(once, thrice, strict=True):
        torch.testing.assert_close(three, one)  # the same inputs three times, each a third


def test_clipping_scales_the_whole_norm():
    step = made(optimizer={"max_grad_norm": 0.01})
    norm = torch.nn.utils.get_total_norm(gradients(step))
    assert norm.item() == pytest.approx(0.01, rel=1e-4)


@pytest.mark.parametrize("wanted", ["full", "selective", {"every": 2}])
def test_checkpointing_computes_the_same_gradients_with_more_forwards(wanted):
    plain, wrapped = made(GPT2), made(GPT2, training={"activation_checkpointing": wanted})
    calls = []
    for block in wrapped.module.transformer.h:
        block.ln_1.register_forward_pre_hook(lambda *_: calls.append(1))
    for expected, got in zip(gradients(plain), gradients(wrapped), strict=True):
        torch.testing.assert_close(got, expected)
    assert len(calls) == 2 + (1 if isinstance(wanted, dict) else 2)  # forward, and once more for each wrapped block


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_implementations_agree(name):
    results = []
    for implementation in ("foreach", "fused", "for-loop"):
        step = made(optimizer={"name": name, "implementation": implementation, "momentum": 0.9})
        for _ in range(2):
            step.run()
        group = step.optimizer.param_groups[0]
        assert (group["foreach"], group["fused"]) == (implementation == "foreach", implementation == "fused")
        results.append([parameter.detach() for parameter in step.module.parameters()])
    for other in results[1:]:
        for first, second in zip(results[0], other, strict=True):
            torch.testing.assert_close(first, second)


def test_momentum_is_kept_only_where_asked_for():
    for momentum, keeps in ((0.0, False), (0.9, True)):
        step = made(optimizer={"name": "sgd", "momentum": momentum})
        step.run()
        buffers = [state.get("momentum_buffer") for state in step.optimizer.state.values()]
        assert [buffer is not None for buffer in buffers] == [keeps] * len(buffers)


def test_loss_and_outputs_are_freed_before_the_next_phase():
    step = made()
    outputs = []
    step.module.register_forward_hook(lambda module, arguments, output: outputs.append(weakref.ref(output)))
    alive = {}
    gc.disable()  # nothing may wait for a collection
    try:
        step.run(lambda phase, micro_batch: alive.update({phase: [output() is not None for output in outputs]}))
    finally:
        gc.enable()
    assert alive == {"zero_grad": [], "forward": [], "backward": [False], "optimizer": [False], "end": [False]}


def test_gradients_are_dropped_first():
    step = made()
    step.run()
    found = []

    def mark(phase, micro_batch):
        if phase == "forward":
            found.extend(parameter.grad for parameter in step.module.parameters())

    step.run(mark)
    assert found and all(gradient is None for gradient in found)


def test_precision_switches_are_set_and_put_back():
    before = torch.backends.cuda.matmul.allow_tf32
    for precision, allowed in (("tf32", True), ("fp32", False)):
        scenario = Scenario(
            model=TINY, batch={"size": 1, "sequence_length": 8}, precision=precision, hardware={"profile": "none"}
        )
        with precision_switches(scenario):
            assert torch.backends.cuda.matmul.allow_tf32 is allowed
        assert torch.backends.cuda.matmul.allow_tf32 is before
