"""A prediction small enough to work out by hand: five launches of three operators, in microseconds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from perfmodel.cost.kernels.kernel_cost import KernelCost
from perfmodel.hardware.profile import Device, Profile
from perfmodel.prediction.prediction import KernelUse, Prediction
from perfmodel.program.program import single_device_program
from perfmodel.scenario.scenario import Scenario
from perfmodel.simulate.memory.walk import simulate_memory
from perfmodel.simulate.timeline import PhaseSpan, Timeline
from perfmodel.trace.kernel_key import kernel_key
from perfmodel.trace.operation import Operation, TensorSpec
from perfmodel.trace.trace import EventKind, Storage, StorageKind, Trace
from perfmodel.units import US
from tests.builders import step_events, trace_of

MIB = 2**20
SQUARE = TensorSpec.parse("float32[8,8]")
OPERATIONS = (
    Operation("aten.mm.default", (SQUARE, SQUARE), (), (SQUARE,)),
    Operation("aten.add.Tensor", (SQUARE, SQUARE), (), (SQUARE,)),
    Operation("aten._foreach_add_.List", ((SQUARE,), (SQUARE,)), (), ()),
)
COSTS = (
    KernelCost(10 * US, 0.01, "exact", "gemm", 1024.0, 768.0, "fp32", 1, 10 * US),
    KernelCost(2 * US, 0.05, "curve", "pointwise", 64.0, 768.0, "fp32", 1, 2 * US),
    KernelCost(5 * US, 0.30, "roofline", "optimizer", 64.0, 768.0, "fp32", 1, 5 * US),
)
# operation, phase, module, host start, issue, start, end
LAUNCHES = (
    (0, 0, 0, 0, 3, 4, 14),
    (1, 0, 1, 3, 6, 14, 16),
    (0, 1, 1, 6, 9, 16, 26),
    (0, 1, 0, 9, 12, 26, 36),
    (2, 2, -1, 12, 15, 36, 41),
)
# phase, micro-batch, host start, host end, device start, device end
PHASES = (("forward", 0, 0, 6, 4, 16), ("backward", 0, 6, 12, 16, 36), ("optimizer", -1, 12, 16, 36, 42))


def scenario(**changes: object) -> Scenario:
    data = {
        "name": "toy",
        "model": {"family": "gpt", "size": "tiny"},
        "batch": {"size": 4, "sequence_length": 8},
        "hardware": {"profile": "toy-gpu"},
    }
    return Scenario.model_validate(data | changes)


def profile(kind: str = "cuda") -> Profile:
    device = Device(
        kind=kind,  # type: ignore[arg-type]
        name="Toy GPU",
        memory_bytes=64 * MIB,
        multiprocessors=2,
        compute_capability=(9, 0) if kind == "cuda" else None,
        peak_flops_per_s={"fp32": 1e9} if kind == "cuda" else {},
        peak_memory_bytes_per_s=1e9 if kind == "cuda" else None,
    )
    return Profile(name="toy-gpu", device=device)


def trace() -> Trace:
    """2 MiB of parameters; forward makes an activation of 4 MiB, backward gradients of 2 MiB, which stay."""
    forward = [(EventKind.OP, 0, -1), (EventKind.ALLOC, 1, 4 * MIB), (EventKind.OP, 1, -1)]
    backward = [
        (EventKind.OP, 0, 0),
        (EventKind.ALLOC, 2, 2 * MIB),
        (EventKind.OP, 0, 0),
        (EventKind.FREE, 1, 0),
    ]
    optimizer = [(EventKind.OP, 2, -1), (EventKind.FREE, 2, 0)]
    return trace_of(
        step_events(("forward", 0, forward), ("backward", 0, backward), ("optimizer", -1, optimizer)),
        operations=OPERATIONS,
        modules=(("", "GPT"), ("head", "Linear")),
        nodes=("MmBackward0",),
        persistent=(Storage(0, 2 * MIB, StorageKind.PARAMETER),),
        storage_kinds={1: StorageKind.ACTIVATION, 2: StorageKind.GRADIENT},
    )


def timeline() -> Timeline:
    operation, run, module, host_start, issue, start, end = np.array(LAUNCHES).T
    return Timeline(
        operation=operation,
        run=run,
        module=module,
        stream=np.zeros(len(operation), dtype=np.int64),
        host_start_s=host_start * US,
        issue_s=issue * US,
        start_s=start * US,
        end_s=end * US,
        phases=tuple(PhaseSpan(name, micro, start * US, end * US) for name, micro, _, _, start, end in PHASES),
        host_spans=tuple(PhaseSpan(name, micro, start * US, end * US) for name, micro, start, end, _, _ in PHASES),
        step_time_s=38 * US,
        synced_step_time_s=43 * US,
        host_busy_s=16 * US,
    )


def prediction(kind: str = "cuda", **changes: object) -> Prediction:
    """Of a step of 38 us: 12 forward, 20 backward, 5 optimizer, 1 waiting for the host."""
    program = single_device_program(trace())
    counts = {0: 3, 1: 1, 2: 1}
    uses = [
        KernelUse(kernel_key(OPERATIONS[i]), COSTS[i], count, count * COSTS[i].time_s) for i, count in counts.items()
    ]
    known = Prediction(
        scenario=scenario(),
        profile=profile(kind),
        program=program,
        timeline=timeline(),
        memory=simulate_memory(program, profile()) if kind == "cuda" else None,
        interval_s=(36 * US, 40 * US),
        kernels=tuple(sorted(uses, key=lambda use: -use.total_s)),
        breakdown={
            "forward_s": 12 * US,
            "backward_s": 20 * US,
            "optimizer_s": 5 * US,
            "exposed_communication_s": 0.0,
            "bubble_s": 0.0,
            "host_bound_s": 1 * US,
            "communication_s": 0.0,
        },
        bottleneck="the device: gemm kernels take 79 % of the step",
        provenance={"exact": 30 / 37, "curve": 2 / 37, "roofline": 5 / 37},
        model_flops=3 * 1088.0,
        warnings=("14 % of the device time is from a roofline",),
    )
    return replace(known, **changes)  # type: ignore[arg-type]


WHOLE = """\
toy on toy-gpu (Toy GPU)
gpt tiny, fp32, batch 4 x 8 tokens, adamw foreach

step time     38 us               36 us to 40 us (90 %, uncalibrated)
synced step   43 us               with a synchronisation after each step
throughput    105,263 samples/s   842,105 tokens/s
MFU           8.6 %               of 1 GFLOP/s
memory        8 MiB allocated     20 MiB reserved
fits          yes                 20 MiB of 64 MiB in use
bottleneck    the device: gemm kernels take 79 % of the step

where the time goes
forward                █████████▌          32 %   12 us
backward               ███████████████▊    53 %   20 us
optimizer              ████                13 %   5 us
waiting for the host   ▊                    3 %   1 us

largest kernels
 time  share  calls   each  source    operator
30 us   81 %      3  10 us  exact     mm(float32[8,8], float32[8,8])
 5 us   14 %      1   5 us  roofline  _foreach_add_.List([float32[8,8]], [float32[8,8]])
 2 us    5 %      1   2 us  curve     add.Tensor(float32[8,8], float32[8,8])

where the numbers come from: 81.1 % measured kernels, 5.4 % fitted curves, 13.5 % roofline
warning: 14 % of the device time is from a roofline
"""
