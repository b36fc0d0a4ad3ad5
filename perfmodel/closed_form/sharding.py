"""What each form of data parallelism sends in a step and keeps between steps, derived from the collectives it runs.

A ring of n ranks cuts S bytes into n chunks. Gathering or reduce-scattering them, each rank passes on n - 1 chunks,

    (n - 1) S / n

an all-reduce is both, one after the other. In a broadcast every rank but the last of the ring passes on all of it;
where each of n ranks broadcasts its part of S, each is last once, which is (n - 1) S / n again.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple


class Symbols(NamedTuple):
    """Positive sympy symbols; :data:`perfmodel.closed_form.formulas.QUANTITIES` says what each is."""

    G: Any
    W: Any
    W_r: Any
    K: Any
    N: Any
    R: Any
    A: Any


class Collective(NamedTuple):
    """What a step moves by one kind of collective over that many ranks. size_bytes: sizes summed, as nccl-tests counts
    them: whole tensors, of which a shard is 1 / ranks. broadcasts: one by each rank, of its part.
    """

    kind: str
    size_bytes: Any
    ranks: Any


class Shares(NamedTuple):
    """By how many ranks each is shared; 1: every rank has all of it."""

    parameters: Any
    gradients: Any
    optimizer_states: Any


@cache
def symbols() -> Symbols:
    """The symbols of the formulas of this module."""
    import sympy

    return Symbols(*(sympy.Symbol(name, positive=True) for name in Symbols._fields))


@cache
def collectives() -> dict[str, tuple[Collective, ...]]:
    """Of a step of each form. fully_shard gathers what lies in blocks for forward and again for backward (zero3), what
    its root holds (W_r) once, and everything once where parameters stay after forward (zero2).
    """
    s = symbols()
    shards = s.N / s.R
    gathered = s.A * (2 * (s.W - s.W_r) + s.W_r)
    reduced = Collective("all_reduce", s.G, s.N)
    scattered = Collective("reduce_scatter", s.G, s.N)
    return {
        "ddp": (reduced,),
        "zero1_broadcast": (reduced, Collective("broadcasts", s.W, s.N)),
        "zero1_reduce_scatter": (scattered, Collective("all_gather", s.W, s.N)),
        "zero2": (Collective("all_gather", s.A * s.W, s.N), scattered),
        "zero3": (Collective("all_gather", gathered, s.N), scattered),
        "hsdp": (
            Collective("all_gather", gathered, shards),
            Collective("reduce_scatter", s.G, shards),
            Collective("all_reduce", s.G / shards, s.R),
        ),
    }


@cache
def shares() -> dict[str, Shares]:
    """Of each form, after the optimizer's step and before gradients are cleared."""
    s = symbols()
    return {
        "ddp": Shares(1, 1, 1),
        "zero1_broadcast": Shares(1, 1, s.N),
        "zero1_reduce_scatter": Shares(1, s.N, s.N),
        "zero2": Shares(s.N, s.N, s.N),
        "zero3": Shares(s.N, s.N, s.N),
        "hsdp": Shares(s.N / s.R, s.N / s.R, s.N / s.R),
    }


def sent_bytes(collective: Collective) -> Any:
    """What a rank of a ring passes on."""
    import sympy

    passes = 2 if collective.kind == "all_reduce" else 1
    return sympy.factor(passes * (collective.ranks - 1) * collective.size_bytes / collective.ranks)


def expressions() -> dict[str, Any]:
    """Every expression under the name of its formula."""
    import sympy

    s, found = symbols(), {}
    for form, moved in collectives().items():
        found[f"{form}_sent_bytes"] = sympy.Add(*map(sent_bytes, moved))
        found[f"{form}_communication_bytes"] = sympy.Add(*(sympy.factor(each.size_bytes) for each in moved))
    for form, shared in shares().items():
        kept = (s.W / shared.parameters, s.G / shared.gradients, s.K / shared.optimizer_states)
        found[f"{form}_state_bytes"] = sympy.factor_terms(sympy.Add(*kept))
    return found
