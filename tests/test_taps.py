import pytest

from dejavu_ds.taps import LOOKAHEADS, Tap, tap_of

# Deja Vu, section 4.3 and figure 2; block 0 has no block before it.
EXPECTED = {
    ("none", "mlp"): [Tap(0, "mlp"), Tap(1, "mlp"), Tap(2, "mlp")],
    ("none", "heads"): [Tap(0, "attention"), Tap(1, "attention"), Tap(2, "attention")],
    ("half", "mlp"): [Tap(0, "attention"), Tap(1, "attention"), Tap(2, "attention")],
    ("half", "heads"): [Tap(0, "attention"), Tap(0, "mlp"), Tap(1, "mlp")],
    ("full", "mlp"): [Tap(0, "attention"), Tap(0, "attention"), Tap(1, "attention")],
    ("full", "heads"): [Tap(0, "attention"), Tap(0, "attention"), Tap(1, "attention")],
}


@pytest.mark.parametrize("unit", ["mlp", "heads"])
@pytest.mark.parametrize("lookahead", LOOKAHEADS)
def test_taps(unit, lookahead):
    assert [tap_of(unit, layer, lookahead) for layer in range(3)] == EXPECTED[lookahead, unit]


@pytest.mark.parametrize("lookahead", LOOKAHEADS)
def test_input_exists_before_the_unit_runs(lookahead):
    order = {"attention": 0, "mlp": 1}
    for layer in range(4):
        for unit, own in (("heads", (layer, 0)), ("mlp", (layer, 1))):
            tap = tap_of(unit, layer, lookahead)
            assert (tap.layer, order[tap.point]) <= own


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("mlp", 1, "quarter"), "quarter"),
        (("neurons", 1, "half"), "neurons"),
        (("mlp", -1, "half"), "-1"),
    ],
)
def test_rejects(args, message):
    with pytest.raises(ValueError, match=message):
        tap_of(*args)
