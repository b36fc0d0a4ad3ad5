"""Host costs that are a scenario's own, and whether they are worth measuring on its own batch."""

from __future__ import annotations

from perfmodel.cost.host import host_costs
from perfmodel.cost.kernels.lookup import kernel_costs
from perfmodel.hardware.profile import HostRecord, Profile
from perfmodel.program.program import single_device_program
from perfmodel.scenario.scenario import Scenario
from perfmodel.trace.trace import Trace

NEAR = 0.5  # of the device time: below, the device is what takes long


def scenario_host_records(
    scenario: Scenario, trace: Trace, profile: Profile, device: str, allow_import: bool, has_modules: bool
) -> dict[str, HostRecord]:
    """Measure the host costs of a trace that the profile lacks.

    Parameters
    ----------
    scenario : Scenario
        Whose trace it is.
    trace : Trace
        The step, or a stage of a pipeline.
    profile : Profile
        What is known so far; its reference says at which speed of the host.
    device : str
        ``cuda`` or ``cpu``.
    allow_import : bool
        Whether the scenario's own model may be imported.
    has_modules : bool
        Whether to measure its modules, or only its loops over parameters.
    """
    from calibrate.host.costs import measure_host_keys, measure_host_lists

    if not has_modules:
        return measure_host_lists(trace, device, profile.host)
    own_batch = device != "cpu" and host_decides(scenario, trace, profile)
    return measure_host_keys(trace, scenario.precision, device, profile.host, allow_import, own_batch)


def host_decides(scenario: Scenario, trace: Trace, profile: Profile) -> bool:
    """Return whether the step's host time, by general keys, comes near its device time.

    Then its modules are measured on its own batch.
    """
    program = single_device_program(trace)
    host_s = host_costs(program, profile, scenario.precision).sum()
    costs = kernel_costs(trace.operations, profile, scenario.matmul_tf32)
    device_s = sum(costs[operation].time_s for operation in program.instructions.a[program.instructions.launches])
    return bool(host_s > NEAR * device_s)
