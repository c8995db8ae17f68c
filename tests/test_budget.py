import pytest

from dejavu_ds.budget import MEAN_DENSITIES, allocate_budget
from dejavu_ds.calibrate import CURVE_DENSITIES


def test_has_the_means_and_is_best():
    # Two layers whose errors are a / density: the least sum at a given mean has densities as the roots of the a.
    errors = [[a / d for d in CURVE_DENSITIES] for a in (1.0, 9.0)]
    budget = allocate_budget(CURVE_DENSITIES, errors, first_layer_density=0.6, max_error=20.0)
    for mean, row in zip(MEAN_DENSITIES, budget["rows"], strict=True):
        assert sum(row[1:]) / 2 == pytest.approx(mean, abs=0.006)
        assert row[0] == (0.6 if mean < 1 else 1.0)
    # At mean .2 that is .1 and .3, with errors 10 and 30.
    assert budget["rows"][MEAN_DENSITIES.index(0.2)][1:] == pytest.approx([0.1, 0.3], abs=0.02)
    assert budget["default"] == 0.2
    assert allocate_budget(CURVE_DENSITIES, errors, 0.6, max_error=1e-9)["default"] == 1.0


def test_of_a_curve_that_is_not_convex():
    # Nothing helps the first layer before density .5: a greedy walk along the raw curve would starve it.
    flat = [1.0 if d < 0.5 else 0.0 for d in CURVE_DENSITIES]
    slow = [0.1 * (1 - d) for d in CURVE_DENSITIES]
    row = allocate_budget(CURVE_DENSITIES, [flat, slow], 1.0, 0.01)["rows"][MEAN_DENSITIES.index(0.3)]
    assert row[1:] == pytest.approx([0.5, 0.1], abs=0.011)


def test_of_one_layer():
    assert allocate_budget(CURVE_DENSITIES, [], 1.0, 0.01)["rows"] == [[1.0]] * len(MEAN_DENSITIES)
