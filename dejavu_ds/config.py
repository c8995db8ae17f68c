"""How sparse a run is: one frozen dataclass, checked once."""

from dataclasses import dataclass

from dejavu_ds.taps import LOOKAHEADS

MODES = ("gather", "masked", "auto")


@dataclass(frozen=True)
class SparsityConfig:
    """What the decode step keeps of each block. Prefill is always dense.

    Densities are shares kept: 1.0 is dense, 0.1 reads a tenth. The number asked for is the mean over the layers after
    the first; how it is spread over them, and what the first layer keeps, was calibrated with the predictors and is
    stored with them. A unit (neuron or head) is kept when its predicted logit lies above its layer's threshold, so the
    density realised varies from token to token around the one asked for.

    Args:
        mlp_density: share of MLP neurons kept, in (0, 1]; None takes the predictor set's own default.
        head_density: share of attention heads kept, in (0, 1]; None takes the predictor set's own default.
        lookahead: "half", "full" or "none" (see `dejavu_ds.taps`); None takes the one the predictors were trained
            with, any other one is refused when the predictors are attached.
        mode: "gather" reads only the kept weights. "auto" does so where that is faster: the first step at every batch
            size is timed with the MLPs, the heads, both or none of them sparse, and the fastest way is kept for
            batches of that size; what runs dense is logged, and is no approximation. "masked" does dense arithmetic
            and zeroes what was not kept: the result of "gather" at dense cost, to check it against.
        recovery_window: tokens a head may stay idle before its missing keys and values are computed although it is
            not selected; bounds the memory of kept inputs to `(recovery_window + 1) * hidden_size` elements a layer and
            sequence, whatever the context.

    Raises:
        ValueError, TypeError: a value outside its range, with the value.
    """

    mlp_density: float | None = None
    head_density: float | None = None
    lookahead: str | None = None
    mode: str = "gather"
    recovery_window: int = 128

    def __post_init__(self) -> None:
        for name in ("mlp_density", "head_density"):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{name} must be a number in (0, 1] or None, got {value!r}")
            if not 0 < value <= 1:
                raise ValueError(f"{name} must be in (0, 1], got {value}; it is the share kept, 1.0 is dense")
        if self.lookahead is not None and self.lookahead not in LOOKAHEADS:
            raise ValueError(f"lookahead must be one of {', '.join(LOOKAHEADS)} or None, got {self.lookahead!r}")
        if self.mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {self.mode!r}; for dense give no predictors")
        window = self.recovery_window
        if isinstance(window, bool) or not isinstance(window, int):
            raise TypeError(f"recovery_window must be an int, got {window!r}")
        if window < 1:
            raise ValueError(f"recovery_window must be at least 1 token, got {window}")

    def density(self, unit: str, default: float) -> float:
        """What was asked for `unit` ("mlp" or "heads"), else `default`."""
        asked = self.head_density if unit == "heads" else self.mlp_density
        return default if asked is None else asked
