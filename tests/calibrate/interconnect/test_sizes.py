"""Sizes of the general collectives."""

from __future__ import annotations

from calibrate.interconnect.sizes import ladder


def test_the_ladder_is_finer_where_protocols_switch() -> None:
    sizes = ladder(2**20)
    assert sizes[:3] == [1024, 2048, 4096]
    assert sizes[-6:] == [2**18, 3 * 2**17, 2**19, 3 * 2**18, 2**20, 3 * 2**19]
    assert sorted(sizes) == sizes
