"""How wide each predictor may be: a budget of parameters, spread over the layers by need."""

from collections.abc import Sequence

# Heads are few, and so is what there is to tell them apart by: a tenth of the budget is theirs.
_HEAD_SHARE = 0.1


def predictor_parameters(rank: int, hidden_size: int, units: int) -> int:
    """Parameters of a net D -> r -> N with its biases."""
    return rank * (hidden_size + units + 1) + units


def ranks_within(
    max_share: float, block_parameters: int, hidden_size: int, units: dict[str, int], needs: dict[str, Sequence[float]]
) -> dict[str, list[int]]:
    """Ranks of the predictors of each unit kind, layer by layer, that have at most max_share * block_parameters in all.

    block_parameters  of all decoder blocks of the model
    units             {"mlp": F, "heads": H}
    needs             {unit: a number above 0 for each trained layer}: rank goes by it, up to D. A layer with 2 % of its
                      neurons active has less to tell than one with 11 %.

    Raises ValueError if the budget does not pay for rank 1 everywhere.
    """
    budget = max_share * block_parameters
    least = {unit: len(needs[unit]) * predictor_parameters(1, hidden_size, n) for unit, n in units.items()}
    if sum(least.values()) > budget:
        raise ValueError(
            f"max_parameters {max_share:g} is {budget:,.0f} of {block_parameters:,} block parameters; predictors of "
            f"rank 1 take {sum(least.values()):,}: allow {sum(least.values()) / block_parameters:.2g} or more"
        )
    for_heads = max(min(_HEAD_SHARE * budget, budget - least["mlp"]), least["heads"])
    heads = _spread(for_heads - least["heads"], hidden_size, units["heads"], needs["heads"])
    spent = sum(predictor_parameters(rank, hidden_size, units["heads"]) for rank in heads)
    return {"mlp": _spread(budget - spent - least["mlp"], hidden_size, units["mlp"], needs["mlp"]), "heads": heads}


def _spread(budget: float, hidden_size: int, units: int, needs: Sequence[float]) -> list[int]:
    """Give every layer rank 1, then rank after rank to the one that has the least for its need."""
    ranks = [1] * len(needs)
    for _ in range(int(budget // (hidden_size + units + 1))):
        growing = [i for i, rank in enumerate(ranks) if rank < hidden_size]
        if not growing:
            break
        ranks[min(growing, key=lambda i: ranks[i] / needs[i])] += 1
    return ranks
