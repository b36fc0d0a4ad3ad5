"""Words of the formulas of :mod:`perfmodel.closed_form.pipeline`."""

from __future__ import annotations

from perfmodel.closed_form.formula_text import FormulaText

_CUT = "derived in perfmodel/closed_form/pipeline.py"
_TORCH = "orders of torch/distributed/pipelining/schedules.py, executed"
_FREE = "messages take no time, and delay none of another pair of ranks: with more than two, torch 2.12 or later"
_EQUAL = (_FREE, "equal stages, and the host keeps up")
_SPLIT = (*_EQUAL, "a backward takes T_I + T_W, at once or apart")


def _bubble(name: str, title: str, a_hop: str, assumptions: tuple[str, ...], source: str) -> FormulaText:
    return FormulaText(
        name=f"pipeline_{name}fraction",
        gives=f"share of a step of {title} in which a rank computes nothing",
        unit="1",
        derivation=f"(p - 1) h over that and a rank's work: one more rank adds h = {a_hop}",
        assumptions=assumptions,
        source=f"{_CUT}; {_TORCH}; {source}",
    )


def _in_flight(name: str, title: str, derivation: str, assumptions: tuple[str, ...] = ()) -> FormulaText:
    return FormulaText(
        name=f"pipeline_{name}_in_flight_micro_batches",
        gives=f"most micro-batches that a rank of {title} holds activations of, counted in each of its stages",
        unit="1",
        derivation=derivation,
        assumptions=("until all of the backward is over", *assumptions),
        source=f"{_CUT}; {_TORCH}",
    )


_WHOLE = "a forward there and a backward back"
PIPELINE = (
    _bubble(
        name="bubble_",
        title="GPipe or 1F1B",
        a_hop=_WHOLE,
        assumptions=(*_EQUAL, "1F1B: m >= p"),
        source="arXiv 1811.06965 (GPipe), 2006.09503 (1F1B)",
    ),
    _bubble(
        name="interleaved_bubble_",
        title="interleaved 1F1B or looped breadth first",
        a_hop=_WHOLE,
        assumptions=(*_EQUAL, "m >= p, or v = 1"),
        source="arXiv 2104.04473 (interleaved), 2211.05953 (breadth first)",
    ),
    _bubble(
        name="zero_bubble_",
        title="interleaved zero bubble (v = 1: ZB-H1)",
        a_hop="max(T_F, T_I, T_F + T_I - T_W), what gradients of weights do not fill",
        assumptions=(*_SPLIT, "m >= p"),
        source="arXiv 2401.10241",
    ),
    _bubble(
        name="zbv_bubble_",
        title="the V of zero bubble",
        a_hop="T_F, a forward there",
        assumptions=(*_SPLIT, "T_F = T_I = T_W", "m >= 2 p - 1"),
        source="arXiv 2401.10241",
    ),
    _bubble(
        name="dualpipev_bubble_",
        title="DualPipeV",
        a_hop="2 T_F + max(0, T_I - T_W)",
        assumptions=(
            *_SPLIT,
            "T_F >= T_I",
            "m >= 2 p",
            "the pairs of a forward and a backward do not overlap, as in torch",
        ),
        source="arXiv 2412.19437; github.com/deepseek-ai/DualPipe",
    ),
    _in_flight("gpipe", "GPipe (v = 1) or looped breadth first", "every forward precedes the first backward"),
    _in_flight("1f1b", "1F1B", "p - s + 1 forwards precede the first backward, then one precedes each", ("m >= p",)),
    _in_flight(
        "interleaved",
        "interleaved 1F1B",
        "(v - 1) p + 2 (p - s) forwards precede the first pair of a forward and a backward",
        ("p divides m, and m >= 2 p",),
    ),
    _in_flight(
        "zero_bubble",
        "interleaved zero bubble or, v = 2, of its V",
        "rank s runs (v - 1) p + p - s + 1 forwards before the first backward, and leaves s - 1 weights for later",
        ("p divides m; of the V m >= 2 p",),
    ),
    FormulaText(
        name="pipeline_equal_stages_s",
        gives="step of GPipe or 1F1B",
        unit="s",
        derivation="the first micro-batch passes p stages, and m - 1 follow it",
        assumptions=(*_EQUAL, "1F1B: m >= p"),
        source=f"{_CUT}; {_TORCH}",
    ),
    FormulaText(
        name="pipeline_step_s",
        gives="step of GPipe or 1F1B whose micro-batches each cost something more",
        unit="s",
        derivation="pipeline_equal_stages_s with t = T / m + a",
        assumptions=(*_EQUAL, "1F1B: m >= p", "a smaller micro-batch computes as efficiently: what it loses is in a"),
        source=_CUT,
    ),
    FormulaText(
        name="pipeline_best_micro_batches",
        gives="number of micro-batches at which pipeline_step_s is least: less bubble against more cost",
        unit="1",
        derivation="d pipeline_step_s / dm = 0",
        assumptions=(*_EQUAL, "m is continuous: try the whole numbers on both sides; 1F1B: m >= p"),
        source=_CUT,
    ),
    FormulaText(
        name="pipeline_least_step_s",
        gives="pipeline_step_s with pipeline_best_micro_batches",
        unit="s",
        derivation="pipeline_step_s at m = sqrt(T (p - 1) / a)",
        assumptions=(*_EQUAL, "m is continuous"),
        source=_CUT,
    ),
)
