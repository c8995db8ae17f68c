"""Predictors: two-layer nets that say which heads and neurons of a block a token needs.

Deja Vu (Liu et al. 2023, arXiv:2310.17157, section 4.1) trains one small classifier a layer,
D -> r -> N with N = F neurons or N = H heads. A unit is kept iff its logit lies strictly above a threshold, which is
read off a stored table of the logits' quantiles: any density can be asked for after training, and a unit's fate
depends neither on the other units nor on the rank that holds it.

Shapes (D hidden, r rank, N units, Q entries of the table):
    w1 [r, D], b1 [r], w2 [N, r], b2 [N]    one dtype
    quantiles [Q]                           fp32, on the CPU
"""

import bisect
import itertools
import math
import os

import torch
import torch.nn.functional as F
from huggingface_hub import ModelHubMixin
from torch import nn

from dejavu_ds import storage
from dejavu_ds.budget import check_budget, row_at
from dejavu_ds.fingerprint import check_fingerprint
from dejavu_ds.taps import LOOKAHEADS, UNITS

# Entry j of the table is the logit above which a share of QUANTILE_LEVELS[j] of all (token, unit) logits lies.
# Geometric: a threshold for 1 % wants the same relative precision as one for 50 %.
QUANTILE_LEVELS = (0.0, *(10 ** (-3 * (1 - i / 256)) for i in range(257)))
_TENSORS = ("w1", "b1", "w2", "b2")


class Predictor(nn.Module):
    """logits = relu(x w1^T + b1) w2^T + b2.

    The weights are bare parameters: tensor-parallel injection shards every nn.Linear that it finds inside a block.
    `quantiles` is no buffer, so that casting the model to fp16 or moving it leaves the thresholds alone and reading
    one needs no device synchronisation; None until the predictor is calibrated.
    Raises ValueError for shapes that do not fit together.
    """

    def __init__(
        self,
        w1: torch.Tensor,
        b1: torch.Tensor,
        w2: torch.Tensor,
        b2: torch.Tensor,
        quantiles: torch.Tensor | None = None,
    ):
        super().__init__()
        shapes = [tuple(tensor.shape) for tensor in (w1, b1, w2, b2)]
        rank, units = len(b1), len(b2)
        if w1.ndim != 2 or shapes != [(rank, w1.shape[-1]), (rank,), (units, rank), (units,)]:
            raise ValueError(f"expected w1 [r, D], b1 [r], w2 [N, r], b2 [N], got {shapes}")
        if quantiles is not None and tuple(quantiles.shape) != (len(QUANTILE_LEVELS),):
            raise ValueError(f"expected quantiles [{len(QUANTILE_LEVELS)}], got {tuple(quantiles.shape)}")
        for name, tensor in zip(_TENSORS, (w1, b1, w2, b2), strict=True):
            setattr(self, name, nn.Parameter(tensor, requires_grad=False))
        self.quantiles = None if quantiles is None else quantiles.detach().float().cpu()

    @classmethod
    def random(cls, hidden_size: int, rank: int, units: int, generator: torch.Generator | None = None) -> "Predictor":
        """A net to start training from, on the CPU in fp32; every weight uniform in +-1/sqrt(fan in)."""

        def uniform(*shape: int, fan_in: int) -> torch.Tensor:
            return (torch.rand(shape, generator=generator) * 2 - 1) / math.sqrt(fan_in)

        return cls(
            uniform(rank, hidden_size, fan_in=hidden_size),
            torch.zeros(rank),
            uniform(units, rank, fan_in=rank),
            torch.zeros(units),
        )

    w2_scale = None
    """As a `PackedPredictor` has it."""

    @property
    def nbytes(self) -> int:
        """Bytes of weights that a choice reads."""
        return sum(p.nbytes for p in self.parameters())

    @property
    def rank(self) -> int:
        return self.w1.shape[0]

    @property
    def units(self) -> int:
        return self.w2.shape[0]

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., D] of the weights' dtype -> [..., N] of the same."""
        return F.linear(torch.relu(F.linear(x, self.w1, self.b1)), self.w2, self.b2)

    forward = logits

    @torch.no_grad()
    def calibrate(self, logits: torch.Tensor) -> None:
        """Fill the table of quantiles from logits [...] of calibration text, pooled over tokens and units."""
        ordered = logits.detach().flatten().float().sort(descending=True).values
        # The value at place k has k values before it: strictly above it lie k, without ties.
        place = torch.tensor(QUANTILE_LEVELS, dtype=torch.float64) * len(ordered)
        self.quantiles = ordered[place.long().clamp(max=len(ordered) - 1).to(ordered.device)].cpu()

    def threshold(self, density: float) -> float:
        """The logit above which, strictly, a share `density` of the calibration logits lies; -inf from 1 on.

        Raises ValueError for a density of 0 or less, or before calibration.
        """
        if not density > 0:
            raise ValueError(f"density must lie in (0, 1], got {density}")
        if density >= 1:
            return -math.inf
        if self.quantiles is None:
            raise ValueError("the predictor has no table of quantiles: call calibrate with logits of calibration text")
        right = bisect.bisect_right(QUANTILE_LEVELS, density)
        low, high = QUANTILE_LEVELS[right - 1], QUANTILE_LEVELS[right]
        start, stop = self.quantiles[right - 1].item(), self.quantiles[right].item()
        return start + (stop - start) * (density - low) / (high - low)

    def shard(self, start: int, stop: int) -> "Predictor":
        """The predictor of units start..stop-1 alone, with the same thresholds."""
        if not 0 <= start <= stop <= self.units:
            raise ValueError(f"cannot take units {start}..{stop} of {self.units}")
        w2, b2 = self.w2[start:stop].clone(), self.b2[start:stop].clone()
        return Predictor(self.w1.data, self.b1.data, w2, b2, self.quantiles)

    def padded(self, rank: int) -> "Predictor":
        """The same net with a larger rank: the hidden units that are added are 0 for every input."""
        more = rank - self.rank
        w1, b1 = F.pad(self.w1.data, (0, 0, 0, more)), F.pad(self.b1.data, (0, more))
        return Predictor(w1, b1, F.pad(self.w2.data, (0, more)), self.b2.data, self.quantiles)


class PredictorSet(ModelHubMixin):
    """The predictors of one model, with the densities that each layer gets.

    `push_to_hub(repo_id, private=..., token=..., branch=...)` is huggingface_hub's: it uploads what `save_pretrained`
    writes.

    lookahead    "half", "full" or "none": where the inputs are taken (`dejavu_ds.taps.tap_of`).
    fingerprint  of the model they were trained for (`dejavu_ds.fingerprint.fingerprint`).
    mlp, heads   one Predictor a layer; None where the unit stays dense.
    budgets      {"mlp": budget, "heads": budget}, see `dejavu_ds.budget`.
    metadata     how they were trained and how good they are.

    Raises ValueError if these do not fit together.
    """

    def __init__(
        self,
        *,
        lookahead: str,
        fingerprint: dict,
        mlp: list[Predictor | None],
        heads: list[Predictor | None],
        budgets: dict,
        metadata: dict,
    ):
        if lookahead not in LOOKAHEADS:
            raise ValueError(f"lookahead must be one of {LOOKAHEADS}, got {lookahead!r}")
        if not mlp or len(mlp) != len(heads):
            raise ValueError(f"expected one entry a layer for both units, got {len(mlp)} mlp and {len(heads)} heads")
        for unit in UNITS:
            check_budget(unit, budgets.get(unit), len(mlp))
        self.lookahead, self.fingerprint = lookahead, fingerprint
        self.mlp, self.heads = list(mlp), list(heads)
        self.budgets, self.metadata = budgets, metadata

    @property
    def num_layers(self) -> int:
        return len(self.mlp)

    def of(self, unit: str) -> list[Predictor | None]:
        """The predictors of `unit`, "mlp" or "heads"."""
        if unit not in UNITS:
            raise ValueError(f"unit must be one of {UNITS}, got {unit!r}")
        return self.mlp if unit == "mlp" else self.heads

    def densities(self, unit: str, density: float) -> list[float]:
        """Per-layer densities [L] whose mean over layers 1 and up is `density`; layer 0 has its own.

        1.0 gives 1.0 everywhere; a layer without a predictor has 1.0, and the others do not make up for it.
        Raises ValueError outside (0, 1].
        """
        predictors = self.of(unit)
        if not 0 < density <= 1:
            raise ValueError(f"density of {unit} must lie in (0, 1], got {density}")
        row = row_at(self.budgets[unit], density)
        return [1.0 if p is None else min(d, 1.0) for p, d in zip(predictors, row, strict=True)]

    def default_density(self, unit: str) -> float:
        """The mean density that calibration chose for `unit`."""
        self.of(unit)
        return self.budgets[unit]["default"]

    def num_parameters(self, unit: str | None = None) -> int:
        """Weights and biases of one unit's predictors, or of all."""
        predictors = itertools.chain(*(self.of(name) for name in ([unit] if unit else UNITS)))
        return sum(p.numel() for predictor in predictors if predictor for p in predictor.parameters())

    def check(self, fingerprint_of_model: dict, num_layers: int, lookahead: str | None = None) -> None:
        """Raise ValueError unless this set was trained for that model and, if given, that lookahead."""
        check_fingerprint(self.fingerprint, fingerprint_of_model)
        if num_layers != self.num_layers:
            raise ValueError(f"these predictors are for {self.num_layers} layers, the model has {num_layers}")
        if lookahead is not None and lookahead != self.lookahead:
            raise ValueError(
                f"these predictors were trained with lookahead {self.lookahead!r}, {lookahead!r} was asked for: ask "
                f"for {self.lookahead!r}, or train with launch/train_predictors.py --lookahead {lookahead}"
            )

    def save_pretrained(
        self, folder: str | os.PathLike, dtype: torch.dtype = torch.float16, *, config=None, model_card_kwargs=None
    ) -> None:
        """Write predictors.safetensors (weights in `dtype`, quantiles in fp32) and predictors.json into `folder`.

        `config` and `model_card_kwargs` come from `push_to_hub` and are not used: predictors.json says all.

        Raises ValueError for a predictor that is not calibrated, or weights that `dtype` cannot hold.
        """
        storage.write(folder, self._content(), self._tensors(dtype))

    @classmethod
    def from_pretrained(cls, folder_or_hub_id: str | os.PathLike, *, revision: str | None = None) -> "PredictorSet":
        """Read a set from a folder or from the Hugging Face hub; on the CPU, in the stored dtype.

        Raises ValueError naming the file, what is wrong with it and the way out.
        """
        folder = storage.locate(folder_or_hub_id, revision)
        content = storage.read_config(folder / storage.CONFIG_FILE)
        tensors = storage.read_tensors(folder / storage.WEIGHTS_FILE)
        try:
            predictors = cls(
                lookahead=content["lookahead"],
                fingerprint=content["fingerprint"],
                **_predictors(content, tensors),
                budgets=content["budgets"],
                metadata=content["metadata"],
            )
        except ValueError as error:
            raise ValueError(f"{folder}: {error}; copy the folder again or {storage.WAY_OUT}") from error
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{folder / storage.CONFIG_FILE} is garbled ({type(error).__name__}: {error}): copy it again or "
                f"{storage.WAY_OUT}"
            ) from error
        storage.check_sum(folder, content.get("sha256"))
        return predictors

    def _content(self) -> dict:
        return {
            "lookahead": self.lookahead,
            "predictors": {
                unit: [None if p is None else {"rank": p.rank, "units": p.units} for p in self.of(unit)]
                for unit in UNITS
            },
            "budgets": self.budgets,
            "fingerprint": self.fingerprint,
            "metadata": self.metadata,
        }

    def _tensors(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """{"<unit>.<layer>.<w1 | b1 | w2 | b2 | quantiles>": tensor}."""
        tensors = {}
        for unit in UNITS:
            for layer, predictor in enumerate(self.of(unit)):
                if predictor is None:
                    continue
                if predictor.quantiles is None:
                    raise ValueError(f"the {unit} predictor of layer {layer} is not calibrated: it has no quantiles")
                for name, tensor in predictor.named_parameters():
                    tensors[f"{unit}.{layer}.{name}"] = tensor.detach().to("cpu", dtype).contiguous()
                tensors[f"{unit}.{layer}.quantiles"] = predictor.quantiles
        return tensors


def _predictors(content: dict, tensors: dict[str, torch.Tensor]) -> dict[str, list[Predictor | None]]:
    """{"mlp": [L], "heads": [L]}; ValueError for a tensor that is missing, superfluous or of a wrong shape."""
    hidden_size = content["fingerprint"]["config"]["hidden_size"]
    sets, expected = {unit: [] for unit in UNITS}, set()
    for unit in UNITS:
        for layer, entry in enumerate(content["predictors"][unit]):
            if entry is None:
                sets[unit].append(None)
                continue
            rank, units = entry["rank"], entry["units"]
            shapes = {"w1": (rank, hidden_size), "b1": (rank,), "w2": (units, rank), "b2": (units,)}
            shapes["quantiles"] = (len(QUANTILE_LEVELS),)
            for name, shape in shapes.items():
                tensor = tensors.get(f"{unit}.{layer}.{name}")
                if tensor is None or tuple(tensor.shape) != shape:
                    found = "is missing" if tensor is None else f"has shape {tuple(tensor.shape)}"
                    raise ValueError(f"tensor {unit}.{layer}.{name} {found}, expected {shape}")
            if tensors[f"{unit}.{layer}.quantiles"].diff().max() > 0:
                raise ValueError(f"tensor {unit}.{layer}.quantiles ascends, quantiles of descending levels do not")
            names = [f"{unit}.{layer}.{name}" for name in shapes]
            sets[unit].append(Predictor(*(tensors[name] for name in names)))
            expected |= set(names)
    if tensors.keys() - expected:
        raise ValueError(f"unexpected tensors {sorted(tensors.keys() - expected)[:5]}")
    return sets
