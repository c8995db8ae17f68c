"""How predictors are trained."""

import math
from dataclasses import dataclass

from dejavu_ds.criteria import CRITERIA, HEAD_LOSSES, MLP_WEIGHTS
from dejavu_ds.taps import LOOKAHEADS, UNITS

# What `units` may be: which predictors are trained.
UNIT_CHOICES = ("all", *UNITS)
_COUNTS = ("epochs", "patience", "context", "buffer_tokens", "batch_tokens")


@dataclass(frozen=True)
class TrainConfig:
    """How to train. Raises TypeError or ValueError for a value out of range.

    lookahead            where predictors take their input, see `dejavu_ds.taps`
    units                "mlp" or "heads" trains these alone, to the same ranks and bits as "all" does; the other unit
                         stays dense
    criterion            of heads, see `dejavu_ds.criteria`
    head_loss            "size": head predictors learn how large the score is, "label": which heads have the largest of
                         a token; None: size, but label for plainact, whose size goes by how much text follows
    head_label_density   share of heads labelled as needed
    mlp_threshold        a neuron is labelled active if its pre-activation is above this; 0 for ReLU's own
    mlp_weight           what an active neuron counts by: "contribution" (activation times the norm of its fc2 column),
                         "plainact" (|activation * gradient|) or "none"
    max_parameters       predictors' parameters over those of the blocks, at most; spread over the layers by need
    rank, head_rank      r of the MLP and head predictors of every layer instead; head_rank None: half of rank
    epochs               passes over the text, at most; each runs the model again
    patience             a predictor stops after so many passes without keeping more of its unit's output
    mlp_target_density   mean density at which that is judged for neurons, spread over the layers by need
    head_target_density  the same for heads, in every layer
    context              tokens in a window
    buffer_tokens        tokens in a round: bounds the memory, see `dejavu_ds.collect`
    batch_tokens         tokens in an optimiser step
    learning_rate        peak of the one-cycle schedule
    first_layer_density  of block 0, whose input says little of what comes; 1.0: dense, no predictor; "auto": the least
                         whose mean error is at most `max_error`
    max_error            the default density is the least whose mean error per layer is at most this
    validation_share     of the documents, the last ones: never trained on
    """

    lookahead: str = "half"
    units: str = "all"
    criterion: str = "contribution"
    head_loss: str | None = None
    head_label_density: float = 0.5
    mlp_threshold: float = 0.0
    mlp_weight: str = "contribution"
    max_parameters: float = 0.06
    rank: int | None = None
    head_rank: int | None = None
    epochs: int = 6
    patience: int = 2
    mlp_target_density: float = 0.1
    head_target_density: float = 0.75
    seed: int = 0
    context: int = 256
    buffer_tokens: int = 16384
    batch_tokens: int = 512
    learning_rate: float = 8e-3
    first_layer_density: float | str = 1.0
    max_error: float = 5e-4
    validation_share: float = 0.08

    def __post_init__(self):
        if self.head_loss is None:
            object.__setattr__(self, "head_loss", "label" if self.criterion == "plainact" else "size")
        self._check_choices()
        if self.rank is not None and self.head_rank is None:
            object.__setattr__(self, "head_rank", max(1, self.rank // 2) if isinstance(self.rank, int) else self.rank)
        if self.rank is None and self.head_rank is not None:
            raise ValueError(f"head_rank {self.head_rank} without rank: give both, or neither and max_parameters")
        for name in (*_COUNTS, *(() if self.rank is None else ("rank", "head_rank"))):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name} must be an int, got {value!r}")
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.buffer_tokens < self.context:
            raise ValueError(f"buffer_tokens {self.buffer_tokens} must hold one window, context is {self.context}")
        self._check_shares()
        for name in ("learning_rate", "max_error", "max_parameters"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if not 0 <= self.mlp_threshold < math.inf:
            raise ValueError(f"mlp_threshold must be 0 or more, ReLU passes nothing below; got {self.mlp_threshold}")

    def _check_choices(self) -> None:
        choices = {"lookahead": LOOKAHEADS, "units": UNIT_CHOICES, "criterion": CRITERIA}
        choices |= {"head_loss": HEAD_LOSSES, "mlp_weight": MLP_WEIGHTS}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")

    def _check_shares(self) -> None:
        closed = {"first_layer_density", "mlp_target_density", "head_target_density"}
        for name in (*sorted(closed), "head_label_density", "validation_share"):
            value = getattr(self, name)
            if name == "first_layer_density" and value == "auto":
                continue
            if isinstance(value, str) or not (0 < value < 1 or (name in closed and value == 1)):
                raise ValueError(f"{name} must lie in (0, 1{']' if name in closed else ')'}, got {value!r}")

    @property
    def trained_units(self) -> tuple[str, ...]:
        """Those of `UNITS` that get predictors."""
        return UNITS if self.units == "all" else (self.units,)

    @property
    def gradient_units(self) -> tuple[str, ...]:
        """The units whose |activation * gradient| must be recorded."""
        wanted = {"mlp": self.mlp_weight, "heads": self.criterion}
        return tuple(unit for unit in self.trained_units if wanted[unit] == "plainact")
