"""The last resort: time from the datasheet's peaks, for hardware or operators that nothing was measured for.

t = launch floor + max(FLOPs / (e_c u peak), bytes / (e_m peak bandwidth)). e_c, e_m: what well-tuned kernels sustain
of a peak; u: how well a GEMM's tiles fill the multiprocessors, so that small GEMMs are not scaled by the peak.
"""

from __future__ import annotations

import math

from perfmodel.cost.kernels.classify import classify
from perfmodel.cost.kernels.work import arithmetic_kind, gemm_sizes, least_bytes, physical_flops
from perfmodel.errors import PerfModelError
from perfmodel.hardware.profile import Device
from perfmodel.trace.operation import Operation

# Sustained shares of dense peaks on random data. Sources: A100 0.78-0.85, H100 0.62-0.75, H200 0.78-0.81 for large bf16
# GEMMs; attention kernels' published rates; HBM 0.88-0.93 for large copies, less for the sizes of activations.
COMPUTE_EFFICIENCY = {
    "gemm": 0.75,
    "convolution_forward": 0.5,
    "convolution_backward": 0.45,
    "attention_forward": 0.5,
    "attention_backward": 0.4,
}
POINTWISE_EFFICIENCY = 0.25  # of the fp32 peak, which counts fused multiply-adds
MEMORY_EFFICIENCY = 0.85
LAUNCH_FLOOR_S = {"cuda": 2.5e-6, "cpu": 1e-6}
ROOFLINE_SPREAD = 0.25
TILES = {128: 1.0, 64: 0.8, 32: 0.5}  # side of a square tile, and what its size leaves of the efficiency


def roofline_time_s(operation: Operation, device: Device, matmul_tf32: bool) -> float:
    """Seconds of ``operation`` by the device's datasheet.

    Raises
    ------
    PerfModelError
        If the device's peaks are not known.
    """
    if device.peak_memory_bytes_per_s is None or not device.peak_flops_per_s:
        raise PerfModelError(
            f"{operation.name}: no measured time, curve or datasheet peak of {device.name} covers it"
            " (got none of the three). Calibrate it: `perfmodel calibrate --scenario FILE`."
        )
    return LAUNCH_FLOOR_S[device.kind] + busy_time_s(operation, device, matmul_tf32, least_bytes(operation))


def busy_time_s(operation: Operation, device: Device, matmul_tf32: bool, memory_bytes: float) -> float:
    """Seconds of the work alone, without the launch: max(FLOPs / (e_c u peak), bytes / (e_m peak bandwidth)).

    Parameters
    ----------
    operation : Operation
    device : Device
        A peak that it does not know limits nothing.
    matmul_tf32 : bool
        Whether float32 GEMMs may use TF32.
    memory_bytes : float
        What comes from memory and goes there, and not through the cache alone.
    """
    moving_s = computing_s = 0.0
    if device.peak_memory_bytes_per_s is not None:
        moving_s = memory_bytes / (MEMORY_EFFICIENCY * device.peak_memory_bytes_per_s)
    if device.peak_flops_per_s:
        kind = classify(operation)
        peak = _peak_flops_per_s(device, arithmetic_kind(operation, matmul_tf32))
        efficiency = COMPUTE_EFFICIENCY.get(kind, POINTWISE_EFFICIENCY) * _filled(operation, kind, device)
        computing_s = physical_flops(operation) / (efficiency * peak)
    return max(computing_s, moving_s)


def _peak_flops_per_s(device: Device, arithmetic: str) -> float:
    """The unit's peak; hardware without the unit computes in fp32."""
    peaks = device.peak_flops_per_s
    return peaks.get(arithmetic, peaks.get("fp32", max(peaks.values())))


def _filled(operation: Operation, kind: str, device: Device) -> float:
    """Share of the multiprocessors' waves that a product's tiles fill, with the tile that does best."""
    if kind != "gemm":
        return 1.0
    batch, m, n, _ = gemm_sizes(operation)
    shares = []
    for side, kept in TILES.items():
        tiles = batch * math.ceil(m / side) * math.ceil(n / side)
        slots = math.ceil(tiles / device.multiprocessors) * device.multiprocessors
        shares.append(kept * batch * m * n / (slots * side**2))
    return max(shares)
