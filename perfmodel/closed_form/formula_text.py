"""The words of a formula; sympy knows the rest."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FormulaText:
    """The words of a :class:`~perfmodel.closed_form.formulas.Formula`.

    Attributes
    ----------
    name : str
        Name of the formula; its expression has the same one.
    gives : str
        What its value is.
    unit : str
        SI unit of the value; ``1`` for a number.
    derivation : str
        How it follows.
    assumptions : tuple of str
        What must hold.
    source : str
        Where it comes from.
    """

    name: str
    gives: str
    unit: str
    derivation: str
    assumptions: tuple[str, ...]
    source: str
