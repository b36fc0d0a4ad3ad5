"""Traces of small steps of every kind against the same steps run on an H200."""

from collections import Counter

import pytest

from tests.tracing.recordings import comparable, traced_requests
from tests.tracing.variants import VARIANTS, recorded_variant, traced_variant


@pytest.mark.parametrize("name", VARIANTS)
def test_operators_equal_the_recorded_step(name):
    mine, theirs = comparable(traced_variant(name), recorded_variant(name)["ops"])
    assert mine == theirs


@pytest.mark.parametrize("name", VARIANTS)
def test_every_traced_request_for_memory_was_recorded(name):
    mine = Counter(traced_requests(traced_variant(name), "steady"))
    theirs = Counter(tuple(request) for request in recorded_variant(name)["requests"])
    assert mine - theirs == Counter()


# Steps in which no operator allocates within itself, or whose requests can be told apart: the order is exact.
IN_ORDER = [
    "forward-resnet",
    "resnet-fp16-channels-last",
    "resnet-fp32",
    "resnet-bf16",
    "llama-eager-fp16",
    "bert-fp32",
]


@pytest.mark.parametrize("name", IN_ORDER)
def test_requests_for_memory_come_in_the_recorded_order(name):
    remaining = iter(recorded_variant(name)["requests"])
    assert all(list(request) in remaining for request in traced_requests(traced_variant(name), "steady"))
