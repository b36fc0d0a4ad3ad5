"""Effects of each value of a profile when a what-if changes it by ``--set`` or ``--vary``.

Every key of the profile's schema stands here once, with ``*`` for names of kernels, calls, kinds and the like; tests
compare this table with the schema and with answers. Whether a setting changed one particular answer is found by
comparing answers, not by this table (:mod:`perfmodel.prediction.what_if`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from perfmodel.errors import PerfModelError
from perfmodel.hardware.profile import Profile

Effect = Literal["scales", "used", "none", "refused", "scenario"]
EFFECTS: dict[Effect, str] = {
    "scales": "measured times are scaled by how much it changes",
    "used": "is taken as it is",
    "none": "accepted; the answer says that it changes nothing",
    "refused": "refused, with what would work",
    "scenario": "is the scenario's, not the profile's",
}


@dataclass(frozen=True)
class Setting:
    """The effect of one key.

    Attributes
    ----------
    effect : Effect
        What happens to it.
    meaning : str
        What follows the value; if it is refused, why it must stay as it is.
    instead : str
        What would work instead.
    """

    effect: Effect
    meaning: str
    instead: str = ""


_RECORD = Setting("none", "a record of the measurement")
_COUPLINGS = {
    "compute_factor": Setting("used", "how many times as long kernels of the kind take during a collective"),
    "communication_factor": Setting("used", "how many times as long a collective takes while they run"),
    "tail_share": Setting("used", "when a collective that arrives finds room"),
    "kernel_s": Setting("used", "between which kernels' times couplings are interpolated"),
    "fitted_error": _RECORD,
    "held_out_error": _RECORD,
    "pairs": _RECORD,
}
_OWN = {"kernel_s": _RECORD}
_OF_MESSAGES = _COUPLINGS | {"communication_factor": Setting("none", "a message is taken to be slowed by nothing")}
_OTHER_PROFILE = "Choose another profile by hardware.profile."
_PAIRS = Setting(
    "refused", "couplings are fitted to it", "Set hardware.interconnects.NAME.couplings.KIND.compute_factor."
)
_FITTED = Setting("refused", "power.kinds are fitted to it", "Set hardware.power.kinds.KIND.draw_w.")
_OF_INTERCONNECT = {
    "backend": Setting("refused", "it is what was measured", "Choose another by hardware.interconnect."),
    "environment.*": _RECORD,
    "provenance.*": _RECORD,
    "nodes": Setting("refused", "it is what was measured", "Choose another by hardware.interconnect."),
    "collectives.*.time_s": Setting("used", "the collective's time"),
    "collectives.*.spread": Setting("used", "the interval"),
    "collectives.*.samples": _RECORD,
    "collectives.*.origin": Setting("used", "whether --no-exact-keys leaves it out"),
    "collectives.*.error": _RECORD,
    "segments.*": Setting("used", "the curve (a list of stretches) of collectives that were not measured"),
    "communicator_bytes.*": Setting("used", "device memory"),
    "host.*.time_s": Setting("used", "host time of the call"),
    "host.*.spread": _RECORD,
    "host.*.samples": _RECORD,
    "contention.*": _PAIRS,
    "own_contention.*": _PAIRS,
    **{f"couplings.*.{name}": setting for name, setting in _COUPLINGS.items()},
    **{f"message_couplings.*.*.{name}": setting for name, setting in _OF_MESSAGES.items()},
    **{f"own_couplings.*.{name}": setting for name, setting in (_COUPLINGS | _OWN).items()},
    **{f"own_message_couplings.*.*.{name}": setting for name, setting in (_OF_MESSAGES | _OWN).items()},
    "messages_ahead.*": Setting("used", "which messages do not wait for their receiver"),
    "rerun_spread": Setting("used", "the interval"),
    "bandwidth_factor": Setting("scales", "collectives, but for what one byte takes"),
}

SETTINGS: dict[str, Setting] = {
    "version": Setting("refused", "it is the format of the file", "Leave it out."),
    "name": Setting("none", "what reports call the profile"),
    "base": Setting("refused", "the profile was built on it", _OTHER_PROFILE),
    "provenance.*": Setting("used", "torch: which communicators messages of a pipeline take; else a record"),
    "device.kind": Setting("refused", "nothing that was measured holds for the other kind", _OTHER_PROFILE),
    "device.name": Setting("none", "what reports call the device"),
    "device.memory_bytes": Setting("used", "what fits"),
    "device.multiprocessors": Setting(
        "refused",
        "measured times do not say how kernels would fill more or fewer",
        "Set hardware.device.peak_flops_per_s.KIND, or hardware.gpu_speeds for a GPU that is faster in all.",
    ),
    "device.l2_bytes": Setting("scales", "cache.capacity_bytes, where that is not set itself, and what follows it"),
    "device.compute_capability": Setting("refused", "other devices run other kernels", _OTHER_PROFILE),
    "device.power_limit_w": Setting("used", "the clock of a step that would draw more"),
    "device.peak_flops_per_s.*": Setting("scales", "kernels that this arithmetic limits; what GEMMs draw; MFU"),
    "device.peak_memory_bytes_per_s": Setting("scales", "kernels that memory limits; what streams draw of it"),
    "gpus": Setting("scenario", "hardware.gpus"),
    "launch.latency_s": Setting("used", "from a launch to its kernel, on an idle stream"),
    "launch.gap_s": Setting("scales", "each kernel, whose measured time contains it"),
    "launch.queue_depth": Setting("used", "how far the host runs ahead"),
    "launch.synchronize_s": Setting("used", "a step that ends with a synchronisation"),
    "launch.waiting_gap_s": Setting("used", "kernels that run while other streams wait (a list)"),
    "cache.capacity_bytes": Setting("scales", "what kernels find in the cache, alone and in a step"),
    "cache.miss_s_per_byte": Setting("used", "kernels without a measured cold time"),
    "cache.code_miss_s": Setting("used", "kernels whose code has left the cache"),
    "kernels.*.time_s": Setting("used", "the kernel's time"),
    "kernels.*.cold_time_s": Setting("used", "likewise, where nothing is in the cache"),
    "kernels.*.spread": Setting("used", "the interval"),
    "kernels.*.samples": _RECORD,
    "kernels.*.kernels": Setting("used", "launches, and so gaps, of one call"),
    "kernels.*.memory_script": Setting("used", "device memory"),
    "kernels.*.origin": Setting("used", "whether --no-exact-keys leaves it out"),
    "kernels.*.error": _RECORD,
    "host.*.time_s": Setting("used", "host time of what the key names; of reference, the host's speed"),
    "host.*.cold_s": Setting("used", "likewise of the first in a row"),
    "host.*.spread": Setting("used", "of reference, the interval"),
    "host.*.samples": _RECORD,
    "curves.*.form": Setting(
        "refused", "its parameters were fitted to it", "Set hardware.curves.NAME.parameters.PARAMETER."
    ),
    "curves.*.parameters.*": Setting("used", "kernels that were not measured"),
    "curves.*.standard_errors.*": _RECORD,
    "curves.*.points": _RECORD,
    "curves.*.leave_one_out.*": Setting("used", "p90: the interval"),
    "curves.*.ranges.*": Setting("used", "which calls the curve was not fitted on, and so the interval"),
    "memory.context_bytes": Setting("used", "device memory"),
    "memory.cublas_workspace_bytes": Setting("used", "device memory"),
    "memory.cublaslt_workspace_bytes": Setting("used", "device memory"),
    "power.draw_w.*": _FITTED,
    "power.clock_hz.*": _FITTED,
    "power.idle_w": Setting("used", "the clock under the power limit"),
    "power.limit_w": Setting(
        "refused", "it is the limit under which power was measured", "Set hardware.device.power_limit_w."
    ),
    "power.full_clock_hz": Setting("used", "the clock that a report tells, and how low it may go"),
    "power.kinds.*.draw_w": Setting("used", "the clock under the power limit"),
    "power.kinds.*.clock_share": Setting("used", "how much longer kernels take at a lowered clock"),
    "power.kinds.*.flops_per_s": Setting("used", "the clock under the power limit"),
    "power.kinds.*.arithmetic": Setting("used", "the clock under the power limit"),
    "power.spread": Setting("used", "the interval at a lowered clock"),
    "power.readings.*": _FITTED,
    **{f"interconnects.*.{name}": setting for name, setting in _OF_INTERCONNECT.items()},
    "interconnect": Setting("scenario", "hardware.interconnect"),
    "transfers.*.time_s": Setting("used", "copies between host and device"),
    "transfers.*.spread": Setting("used", "the interval"),
    "transfers.*.samples": _RECORD,
    "transfers.*.error": _RECORD,
    "topology": Setting("none", "what `perfmodel topology` shows"),
    "unstable": Setting("none", "warnings"),
}


def refuse_settings(original: Profile, asked: Profile) -> None:
    """Refuse values that would change nothing, or what nothing is known of, where others say what was meant.

    Raises
    ------
    PerfModelError
        If the profiles differ in such a value.
    """
    for key, setting in SETTINGS.items():
        if setting.effect == "refused":
            values = zip(_values(original, key.split("."), ""), _values(asked, key.split("."), ""), strict=False)
            for (name, was), (_, is_now) in values:
                if was != is_now:
                    raise PerfModelError(
                        f"--set hardware.{name} must be left as it is (got {is_now!r:.60}): {setting.meaning}. "
                        f"{setting.instead}"
                    )


def _values(here: Any, names: list[str], path: str) -> Iterator[tuple[str, Any]]:
    """Dotted key and value of everything that a key with ``*`` leads to; a last ``*`` is its section as a whole."""
    name, *rest = names
    if name == "*" and not rest:
        yield path, here
    elif name == "*":
        for own, value in here.items():
            yield from _values(value, rest, f"{path}.{own}")
    else:
        value, path = getattr(here, name), f"{path}.{name}" if path else name
        if rest:
            yield from _values(value, rest, path)
        else:
            yield path, value


def settings_table() -> list[str]:
    """The table as lines of Markdown, for docs/what-if.md."""
    rows = [
        f"| `{key}` | {EFFECTS[setting.effect]} | {'. '.join(filter(None, [setting.meaning, setting.instead]))} |"
        for key, setting in SETTINGS.items()
    ]
    return ["| `hardware.` ... | when set | what follows it |", "|---|---|---|", *rows]
