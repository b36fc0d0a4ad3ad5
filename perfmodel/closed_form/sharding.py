"""What each form of data parallelism sends in a step and keeps between steps, derived from the collectives it runs.

A ring of n ranks splits S bytes into n chunks. Gathering or reduce-scattering them, each rank passes on n - 1 chunks,

    (n - 1) S / n

an all-reduce is both, one after the other. In a broadcast every rank but the last of the ring passes on all of it;
where each of n ranks broadcasts its shard of S, each is last once, which is (n - 1) S / n as well.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple


class ShardingSymbols(NamedTuple):
    """Positive sympy symbols; :data:`perfmodel.closed_form.formulas.QUANTITIES` says what each is."""

    G: Any
    W: Any
    W_r: Any
    K: Any
    N: Any
    R: Any
    A: Any


class StepCollectives(NamedTuple):
    """All collectives of one kind in a step.

    Attributes
    ----------
    kind : str
        Such as ``all_reduce``; ``broadcasts`` is one broadcast by each rank, of its shard.
    size_bytes : sympy.Expr
        Sum of their sizes as nccl-tests counts them: whole tensors, of which a shard is 1 / ranks.
    ranks : sympy.Expr
        Number of ranks in each.
    """

    kind: str
    size_bytes: Any
    ranks: Any


class Shares(NamedTuple):
    """Numbers of ranks by which each kind of state is shared; 1 if every rank has all of it."""

    parameters: Any
    gradients: Any
    optimizer_states: Any


@cache
def symbols() -> ShardingSymbols:
    """The symbols of the formulas of this module."""
    import sympy

    return ShardingSymbols(*(sympy.Symbol(name, positive=True) for name in ShardingSymbols._fields))


@cache
def collectives() -> dict[str, tuple[StepCollectives, ...]]:
    """Return the collectives of a step of each form.

    fully_shard gathers the parameters of blocks for forward and once more for backward (zero3), those of its root (W_r)
    once, and all parameters once if they stay gathered after forward (zero2).
    """
    s = symbols()
    shards = s.N / s.R
    gathered = s.A * (2 * (s.W - s.W_r) + s.W_r)
    reduced = StepCollectives("all_reduce", s.G, s.N)
    scattered = StepCollectives("reduce_scatter", s.G, s.N)
    return {
        "ddp": (reduced,),
        "zero1_broadcast": (reduced, StepCollectives("broadcasts", s.W, s.N)),
        "zero1_reduce_scatter": (scattered, StepCollectives("all_gather", s.W, s.N)),
        "zero2": (StepCollectives("all_gather", s.A * s.W, s.N), scattered),
        "zero3": (StepCollectives("all_gather", gathered, s.N), scattered),
        "hsdp": (
            StepCollectives("all_gather", gathered, shards),
            StepCollectives("reduce_scatter", s.G, shards),
            StepCollectives("all_reduce", s.G / shards, s.R),
        ),
    }


@cache
def shares() -> dict[str, Shares]:
    """Return how each form shares its states, after the optimizer's step and before gradients are cleared."""
    s = symbols()
    return {
        "ddp": Shares(1, 1, 1),
        "zero1_broadcast": Shares(1, 1, s.N),
        "zero1_reduce_scatter": Shares(1, s.N, s.N),
        "zero2": Shares(s.N, s.N, s.N),
        "zero3": Shares(s.N, s.N, s.N),
        "hsdp": Shares(s.N / s.R, s.N / s.R, s.N / s.R),
    }


def sent_bytes(collective: StepCollectives) -> Any:
    """Return the bytes that a rank of a ring sends."""
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
