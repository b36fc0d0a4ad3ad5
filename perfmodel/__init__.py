"""Predict how distributed PyTorch training behaves: step time, memory, timeline and bottleneck.

>>> import perfmodel
>>> prediction = perfmodel.predict("scenarios/gpt2.7b.yaml")
>>> prediction.fits
True

What a program needs stands here; each name is loaded when it is first used, so that importing perfmodel stays cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perfmodel.hardware.profile import load_profile
    from perfmodel.prediction.predict import predict
    from perfmodel.prediction.prediction import Prediction
    from perfmodel.prediction.sweep import sweep
    from perfmodel.scenario.yaml_file import load_scenario

__version__ = "0.1.0"
__all__ = ["Prediction", "load_profile", "load_scenario", "predict", "sweep"]

_MODULES = {
    "Prediction": "perfmodel.prediction.prediction",
    "load_profile": "perfmodel.hardware.profile",
    "load_scenario": "perfmodel.scenario.yaml_file",
    "predict": "perfmodel.prediction.predict",
    "sweep": "perfmodel.prediction.sweep",
}


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
