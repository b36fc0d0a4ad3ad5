"""The questions and the toy profile that tests of predictions share."""

from __future__ import annotations

from perfmodel.hardware.interconnect import CollectiveSegment, Interconnect
from perfmodel.hardware.profile import Device, HostRecord, Profile
from perfmodel.scenario.scenario import Scenario

DEVICE = Device(
    kind="cuda", name="Toy GPU", memory_bytes=2**36, peak_flops_per_s={"fp32": 1e15}, peak_memory_bytes_per_s=1e15
)
HOST = {"reference": HostRecord(time_s=2e-3, spread=0.2), "call": HostRecord(time_s=1e-5)}
PROFILE = Profile(name="toy", device=DEVICE, host=HOST)
DATA = {
    "model": {"family": "gpt", "size": "tiny"},
    "batch": {"size": 1, "sequence_length": 8},
    "hardware": {"profile": "toy.json"},
    "mode": "forward",
}
SCENARIO = Scenario.model_validate(DATA)
RANKS = {
    "model": {"family": "gpt", "size": "tiny"},
    "batch": {"size": 1, "sequence_length": 8},
    "parallelism": {"dp": 4, "strategy": "ddp"},
    "hardware": {"profile": "toy.json", "gpus": 4},
}


def wired(**wires: object) -> Profile:
    """Four GPUs whose kernels take long, so that the host does not count."""
    slow_device = DEVICE.model_copy(update={"peak_flops_per_s": {"fp32": 1e9}, "peak_memory_bytes_per_s": 1e9})
    curve = CollectiveSegment(least_bytes=1, most_bytes=2**30, alpha_s=1e-3, beta_s_per_byte=1e-9)
    made = Interconnect.model_validate({"backend": "nccl", "segments": {"all_reduce 4": [curve]}, **wires})
    interconnects = {"wires": made}
    return Profile(name="toy", device=slow_device, gpus=4, interconnects=interconnects, interconnect="wires")


def with_hardware(**values: object) -> Scenario:
    return Scenario.model_validate(RANKS | {"hardware": {"profile": "toy.json", "gpus": 4, **values}})


def with_ranks(ranks: int, **hardware: object) -> Scenario:
    asked = {"profile": "toy.json", "gpus": ranks, **hardware}
    return Scenario.model_validate(RANKS | {"hardware": asked, "parallelism": {"dp": ranks, "strategy": "ddp"}})
