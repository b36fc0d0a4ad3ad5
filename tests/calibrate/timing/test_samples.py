from __future__ import annotations

from collections.abc import Callable

import pytest

from calibrate.timing.cuda_stopwatch import CudaStopwatch, SynchronizesError
from calibrate.timing.samples import CpuStopwatch, Limits, Samples, calls_per_sample, is_enough, relative_spread

LIMITS = Limits()


def test_median_and_spread() -> None:
    samples = Samples((3.0, 1.0, 2.0), 10)
    assert samples.median_s == 2.0
    assert samples.spread == 0.5


@pytest.mark.parametrize("values", [(), (1.0,), (0.0, 0.0)])
def test_no_spread_where_there_is_nothing_to_compare(values: tuple[float, ...]) -> None:
    assert relative_spread(values) == 0.0


@pytest.mark.parametrize(("call_s", "calls"), [(0.0, 400), (1e-6, 400), (1e-4, 30), (3e-3, 1), (1.0, 1)])
def test_a_sample_lasts_three_milliseconds(call_s: float, calls: int) -> None:
    assert calls_per_sample(call_s, LIMITS) == calls


@pytest.mark.parametrize(
    ("values", "spent_s", "enough"),
    [
        ([], 9.0, False),
        ([1e-3] * 4, 9.0, False),
        ([1e-3] * 5, 0.0, True),
        ([1e-3, 2e-3] * 3, 0.0, False),
        ([1e-3, 2e-3] * 3, 0.06, True),
        ([1e-3, 2e-3, 1e-3] * 3, 0.0, True),
        ([0.1, 0.2], 9.0, False),
        ([0.1, 0.2, 0.1], 0.01, False),
        ([0.1, 0.2, 0.1], 0.06, True),
    ],
)
def test_when_to_stop(values: list[float], spent_s: float, enough: bool) -> None:
    assert is_enough(values, spent_s, LIMITS) is enough


def test_the_cpu_stopwatch_divides_by_its_calls() -> None:
    now = [0.0]

    def call() -> None:
        now[0] += 0.0005

    samples = CpuStopwatch(Limits(fewest=3, sample_s=2e-3), clock=lambda: now[0]).measure(call)
    assert samples.calls == 4
    assert samples.values_s == pytest.approx([0.0005] * 3)


class Simulated:
    """A device and its host with one clock: a launch queue of limited length, calls that cost host and device time."""

    def __init__(self, host_s: float, device_s: float, kernels: int = 1, hold_scale: float = 1.0) -> None:
        self.now_s = 0.0
        self.host_s, self.device_s, self.kernels, self.hold_scale = host_s, device_s, kernels, hold_scale
        self.queue = 1024
        self.ends_s: list[float] = []
        self.longest_hold_s = 0.0

    def _launch(self, seconds: float) -> None:
        if len(self.ends_s) >= self.queue:
            self.now_s = max(self.now_s, self.ends_s[-self.queue])
        begin_s = max(self.now_s, self.ends_s[-1] if self.ends_s else 0.0)
        self.ends_s.append(begin_s + seconds)

    def call(self) -> None:
        self.now_s += self.host_s
        for _ in range(self.kernels):
            self._launch(self.device_s / self.kernels)

    def synchronizing_call(self) -> None:
        self.call()
        self.drain()

    def hold(self, seconds: float) -> None:
        self.longest_hold_s = max(self.longest_hold_s, seconds)
        self._launch(seconds * self.hold_scale)

    def mark(self) -> float:
        return self.ends_s[-1]

    def passed(self, mark: float) -> bool:
        return self.now_s >= mark

    def between_s(self, first: float, last: float) -> float:
        self.drain()
        return last - first

    def drain(self) -> None:
        self.now_s = max(self.now_s, self.ends_s[-1] if self.ends_s else 0.0)


def measure(device: Simulated, call: Callable[[], object] | None = None) -> Samples:
    return CudaStopwatch(device, clock=lambda: device.now_s).measure(call or device.call)


@pytest.mark.parametrize(
    ("host_s", "device_s", "kernels"),
    [
        (5e-6, 2e-6, 1),  # the host is slower than the device
        (5e-6, 100e-6, 1),
        (5e-3, 4e-3, 300),  # an optimizer's lists
        (2e-3, 50e-6, 20),  # twenty launches a call: the queue fills up
        (5e-6, 20e-3, 1),
        (30e-3, 100e-3, 100),
    ],
)
def test_device_time_is_found_however_slow_the_host(host_s: float, device_s: float, kernels: int) -> None:
    samples = measure(Simulated(host_s, device_s, kernels))
    assert samples.values_s == pytest.approx([device_s] * len(samples.values_s))
    assert len(samples.values_s) >= (3 if device_s > LIMITS.long_call_s else 5)


def test_a_full_queue_means_fewer_calls() -> None:
    assert measure(Simulated(1e-6, 4e-6, kernels=4)).calls <= 1024 // 4


def test_a_short_hold_is_noticed_and_made_longer() -> None:
    device = Simulated(10e-6, 20e-6, hold_scale=0.5)
    assert measure(device).median_s == pytest.approx(20e-6)


def test_a_call_that_waits_for_the_device_is_refused() -> None:
    device = Simulated(5e-6, 10e-6)
    with pytest.raises(SynchronizesError):
        measure(device, device.synchronizing_call)


def test_a_limited_stopwatch_takes_fewer_samples_of_the_same_device() -> None:
    device = Simulated(5e-6, 100e-6)
    stopwatch = CudaStopwatch(device, clock=lambda: device.now_s).limited(Limits(fewest=2, most=2))
    assert stopwatch.measure(device.call).values_s == pytest.approx([100e-6] * 2)
