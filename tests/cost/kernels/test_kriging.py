"""What a fitted correction adds: all of a call's own weight, less of another label's, and nothing far away."""

import numpy as np
import pytest

from perfmodel.cost.kernels.features import FORMS
from perfmodel.cost.kernels.kriging import Correction, from_parameters, no_correction

FORM = FORMS["rows"]
ONE = Correction(np.array([[8.0, 10.0]]), [["4"]], np.array([0.5]), length=1.5, sharing=0.3)
PARAMETERS = {
    "correction length": 1.5,
    "correction sharing": 0.3,
    **dict(zip((f"point 0 {name}" for name in FORM.coordinates), (8.0, 10.0), strict=True)),
    "point 0 weight [4]": 0.5,
}


@pytest.mark.parametrize(
    ("place", "label", "expected"),
    [((8.0, 10.0), "4", 0.5), ((8.0, 10.0), "2", 0.15), ((80.0, 80.0), "4", 0.0)],
)
def test_the_correction_fades_with_distance_and_other_labels(place, label, expected):
    for correction in (ONE, from_parameters(PARAMETERS | {"rate": 7.0}, FORM)):
        assert correction.log_factor(np.array([place]), [[label]])[0] == pytest.approx(expected, abs=1e-9)


def test_an_octave_away_it_is_the_matern_kernel():
    r = np.sqrt(3) / 1.5
    assert ONE.log_factor(np.array([[9.0, 10.0]]), [["4"]])[0] == pytest.approx(0.5 * (1 + r) * np.exp(-r))


def test_without_points_nothing_is_corrected():
    here = np.array([[8.0, 10.0]])
    assert from_parameters({"rate": 7.0}, FORM).log_factor(here, [["4"]]).tolist() == [0.0]
    assert no_correction(2).log_factor(here, [["4"]]).tolist() == [0.0]
