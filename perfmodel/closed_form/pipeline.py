"""What a pipeline of equal stages waits for and keeps, and into how many micro-batches its batch is best split.

Each of p ranks works v stages of the model through m micro-batches, m v (T_F + T_I + T_W) in all. A step takes that and
a bubble of (p - 1) h, where h is what one more rank adds:

    T_F + T_I + T_W                 GPipe (any m), 1F1B, interleaved 1F1B and looped breadth first (m >= p): the first
                                    forward's way to the last rank, and the last backward's way back
    max(T_F, T_I, T_F + T_I - T_W)  interleaved zero bubble (m >= p; with v = 1 ZB-H1): the rest is weights' gradients
    T_F                             the V of zero bubble, if T_F = T_I = T_W and m >= 2 p - 1: the way there alone
    2 T_F + max(0, T_I - T_W)       DualPipeV, if T_F >= T_I (m >= 2 p), whose pairs torch runs one after the other

So it is with the orders that torch.distributed.pipelining runs, which the tests execute, for every m there that torch
accepts, if messages take no time and no message holds up those of another pair of ranks. Before torch 2.12 they share
one communicator and do: with three ranks or more, all but GPipe and 1F1B then wait longer.

In flight is a micro-batch of a stage from its forward to the end of its backward.

Sources: GPipe, arXiv 1811.06965; 1F1B, arXiv 2006.09503 (PipeDream-flush); interleaved 1F1B, arXiv 2104.04473; looped
breadth first, arXiv 2211.05953; zero bubble, arXiv 2401.10241; DualPipe, arXiv 2412.19437, and DualPipeV,
github.com/deepseek-ai/DualPipe (where pairs overlap).
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple


class PipelineSymbols(NamedTuple):
    """Positive sympy symbols; :data:`perfmodel.closed_form.formulas.QUANTITIES` says what each is."""

    p: Any
    m: Any
    v: Any
    s: Any
    T_F: Any
    T_I: Any
    T_W: Any
    t: Any
    T: Any
    a: Any


class MicroBatches(NamedTuple):
    """Smaller bubbles against a cost of each micro-batch, as sympy expressions.

    Attributes
    ----------
    equal_stages
        Seconds of a step of m micro-batches that take t seconds in each stage.
    step
        Seconds of a step whose batch takes T seconds, split into m micro-batches that each cost a seconds more.
    best
        Number of micro-batches at which ``step`` is least.
    least
        Seconds of that step.
    """

    equal_stages: Any
    step: Any
    best: Any
    least: Any


@cache
def symbols() -> PipelineSymbols:
    """The symbols of the formulas of this module."""
    import sympy

    return PipelineSymbols(*(sympy.Symbol(name, positive=True) for name in PipelineSymbols._fields))


@cache
def micro_batches() -> MicroBatches:
    """Derive the trade-off: the first micro-batch passes p stages, and m - 1 follow it."""
    import sympy

    s = symbols()
    equal_stages = s.t * (s.m + s.p - 1)
    step = equal_stages.subs(s.t, s.T / s.m + s.a)
    (best,) = sympy.solve(sympy.diff(step, s.m), s.m)
    hops = sympy.Symbol("hops", positive=True)
    least = sympy.expand(step.subs(s.m, best).subs(s.p, hops + 1)).subs(hops, s.p - 1)
    return MicroBatches(equal_stages, step, best, least)


def expressions() -> dict[str, Any]:
    """Every expression under the name of its formula."""
    import sympy

    s, trade_off = symbols(), micro_batches()
    work = s.T_F + s.T_I + s.T_W
    longest = sympy.Max(s.T_F, s.T_I, s.T_F + s.T_I - s.T_W)
    return {
        "pipeline_bubble_fraction": _bubble_fraction(work, work, 1),
        "pipeline_interleaved_bubble_fraction": _bubble_fraction(work, work, s.v),
        "pipeline_zero_bubble_fraction": _bubble_fraction(longest, work, s.v),
        "pipeline_zbv_bubble_fraction": _bubble_fraction(s.T_F, work.subs({s.T_I: s.T_F, s.T_W: s.T_F}), 2),
        "pipeline_dualpipev_bubble_fraction": _bubble_fraction(2 * s.T_F + sympy.Max(0, s.T_I - s.T_W), work, 2),
        "pipeline_gpipe_in_flight_micro_batches": s.v * s.m,
        "pipeline_1f1b_in_flight_micro_batches": s.p - s.s + 1,
        "pipeline_interleaved_in_flight_micro_batches": (s.v - 1) * s.p + 2 * (s.p - s.s) + 1,
        "pipeline_zero_bubble_in_flight_micro_batches": s.v * s.p,
        "pipeline_equal_stages_s": trade_off.equal_stages,
        "pipeline_step_s": trade_off.step,
        "pipeline_best_micro_batches": trade_off.best,
        "pipeline_least_step_s": trade_off.least,
    }


def _bubble_fraction(a_hop: Any, work: Any, virtual_stages: Any) -> Any:
    """Return the bubble as a share of the step.

    Parameters
    ----------
    a_hop
        Seconds h that one more rank adds (see the module).
    work
        Seconds of one micro-batch in one stage.
    virtual_stages
        Stages on each rank.
    """
    s = symbols()
    return (s.p - 1) / (s.p - 1 + s.m * virtual_stages * work / a_hop)
