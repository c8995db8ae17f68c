"""Keys and values of a generation, and the inputs of heads that were skipped.

Everything a decode step reads or writes has a fixed address and its length in device memory, so that a step can be
captured in a CUDA graph.

Memory, per sequence and rank, in elements of the model's dtype:
    keys and values   2 * layers * heads_local * head_dim a token of capacity
    kept inputs       (recovery_window + 1) * hidden_size a layer whose heads are sparse, whatever the context
The second line is what missing keys and values cost (Deja Vu, section 4.2): a head that is not selected stores no K/V;
the normalised input of the attention is kept in a ring instead, and the head's K/V are computed from it when the head
is next selected, or when it has been idle for the whole window. What a head misses is always one contiguous run
that ends at the current position, so one watermark a head says all. The sequences of a batch share their sets of
heads, hence also the watermarks.
"""

from dataclasses import dataclass

import torch


@dataclass
class LayerCache:
    """One layer's part, on one rank.

    k, v       [B, H, T, head_dim]
    inputs     [B, W + 1, D] ring: position p at slot p % (W + 1); None where every head runs at every step. One more
               than the window W, so that a new input never takes the place of one that an idle head still needs
    watermark  [H] int32: K/V of positions below it are there; None likewise
    window     W, 0 likewise
    """

    k: torch.Tensor
    v: torch.Tensor
    inputs: torch.Tensor | None = None
    watermark: torch.Tensor | None = None
    window: int = 0

    def copy(self) -> "LayerCache":
        """With tensors of its own."""
        fields = {name: t.clone() if isinstance(t, torch.Tensor) else t for name, t in vars(self).items()}
        return LayerCache(**fields)


@dataclass(frozen=True)
class LayerShape:
    """Sizes of one layer on this rank; window 0 says that no head is ever skipped."""

    heads: int
    head_dim: int
    window: int


class DejaVuCache:
    """The state of one batch between steps.

    Args:
        batch_size: sequences B.
        capacity: token slots T; `reserve` enlarges it.
        shapes: one `LayerShape` a layer.
        hidden_size: D, the width of the kept inputs.
        dtype, device: of K, V and inputs.

    Attributes:
        length: filled slots, on the host.
        position: [1] int32 on the device, the slot of the next token; equals `length`.
        shapes: as given.
        key_mask: [B, T] bool, False for padding; True where nothing is yet, so that a step need not set it.
        position_ids: [B] int64, the position embedding of each sequence's next token.
        live: [B] bool, sequences that still generate; the others choose no heads or neurons.
        tokens: [B] int64, the tokens of the next step, for a captured step to find.
        dense_units: of "mlp" and "heads", those that run dense in this cache though they have selectors.

    Raises:
        ValueError: no sequence, or a capacity below 0.
    """

    # Steps write in place, which torch forbids for tensors that were made under inference_mode, once it is left.
    @torch.inference_mode(False)
    def __init__(
        self,
        batch_size: int,
        capacity: int,
        shapes: list[LayerShape],
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if batch_size < 1 or capacity < 0:
            raise ValueError(f"a cache holds at least 1 sequence of 0 tokens, got {batch_size} of {capacity}")
        self.batch_size = batch_size
        self.capacity = capacity
        self.shapes = shapes
        self.length = 0
        self.position = torch.zeros(1, dtype=torch.int32, device=device)
        self.key_mask = torch.ones(batch_size, capacity, dtype=torch.bool, device=device)
        self.position_ids = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self.live = torch.ones(batch_size, dtype=torch.bool, device=device)
        self.tokens = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self.dense_units: frozenset[str] = frozenset()
        self.planned = -1  # by whom `dense_units` was decided: `StepRunner`'s number
        self.layers = [
            LayerCache(
                # Zeros, not empty: a masked slot is read by some kernels and must not hold NaN.
                k=torch.zeros(batch_size, s.heads, capacity, s.head_dim, dtype=dtype, device=device),
                v=torch.zeros(batch_size, s.heads, capacity, s.head_dim, dtype=dtype, device=device),
                inputs=torch.zeros(batch_size, s.window + 1, hidden_size, dtype=dtype, device=device)
                if s.window
                else None,
                watermark=torch.zeros(s.heads, dtype=torch.int32, device=device) if s.window else None,
                window=s.window,
            )
            for s in shapes
        ]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Filled slots; the name is transformers', whose `generate` asks."""
        return self.length

    @torch.inference_mode(False)
    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` tokens, keeping what is there."""
        if capacity <= self.capacity:
            return
        extra = capacity - self.capacity
        self.key_mask = torch.nn.functional.pad(self.key_mask, (0, extra), value=True)
        for layer in self.layers:
            layer.k = torch.nn.functional.pad(layer.k, (0, 0, 0, extra))
            layer.v = torch.nn.functional.pad(layer.v, (0, 0, 0, extra))
        self.capacity = capacity

    def advance(self, tokens: int) -> None:
        """Count `tokens` more slots as filled."""
        self.length += tokens
        self.position += tokens

    @torch.inference_mode(False)
    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens, as transformers' caches do; positions go on from what is left.

        A head that skipped some of what is left still finds their inputs: at most the window's last ones are missing.

        Raises ValueError for a length that is not among 0..`length`.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"the cache holds {self.length} tokens and cannot be cropped to {length}")
        self.position_ids -= self.key_mask[:, length : self.length].sum(1)
        self.key_mask[:, length : self.length] = True
        self.position.fill_(length)
        for layer in self.layers:
            if layer.watermark is not None:
                layer.watermark.clamp_(max=length)
        self.length = length

    def progress(self) -> list[torch.Tensor]:
        """The tensors by which a decode step moves on; what else it writes, it would write again."""
        watermarks = [layer.watermark for layer in self.layers if layer.watermark is not None]
        return [self.position, self.position_ids, *watermarks]

    @torch.inference_mode(False)
    def reset(self) -> None:
        """Forget every token, keeping the memory."""
        self.length = 0
        for tensor in self.progress():
            tensor.zero_()
        self.key_mask.fill_(True)
        self.live.fill_(True)
        self.dense_units, self.planned = frozenset(), -1

    def nbytes(self) -> int:
        """Bytes held by keys, values and kept inputs on this rank."""
        tensors = [t for layer in self.layers for t in (layer.k, layer.v, layer.inputs) if t is not None]
        return sum(t.numel() * t.element_size() for t in tensors)
