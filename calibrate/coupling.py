"""From measured pairs of a kernel and a collective to how they, and what they stand for, slow each other.

A pair was measured as two loops side by side; what each takes on average mixes three things: the kernel slowed by the
collective, the collective slowed by the kernel, and collectives that wait because they arrive while a kernel still
hands out its blocks. The same loops are run through the engine's own device, and compute_factor, communication_factor
and tail_share are those with which they take what was measured: the function that is fitted is the one that predicts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product

import numpy as np

from perfmodel.cost.collectives import RINGS
from perfmodel.cost.contention import PAUSE, Slowdown
from perfmodel.hardware.interconnect import ContentionRecord, Coupling
from perfmodel.simulate.device import Device, Item

COMPUTE_FACTORS = (1.0, 1.1, 1.2, 1.4, 1.6, 1.8, 2.1)  # coarse; then by REFINED around the best, and by FINEST
COMMUNICATION_FACTORS = (1.0, 1.2, 1.5, 1.8, 2.2, 2.7)
TAIL_SHARES = (0.02, 0.1, 0.3, 0.6, 1.0)
REFINED = (0.85, 0.93, 1.0, 1.07, 1.15)
FINEST = (0.95, 0.975, 1.0, 1.025, 1.05)
LOOP_KERNELS = 8  # at least; enough for LOOP_COLLECTIVES
LOOP_COLLECTIVES = 6

# Measured kernel (first word of the pair's key): the kind of operators it stands for.
KIND_OF_KERNEL = {
    "gemm_fp32_4096": "gemm_fp32",
    "gemm_bf16_8192": "gemm_bf16",
    "gemm_bf16_2048": "gemm_bf16_small",
    "gemm_fp32_2048x5120x1280": "gemm_fp32_small",
    "add_256MiB": "pointwise",
    "conv_tf32": "convolution",
    "attention_bf16": "attention",
    "layer_norm": "row",
    "adamw_foreach": "optimizer",
    "add_one": PAUSE,
}


def fit_couplings(records: Mapping[str, ContentionRecord]) -> dict[str, Coupling]:
    """One coupling a kind, fitted to its pairs with the smallest and the largest all_reduce and the largest all_gather.

    The other pairs with rings are held out: they only say how well it does. Messages between two ranks hold fewer
    multiprocessors, and are left out.
    """
    by_kind: dict[str, dict[str, ContentionRecord]] = {}
    for key, record in records.items():
        kernel, collective = key.split()[:2]
        if kernel in KIND_OF_KERNEL and collective in RINGS:
            by_kind.setdefault(KIND_OF_KERNEL[kernel], {})[key] = record
    return {
        kind: _pause(pairs.values()) if kind == PAUSE else _fit_kind(pairs) for kind, pairs in sorted(by_kind.items())
    }


def _pause(records: Iterable[ContentionRecord]) -> Coupling:
    """Of kernels that do nothing, which neither slow a collective nor keep it waiting."""
    known = list(records)
    return Coupling(
        compute_factor=max(float(np.median([record.compute_factor for record in known])), 1.0),
        communication_factor=1.0,
        tail_share=1.0,
        kernel_s=known[0].compute_s,
        pairs=len(known),
    )


def fit_own_couplings(records: Mapping[str, Mapping[str, ContentionRecord]]) -> dict[str, Coupling]:
    """One coupling a kernel key, fitted to all its pairs, which are by collective key.

    A long and a short collective tell the three values apart: what waits for a tail weighs little beside the long one,
    and most beside the short one.
    """
    return {key: _fit(list(pairs.values()), []) for key, pairs in records.items() if pairs}


def _fit_kind(pairs: Mapping[str, ContentionRecord]) -> Coupling:
    fitted = [pairs[key] for key in _fitted(pairs)] or list(pairs.values())
    return _fit(fitted, [record for record in pairs.values() if record not in fitted])


def _fit(fitted: list[ContentionRecord], others: list[ContentionRecord]) -> Coupling:
    """others: held out."""
    best = _best(product(COMPUTE_FACTORS, COMMUNICATION_FACTORS, TAIL_SHARES), fitted)
    for factors in (REFINED, REFINED, FINEST):
        best = _best(product(*([value * factor for factor in factors] for value in best)), fitted)
    return Coupling(
        compute_factor=best[0],
        communication_factor=best[1],
        tail_share=best[2],
        kernel_s=fitted[0].compute_s,
        fitted_error=coupling_error(best, fitted),
        held_out_error=coupling_error(best, others) if others else None,
        pairs=len(fitted) + len(others),
    )


def _best(candidates: Iterable[tuple[float, ...]], records: list[ContentionRecord]) -> tuple[float, float, float]:
    """Of those that are possible, the one with the least error."""
    possible = {
        (max(compute, 1.0), max(communication, 1.0), min(tail, 1.0)) for compute, communication, tail in candidates
    }
    return min(sorted(possible), key=lambda each: coupling_error(each, records))


def _fitted(pairs: Iterable[str]) -> list[str]:
    """Keys (``gemm_fp32_4096 all_reduce 4 float32 26214400``) of the smallest and the largest all_reduce, and of the
    largest all_gather.
    """
    sizes = {key: int(key.split()[4]) for key in pairs}
    reduces = sorted((key for key in sizes if key.split()[1] == "all_reduce"), key=lambda key: sizes[key])
    gathers = sorted((key for key in sizes if key.split()[1] == "all_gather"), key=lambda key: sizes[key])
    return list(dict.fromkeys([*reduces[:1], *reduces[-1:], *gathers[-1:]]))


def coupling_error(coupling: tuple[float, float, float], records: Iterable[ContentionRecord]) -> float:
    """Mean relative error of the slowed times of kernel and collective."""
    errors = []
    for record in records:
        found = slowed_loops(record.compute_s, record.communication_s, coupling)
        wanted = (record.compute_factor, record.communication_factor)
        errors += [abs(value / measured - 1) for value, measured in zip(found, wanted, strict=True)]
    return float(np.mean(errors))


def slowed_loops(compute_s: float, communication_s: float, coupling: tuple[float, float, float]) -> tuple[float, float]:
    """Average time of each over its time alone, when both are repeated without pause side by side.

    coupling: compute_factor, communication_factor, tail_share.
    """
    compute_factor, communication_factor, tail_share = coupling
    count = max(LOOP_KERNELS, int(np.ceil(LOOP_COLLECTIVES * communication_s * communication_factor / compute_s)))
    ones = np.ones(count)
    slowdown = Slowdown(compute_factor * ones, communication_factor * ones, tail_share * compute_s * ones)
    device = Device(0.0, [slowdown], count)
    device.reserve(count)
    device.issue(np.zeros(count), compute_s * ones)
    lasting_s = count * compute_s * compute_factor
    for number in range(int(np.ceil(lasting_s / communication_s)) + 1):
        device.add(Item(1, communication_s, 0, 0.0 if number else 0.37 * compute_s))
    device.run_until(count)
    end_s = float(device.end_s[count - 1])
    done = [item.end_s for item in device.items if item.is_done and item.end_s <= end_s]
    share = (max(done) - 0.37 * compute_s) / len(done) if done else end_s
    return end_s / (count * compute_s), share / communication_s
