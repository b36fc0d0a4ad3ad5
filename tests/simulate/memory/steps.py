"""Hand-made steps with memory events, and the profiles that they run on."""

from __future__ import annotations

from perfmodel.hardware.profile import Device, KernelRecord, MemoryConstants, Profile
from perfmodel.program.program import Program, single_device_program
from perfmodel.trace.operation import Operation, TensorSpec
from perfmodel.trace.trace import EventKind, StepEvents, Storage, StorageKind
from tests.builders import Phase, step_events, trace_of

MIB = 2**20
PLENTY_BYTES = 2**50
OP, ALLOC, FREE = EventKind.OP, EventKind.ALLOC, EventKind.FREE
F32 = TensorSpec.parse("float32[1024,1024]")
MULTIPLY = Operation("aten.mm.default", (F32, F32), (), (F32,))
WITH_BIAS = Operation("aten.addmm.default", (TensorSpec.parse("float32[1024]"), F32, F32), (), (F32,))
POINTWISE = Operation("aten.add.Tensor", (F32, F32), (), (F32,))
OPERATIONS = (POINTWISE, MULTIPLY, WITH_BIAS)


def program_of(
    first: StepEvents,
    steady: StepEvents,
    persistent: tuple[Storage, ...] = (),
    kinds: dict[int, StorageKind] | None = None,
    accumulation: int = 1,
) -> Program:
    """Return the program of a first step and of every later one."""
    tables = {"operations": OPERATIONS, "persistent": persistent, "storage_kinds": kinds or {}}
    return single_device_program(trace_of(steady, first, **tables), accumulation)


def profile_of(
    memory_bytes: int = PLENTY_BYTES, kernels: dict[str, KernelRecord] | None = None, **constants: int
) -> Profile:
    return Profile(
        name="test",
        device=Device(kind="cuda", name="test", memory_bytes=memory_bytes, multiprocessors=132),
        kernels=kernels or {},
        memory=MemoryConstants(**constants),
    )


def training_program(accumulation: int = 1) -> Program:
    """A 16 MiB parameter: an activation of 4 MiB, a gradient, and a state made by the first step; later micro-batches
    add to the gradient and hold the last one's loss (512 B) until they make their own.
    """
    zero, made = 0, {"first": 10, "steady": 20}

    def micro_batch(base: int, number: int, previous_loss: int | None) -> list[Phase]:
        activation, loss, gradient = base + 4 * number, base + 4 * number + 1, base + 4 * number + 3
        release = [(FREE, previous_loss, 0)] if previous_loss is not None else []
        backward = [(OP, 0, -1), (ALLOC, gradient, 16 * MIB), (FREE, activation, 0)]
        if number:
            backward.append((FREE, gradient, 0))
        return [
            ("forward", number, [(OP, 0, -1), (ALLOC, activation, 4 * MIB), (OP, 0, -1), (ALLOC, loss, 4), *release]),
            ("backward", number, backward),
        ]

    def step(name: str) -> StepEvents:
        base = made[name]
        before = made["first"] + 4 * (min(accumulation, 2) - 1) + 1
        phases: list[Phase] = []
        if name == "steady":
            phases.append(("zero_grad", -1, [(FREE, made["first"] + 3, 0)]))
        phases += micro_batch(base, 0, before if name == "steady" else None)
        if accumulation > 1:
            phases += micro_batch(base, 1, base + 1)
        if name == "first":
            phases.append(("optimizer", -1, [(OP, 0, -1), (ALLOC, 1, 32 * MIB)]))
        return step_events(*phases)

    kinds = {1: StorageKind.OPTIMIZER_STATE, 13: StorageKind.GRADIENT, 23: StorageKind.GRADIENT}
    kinds |= dict.fromkeys((10, 14, 20, 24), StorageKind.ACTIVATION)
    persistent = (Storage(zero, 16 * MIB, StorageKind.PARAMETER),)
    return program_of(step("first"), step("steady"), persistent, kinds, accumulation)
