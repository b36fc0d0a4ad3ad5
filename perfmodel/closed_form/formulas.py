"""The formulas by name: what each gives, from what, under which assumptions; printed, and as numeric functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from perfmodel.closed_form import data_parallel, pipeline, sharding
from perfmodel.closed_form.data_parallel_text import DATA_PARALLEL
from perfmodel.closed_form.formula_text import FormulaText
from perfmodel.closed_form.pipeline_text import PIPELINE
from perfmodel.closed_form.sharding_text import SHARDING
from perfmodel.errors import PerfModelError, did_you_mean


@dataclass(frozen=True)
class Quantity:
    """A quantity that formulas depend on.

    Attributes
    ----------
    symbol : str
        The name in expressions.
    name : str
        The argument of the numeric function.
    unit : str
        SI unit; ``1`` for a count.
    meaning : str
        What it is, in words.
    """

    symbol: str
    name: str
    unit: str
    meaning: str


@dataclass(frozen=True)
class Formula:
    """One closed form.

    Attributes
    ----------
    name, gives, unit, derivation, assumptions, source
        As in :class:`~perfmodel.closed_form.formula_text.FormulaText`.
    quantities : tuple of Quantity
        What it is a function of, in the order of :data:`QUANTITIES`.
    expression : sympy.Expr
        The formula in the symbols of its quantities.
    """

    name: str
    gives: str
    unit: str
    quantities: tuple[Quantity, ...]
    expression: Any
    derivation: str
    assumptions: tuple[str, ...]
    source: str

    @property
    def plain(self) -> str:
        """One line that sympy, and mostly Python, reads."""
        return str(self.expression)

    @property
    def latex(self) -> str:
        """Write the formula for a paper or a notebook."""
        import sympy

        return str(sympy.latex(self.expression))


QUANTITIES = (
    Quantity("G", "gradient_bytes", "bytes", "gradients of one rank"),
    Quantity("B", "bandwidth_bytes_per_s", "bytes/s", "algbw of a large all-reduce: size over time"),
    Quantity("alpha", "call_s", "s", "cost a call: what an all-reduce of no bytes takes"),
    Quantity("T_b", "backward_s", "s", "backward alone, in which gradients become ready at a constant rate"),
    Quantity("n", "buckets", "1", "number of equal buckets"),
    Quantity("b", "bucket_bytes", "bytes", "size of each bucket"),
    Quantity("i", "bucket", "1", "which bucket, 1 is reduced first"),
    Quantity("P", "parameters", "1", "number of parameters, as many gradients"),
    Quantity("M", "memory_bytes_per_s", "bytes/s", "the device's memory bandwidth"),
    Quantity("W", "parameter_bytes", "bytes", "parameters of the whole model"),
    Quantity("W_r", "root_parameter_bytes", "bytes", "parameters in no block, which fully_shard's root holds"),
    Quantity("K", "optimizer_state_bytes", "bytes", "optimizer states of the whole model: of AdamW 2 W"),
    Quantity("N", "ranks", "1", "number of data-parallel ranks"),
    Quantity("R", "replicas", "1", "copies of the sharded model, of N / R ranks each"),
    Quantity("A", "micro_batches", "1", "micro-batches a step"),
    Quantity("p", "stages", "1", "ranks over which the model is split"),
    Quantity("m", "pipeline_micro_batches", "1", "micro-batches into which the batch is split"),
    Quantity("v", "virtual_stages", "1", "stages on each rank"),
    Quantity("s", "stage", "1", "the rank's place in the pipeline; 1 has the first stage"),
    Quantity("T_F", "forward_s", "s", "forward of one micro-batch in one stage"),
    Quantity("T_I", "input_backward_s", "s", "its backward for inputs alone"),
    Quantity("T_W", "weight_backward_s", "s", "its backward for weights alone"),
    Quantity("t", "micro_batch_s", "s", "forward and backward of one micro-batch in each stage"),
    Quantity("T", "stage_s", "s", "forward and backward of the whole batch, uncut, in each stage"),
    Quantity("a", "micro_batch_cost_s", "s", "what each micro-batch adds in each stage: launches and messages"),
)


@cache
def formulas() -> tuple[Formula, ...]:
    """Every formula, derived when first asked for. ``perfmodel formula`` lists them."""
    known = data_parallel.expressions() | sharding.expressions() | pipeline.expressions()
    return tuple(_formula(text, known[text.name]) for text in (*DATA_PARALLEL, *SHARDING, *PIPELINE))


def find_formula(name: str) -> Formula:
    """The formula of that name.

    Raises
    ------
    PerfModelError
        If there is none.
    """
    known = {each.name: each for each in formulas()}
    if name not in known:
        raise PerfModelError(f"formula must be a known one (got {name!r}). {did_you_mean(name, known)}")
    return known[name]


def lambdified(name: str) -> Callable[..., Any]:
    """The formula as a function of numbers or numpy arrays, all keyword arguments, named as :class:`Quantity` says.

    Raises
    ------
    PerfModelError
        If there is no formula of that name.

    Examples
    --------
    25 buckets of 4 MB, 1 ms each on the interconnect and 1 ms between one and the next; the last one is exposed:

    >>> exposed_s = lambdified("ddp_exposed_s")
    >>> seconds = exposed_s(gradient_bytes=1e8, bandwidth_bytes_per_s=5e9, call_s=2e-4, buckets=25, backward_s=25e-3)
    >>> f"{seconds:.6f}"
    '0.001000'
    """
    formula = find_formula(name)
    return _compiled(formula.name)


@cache
def _compiled(name: str) -> Callable[..., Any]:
    import numpy as np
    import sympy

    formula = find_formula(name)
    arguments = [sympy.Symbol(quantity.name, positive=True) for quantity in formula.quantities]
    renamed = {
        sympy.Symbol(quantity.symbol, positive=True): argument
        for quantity, argument in zip(formula.quantities, arguments, strict=True)
    }

    def largest(*terms: Any) -> Any:  # sympy's own choice, numpy.amax of a list, refuses numbers beside arrays
        found = terms[0]
        for term in terms[1:]:
            found = np.maximum(found, term)
        return found

    function = sympy.lambdify(arguments, formula.expression.subs(renamed), modules=[{"Max": largest}, "numpy"])
    function.__doc__ = f"{formula.gives}, in {formula.unit}"
    found: Callable[..., Any] = function
    return found


def describe(name: str | None = None) -> str:
    """Write every formula in two lines, or all that is known of one, as `perfmodel formula` prints it.

    Raises
    ------
    PerfModelError
        If there is no formula of that name.
    """
    if name is None:
        return "\n".join(f"{each.name} = {each.plain}\n    {each.gives}" for each in formulas())
    return _whole(find_formula(name))


def _whole(formula: Formula) -> str:
    import sympy

    drawn = sympy.pretty(formula.expression, use_unicode=True, wrap_line=False)
    wide = max(len(each.symbol) for each in formula.quantities)
    units = {each.symbol: "a number" if each.unit == "1" else each.unit for each in formula.quantities}
    lines = [
        f"{formula.name}: {formula.gives}" + ("" if formula.unit == "1" else f", in {formula.unit}"),
        "",
        *(f"    {line.rstrip()}" for line in drawn.splitlines()),
        "",
        *(
            f"    {each.symbol:<{wide}}  {each.meaning} ({units[each.symbol]}; {each.name})"
            for each in formula.quantities
        ),
        "",
        f"plain:   {formula.plain}",
        f"latex:   {formula.latex}",
        f"follows: {formula.derivation}",
        *(f"assumes: {each}" for each in formula.assumptions),
        f"source:  {formula.source}",
    ]
    return "\n".join(lines)


def _formula(text: FormulaText, expression: Any) -> Formula:
    free = {symbol.name for symbol in expression.free_symbols}
    quantities = tuple(each for each in QUANTITIES if each.symbol in free)
    return Formula(
        text.name, text.gives, text.unit, quantities, expression, text.derivation, text.assumptions, text.source
    )
