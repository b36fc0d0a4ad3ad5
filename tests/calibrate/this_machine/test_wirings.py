"""What makes NCCL take each wiring."""

import pytest

from calibrate.this_machine.wirings import environment, nodes_of
from tests.refusals import refused

LOOPBACK = {"NCCL_SOCKET_IFNAME": "lo"}


@pytest.mark.parametrize(
    ("name", "ranks", "expected"),
    [
        ("nvlink", 2, [{}, {}]),
        ("gloo", 2, [{}, {}]),
        ("host-memory", 2, [{"NCCL_P2P_DISABLE": "1"}] * 2),
        ("two-nodes", 2, [LOOPBACK | {"NCCL_HOSTID": "node0"}, LOOPBACK | {"NCCL_HOSTID": "node1"}]),
        (
            "two-nodes",
            4,
            [LOOPBACK | {"NCCL_HOSTID": "node0"}] * 2 + [LOOPBACK | {"NCCL_HOSTID": "node1"}] * 2,
        ),
    ],
)
def test_environment_of_every_rank(name, ranks, expected):
    assert [environment(name, rank, ranks) for rank in range(ranks)] == expected


def test_nodes_that_the_library_sees():
    assert [nodes_of(name) for name in ("nvlink", "host-memory", "two-nodes", "gloo")] == [1, 1, 2, 1]


def test_unknown_names_and_uneven_halves_are_refused():
    with refused("interconnect", "nvlnk", "nvlink"):
        environment("nvlnk", 0, 2)
    with refused("two-nodes", 3, 2, 4):
        environment("two-nodes", 0, 3)
