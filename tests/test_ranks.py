import pytest

from dejavu_ds.ranks import predictor_parameters, ranks_within


def total(ranks: dict, hidden: int, units: dict) -> int:
    return sum(predictor_parameters(r, hidden, units[unit]) for unit in units for r in ranks[unit])


@pytest.mark.parametrize("share", [0.02, 0.06, 0.2])
def test_budget_is_kept_and_used(share):
    units, needs = {"mlp": 1024, "heads": 8}, {"mlp": [0.02, 0.05, 0.08, 0.09, 0.11], "heads": [1.0] * 5}
    ranks = ranks_within(share, 4_738_560, 256, units, needs)
    spent = total(ranks, 256, units)
    assert share * 4_738_560 - (256 + 1024 + 1) < spent <= share * 4_738_560
    assert sum(predictor_parameters(r, 256, 8) for r in ranks["heads"]) <= 0.1 * share * 4_738_560
    # In proportion to the need, to one rank.
    per_need = sum(ranks["mlp"]) / sum(needs["mlp"])
    assert all(abs(r - need * per_need) <= 1.5 for r, need in zip(ranks["mlp"], needs["mlp"], strict=True))


def test_ranks_at_the_sizes_of_the_paper():
    """OPT-175B: 96 layers of D 12288; the paper's predictors have rank 1000."""
    hidden, layers = 12288, 96
    units = {"mlp": 4 * hidden, "heads": 96}
    ranks = ranks_within(0.06, layers * 12 * hidden**2, hidden, units, {"mlp": [1.0] * layers, "heads": [1.0] * layers})
    assert 1000 < ranks["mlp"][0] < 2000


def test_rank_stops_at_the_width():
    ranks = ranks_within(1.0, 10_000_000, 16, {"mlp": 64, "heads": 4}, {"mlp": [1.0, 2.0], "heads": [1.0, 1.0]})
    assert ranks == {"mlp": [16, 16], "heads": [16, 16]}


def test_too_small_a_budget_is_refused():
    units, needs = {"mlp": 64, "heads": 4}, {"mlp": [1.0], "heads": [1.0]}
    least = predictor_parameters(1, 16, 64) + predictor_parameters(1, 16, 4)
    assert ranks_within(least / 10_000, 10_000, 16, units, needs) == {"mlp": [1], "heads": [1]}
    with pytest.raises(ValueError, match=rf"rank 1 take {least}: allow 0.017"):
        ranks_within(0.9 * least / 10_000, 10_000, 16, units, needs)
