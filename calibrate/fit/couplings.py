"""Fit how kernels and collectives slow each other, and what they stand for, to measured pairs of them.

A pair was measured as two loops side by side; what each takes on average mixes three things: the kernel slowed by the
collective, the collective slowed by the kernel, and collectives that wait because they arrive while a kernel still
hands out its blocks. The same loops are run through the engine's own device, and compute_factor, communication_factor
and tail_share are those with which they take what was measured: the function that is fitted is the one that predicts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import product

import numpy as np

from calibrate.interconnect.own_contention import WAIT
from perfmodel.cost.collectives import RINGS
from perfmodel.cost.contention import LIST, PAUSE, Slowdown
from perfmodel.hardware.interconnect import ContentionRecord, Coupling, Role
from perfmodel.hardware.profile import Launch
from perfmodel.simulate.device_clock import DeviceClock
from perfmodel.simulate.rendezvous import run_alone
from perfmodel.simulate.tasks import StreamTask

COMPUTE_FACTORS = (1.0, 1.1, 1.2, 1.4, 1.6, 1.8, 2.1)  # where the search starts: the best of these
COMMUNICATION_FACTORS = (1.0, 1.2, 1.5, 1.8, 2.2, 2.7)
TAIL_SHARES = (0.02, 0.1, 0.3, 0.6, 1.0)
BOUNDS = ((1.0, None), (1.0, None), (0.01, 1.0))
MOST_TRIALS, FINEST = 80, 1e-3
NEARBY = (0.97, 1.0, 1.03)
LOOP_KERNELS = 8  # at least; enough for LOOP_COLLECTIVES
LOOP_COLLECTIVES = 6

MOVING: tuple[Role, ...] = ("send", "receive")

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
    """Fit one coupling a kind to its pairs with the smallest and the largest all_reduce and the largest all_gather.

    The other pairs with rings are held out: they only say how well it does. Messages between two ranks have couplings
    of their own.
    """
    return {
        kind: _steady(pairs.values()) if kind == PAUSE else _fit_kind(pairs, kind != LIST)
        for kind, pairs in _by_kind(records, RINGS).items()
    }


def fit_message_couplings(records: Mapping[str, ContentionRecord]) -> dict[Role, dict[str, Coupling]]:
    """Fit one coupling a role and a kind to all its pairs: a long and a short message.

    During a receive that waits nothing moves, so what slows a kernel is all that there is.
    """
    moving: dict[Role, dict[str, Coupling]] = {
        role: {
            kind: _steady(pairs.values()) if kind == PAUSE else _fit(list(pairs.values()), [], kind != LIST)
            for kind, pairs in _by_kind(records, (role,)).items()
        }
        for role in MOVING
    }
    waiting = {kind: _steady(pairs.values()) for kind, pairs in _by_kind(records, (WAIT,)).items()}
    return {role: found for role, found in (moving | {WAIT: waiting}).items() if found}


def _by_kind(
    records: Mapping[str, ContentionRecord], partners: Collection[str]
) -> dict[str, dict[str, ContentionRecord]]:
    """Group pairs by the kind of operators that their kernel stands for: those with these collectives, or in these
    roles.
    """
    found: dict[str, dict[str, ContentionRecord]] = {}
    for key, record in records.items():
        kernel, collective = key.split()[:2]
        if kernel in KIND_OF_KERNEL and collective in partners:
            found.setdefault(KIND_OF_KERNEL[kernel], {})[key] = record
    return dict(sorted(found.items()))


def _steady(records: Iterable[ContentionRecord]) -> Coupling:
    """Return the coupling of what neither slows a collective nor keeps it waiting, as kernels that do nothing."""
    known = list(records)
    return Coupling(
        compute_factor=max(float(np.median([record.compute_factor for record in known])), 1.0),
        communication_factor=1.0,
        tail_share=1.0,
        kernel_s=known[0].compute_s,
        pairs=len(known),
    )


def fit_own_couplings(records: Mapping[str, Mapping[str, ContentionRecord]]) -> dict[str, Coupling]:
    """Fit one coupling a kernel key to all its pairs with collectives, which are by collective key.

    A long and a short collective tell the three values apart: what waits for a tail weighs little in the long one,
    and most in the short one.
    """
    known = {key: [each for name, each in pairs.items() if not _is_waiting(name)] for key, pairs in records.items()}
    return {key: _fit(pairs, []) for key, pairs in known.items() if pairs}


def fit_own_message_couplings(
    records: Mapping[str, Mapping[str, ContentionRecord]],
) -> dict[Role, dict[str, Coupling]]:
    """Fit one coupling a kernel key to its pairs with a receive that waits."""
    known = {key: [each for name, each in pairs.items() if _is_waiting(name)] for key, pairs in records.items()}
    found = {key: _steady(pairs) for key, pairs in known.items() if pairs}
    return {WAIT: found} if found else {}


def _is_waiting(name: str) -> bool:
    return name.split(maxsplit=1)[0] == WAIT


def _fit_kind(pairs: Mapping[str, ContentionRecord], is_one: bool) -> Coupling:
    fitted = [pairs[key] for key in _fitted(pairs)] or list(pairs.values())
    return _fit(fitted, [record for record in pairs.values() if record not in fitted], is_one)


def _fit(fitted: list[ContentionRecord], others: list[ContentionRecord], is_one: bool = True) -> Coupling:
    """others: held out. is_one: a kernel, not many."""
    from scipy.optimize import minimize

    grid = product(COMPUTE_FACTORS, COMMUNICATION_FACTORS, TAIL_SHARES)
    start = min(grid, key=lambda each: coupling_error(each, fitted, is_one))
    best = minimize(
        lambda each: coupling_error(tuple(each), fitted, is_one, NEARBY),
        start,
        method="Nelder-Mead",
        bounds=BOUNDS,
        options={"initial_simplex": _around(start), "maxfev": MOST_TRIALS, "xatol": FINEST, "fatol": FINEST},
    )
    found = tuple(map(float, best.x))
    return Coupling(
        compute_factor=found[0],
        communication_factor=found[1],
        tail_share=found[2],
        kernel_s=fitted[0].compute_s,
        fitted_error=coupling_error(found, fitted, is_one, NEARBY),
        held_out_error=coupling_error(found, others, is_one, NEARBY) if others else None,
        pairs=len(fitted) + len(others),
    )


def _around(start: tuple[float, ...]) -> list[tuple[float, ...]]:
    """Return the start, and a point away from it in each direction, none of them out of bounds."""
    steps = (0.1, 0.15, -0.3 * start[2])
    return [start, *(tuple(x + step * (i == j) for j, x in enumerate(start)) for i, step in enumerate(steps))]


def _fitted(pairs: Iterable[str]) -> list[str]:
    """Return keys (``gemm_fp32_4096 all_reduce 4 float32 26214400``) of the smallest and the largest all_reduce, and of
    the largest all_gather.
    """
    sizes = {key: int(key.split()[4]) for key in pairs}
    reduces = sorted((key for key in sizes if key.split()[1] == "all_reduce"), key=lambda key: sizes[key])
    gathers = sorted((key for key in sizes if key.split()[1] == "all_gather"), key=lambda key: sizes[key])
    return list(dict.fromkeys([*reduces[:1], *reduces[-1:], *gathers[-1:]]))


def coupling_error(
    coupling: tuple[float, ...],
    records: Iterable[ContentionRecord],
    is_one: bool = True,
    nearby: Sequence[float] = (1.0,),
) -> float:
    """Return the mean relative error of the slowed times of kernel and collective.

    nearby: times the collective's own, over which loops are averaged. How many collectives fit into a kernel jumps with
    their time in loops as even as these, where real ones vary.
    """
    errors = []
    for record in records:
        loops = [slowed_loops(record.compute_s, each * record.communication_s, coupling, is_one) for each in nearby]
        found = np.mean(loops, axis=0)
        wanted = (record.compute_factor, record.communication_factor)
        errors += [abs(value / measured - 1) for value, measured in zip(found, wanted, strict=True)]
    return float(np.mean(errors))


def slowed_loops(
    compute_s: float, communication_s: float, coupling: tuple[float, ...], is_one: bool = True
) -> tuple[float, float]:
    """Average time of each over its time alone, when both are repeated without pause side by side.

    coupling: compute_factor, communication_factor, tail_share. is_one: what computes is a kernel, not many.
    """
    compute_factor, communication_factor, tail_share = coupling
    count = max(LOOP_KERNELS, int(np.ceil(LOOP_COLLECTIVES * communication_s * communication_factor / compute_s)))
    ones = np.ones(count)
    tail_s = tail_share * compute_s * ones
    slowdown = Slowdown(compute_factor * ones, communication_factor * ones, tail_s, tail_s if is_one else None)
    device = DeviceClock(Launch(), [slowdown], count)
    device.reserve(count)
    device.issue(np.zeros(count), compute_s * ones)
    lasting_s = count * compute_s * compute_factor
    for number in range(int(np.ceil(lasting_s / communication_s)) + 1):
        device.add(StreamTask(1, communication_s, 0, 0.0 if number else 0.37 * compute_s))
    run_alone(device.run_until(count))
    end_s = float(device.end_s[count - 1])
    done = [item.end_s for item in device.tasks if item.is_done and item.end_s <= end_s]
    share = (max(done) - 0.37 * compute_s) / len(done) if done else end_s
    return end_s / (count * compute_s), share / communication_s
