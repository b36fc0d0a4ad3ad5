"""Changes of a profile that follow from a changed datasheet; the values that its times were measured with are kept.

Kernels are timed on one device. When a what-if changes a peak, the cache or the gap between kernels, the profile keeps
the values of before as :attr:`~perfmodel.hardware.profile.Profile.as_measured`, from which kernel times are scaled
(:mod:`perfmodel.cost.kernels.scaling`). Two constants are scaled here: the cache's capacity, with the cache's size, and
the FLOP/s at which kinds of work draw their power, with the peak of their arithmetic: a chip that computes twice as
fast is assumed to draw as much as before at the same share of its peak.
"""

from __future__ import annotations

from perfmodel.errors import PerfModelError, did_you_mean
from perfmodel.hardware.power import Power
from perfmodel.hardware.profile import Cache, Device, Profile

DEVICE = "hardware.device"


def rescaled(original: Profile, asked: Profile) -> Profile:
    """``asked`` as a what-if about ``original``, whose times it holds.

    Raises
    ------
    PerfModelError
        If a peak is asked about that the original does not know, or one is taken away.
    """
    _check_peaks(original.device, asked.device)
    update = {"cache": _cache(original, asked), "power": _power(original, asked)}
    asked = asked.model_copy(update=update)
    if _limits(asked) == _limits(original):
        return asked.changed_from(original, None)
    cache = asked.cache.model_copy(update={"capacity_bytes": original.cache.capacity_bytes})
    measured = {"device": original.device, "launch": original.launch, "cache": cache}
    return asked.changed_from(original, asked.model_copy(update=measured))


def _limits(profile: Profile) -> tuple[object, ...]:
    """Return the values that times of kernels follow."""
    device = profile.device
    return (
        device.peak_flops_per_s,
        device.peak_memory_bytes_per_s,
        profile.cache_capacity_bytes,
        profile.launch.gap_s,
    )


def _check_peaks(original: Device, asked: Device) -> None:
    was, is_now = original.peak_memory_bytes_per_s, asked.peak_memory_bytes_per_s
    if (was is None) != (is_now is None):
        raise PerfModelError(
            f"--set {DEVICE}.peak_memory_bytes_per_s must change a number to another (the profile has {was}, got "
            f"{is_now}): times are scaled by how much it changes. Give the device's own in its profile, or calibrate."
        )
    known = sorted(original.peak_flops_per_s)
    for kind in asked.peak_flops_per_s:
        if kind not in known:
            raise PerfModelError(
                f"--set {DEVICE}.peak_flops_per_s.{kind} must change a peak that the profile has (it has "
                f"{', '.join(known) or 'none'}): times are scaled by how much it changes. {did_you_mean(kind, known)}"
            )
    missing = [kind for kind in known if kind not in asked.peak_flops_per_s]
    if missing:
        raise PerfModelError(
            f"--set {DEVICE}.peak_flops_per_s must keep {', '.join(missing)}, which the profile has (it was left out)."
            f" Change one alone: {DEVICE}.peak_flops_per_s.{known[0]}=..."
        )


def _cache(original: Profile, asked: Profile) -> Cache:
    """Scale the capacity with the cache's size, unless the capacity was given itself."""
    capacity_bytes, was_bytes = asked.cache.capacity_bytes, original.device.l2_bytes
    if capacity_bytes is None or capacity_bytes != original.cache.capacity_bytes or not was_bytes:
        return asked.cache
    grown_bytes = capacity_bytes * (asked.device.l2_bytes / was_bytes)
    return asked.cache.model_copy(update={"capacity_bytes": grown_bytes})


def _power(original: Profile, asked: Profile) -> Power:
    """Kinds of work that are there for FLOPs draw their power at the same share of the peak."""
    was, is_now = original.device.peak_flops_per_s, asked.device.peak_flops_per_s
    kinds = {}
    for name, kind in asked.power.kinds.items():
        ratio = is_now[kind.arithmetic] / was[kind.arithmetic] if kind.arithmetic in was else 1.0
        is_own = kind == original.power.kinds.get(name)
        if kind.flops_per_s is None or ratio == 1 or not is_own:
            kinds[name] = kind
        else:
            kinds[name] = kind.model_copy(update={"flops_per_s": kind.flops_per_s * ratio})
    return asked.power.model_copy(update={"kinds": kinds})
