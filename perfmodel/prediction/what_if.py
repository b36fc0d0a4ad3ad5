"""Settings of a what-if that change nothing are found here, so that no answer seems to be about one that it ignores.

A setting is left out and the step predicted once more: if every figure of the answer stays as it is, to the last bit,
the setting had no effect. That holds for whatever key a profile has, or will have, and for each scenario anew: a faster
memory changes nothing for a step that waits for its host.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

from perfmodel.errors import PerfModelError
from perfmodel.hardware.profile import Profile
from perfmodel.prediction.prediction import Prediction
from perfmodel.scenario.scenario import Scenario
from perfmodel.scenario.yaml_file import settings_left_out


class Idle(NamedTuple):
    """Keys of ``--set`` that change nothing, the other settings being as they are.

    Attributes
    ----------
    ignored : tuple of str
        Keys on which the answer does not depend.
    own : tuple of str
        Keys whose value the profile has anyway.
    """

    ignored: tuple[str, ...] = ()
    own: tuple[str, ...] = ()


def idle_settings(
    prediction: Prediction, predict_on: Callable[[Profile], Prediction], doubted: Collection[str] | None = None
) -> Idle:
    """Find the settings without which the answer is the same.

    Parameters
    ----------
    prediction : Prediction
        The answer with all settings.
    predict_on : callable
        Predicts the same scenario on another profile.
    doubted : collection of str, optional
        Keys to look at; all that were set if left out.
    """
    answer, ignored, own = figures(prediction), [], []
    for key, profile in settings_left_out(prediction.profile, doubted):
        if _says_the_same(profile, prediction.profile):
            own.append(key)
            continue
        try:
            without = predict_on(profile)
        except PerfModelError:  # the answer needs the setting
            continue
        if figures(without) == answer:
            ignored.append(key)
    return Idle(tuple(ignored), tuple(own))


def idle_warnings(scenario: Scenario, profile: Profile, idle: Idle) -> Iterator[str]:
    """Write a sentence for each setting that changes nothing, with the reason."""
    values = profile.provenance.get("set", {})
    for key in idle.ignored:
        yield f"{key}={values[key]} changes nothing here: without it the step and its memory are the same"
    yield from own_value_warnings(profile, idle.own)
    name = scenario.hardware.interconnect
    if name is not None and scenario.parallelism.ranks == 1:
        yield f"hardware.interconnect={name} changes nothing here: one rank does not communicate"


def own_value_warnings(profile: Profile, keys: Iterable[str]) -> Iterator[str]:
    """Write a sentence for each of the keys, whose values the profile has without them."""
    for key in keys:
        yield f"{key}={profile.provenance['set'][key]} changes nothing: the profile has that value already"


def _says_the_same(profile: Profile, other: Profile) -> bool:
    names = [name for name in Profile.model_fields if name != "provenance"]
    return _without_settings(profile) == _without_settings(other) and all(
        getattr(profile, name) == getattr(other, name) for name in names
    )


def _without_settings(profile: Profile) -> dict[str, Any]:
    return {key: value for key, value in profile.provenance.items() if key != "set"}


def figures(prediction: Prediction) -> tuple[object, ...]:
    """Return the figures of an answer. Capacity belongs to one about memory, even if everything fits into either."""
    memories = [
        (each.needed_bytes, each.peak_reserved_bytes, each.retries, str(each.out_of_memory))
        for each in prediction.rank_memories
    ]
    return (
        prediction.step_time_s,
        prediction.interval_s,
        prediction.timeline.synced_step_time_s,
        [each.step_time_s for each in prediction.rank_timelines],
        prediction.breakdown,
        prediction.bottleneck,
        prediction.communication_bytes,
        prediction.model_flops,
        prediction.clock and (prediction.clock.hz, prediction.clock.limit_w),
        memories,
        prediction.profile.device.memory_bytes if memories else None,
    )
