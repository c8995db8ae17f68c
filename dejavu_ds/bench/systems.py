"""What is compared: one class a system, each stepping a model from token to logits in its own way."""

import contextlib
import sys
from collections.abc import Callable, Iterator

import torch
from transformers import DynamicCache, StaticCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from dejavu_ds import DejaVuEngine
from dejavu_ds.generation import cache_field

# The keyword's name changed among the versions of transformers 5.
_CACHE = cache_field(CausalLMOutputWithPast)
NAMES = ("hf-eager", "hf-compiled", "deepspeed", "bitsandbytes", "dense", "sparse")


class System:
    """A model to decode with.

    name, variant  as in a row; the variant says how a system of that name was run.
    """

    name = ""
    variant: str | None = None
    rehearses = False
    """Whether it must have seen every length of the cache once before it is timed."""

    def start(self, prompt: torch.Tensor, capacity: int) -> None:
        """Forget all, and prefill the prompt [B, S] int64; up to `capacity` tokens will follow in all."""
        raise NotImplementedError

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """One new token a sequence, [B] int64 -> logits [B, V] of the next."""
        raise NotImplementedError

    def generate(self, prompt: torch.Tensor, new_tokens: int) -> torch.Tensor | None:
        """The system's own greedy generation, end to end; None where it has none."""
        return None

    def close(self) -> None:
        """Let go of what dropping the object does not free."""


class HFEager(System):
    """Hugging Face's model as it is, with the cache that its generate takes by default.

    The cache grows by a token a step, and libraries choose kernels anew for each length that they have not seen, for
    tens of milliseconds: a matter of the first request that a server gets, not of a step.
    """

    name = "hf-eager"
    rehearses = True

    def __init__(self, model) -> None:
        self.model = model

    def start(self, prompt: torch.Tensor, capacity: int) -> None:
        self.cache = DynamicCache(config=self.model.config)
        self.forward(prompt)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.forward(tokens[:, None])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, use_cache=True, logits_to_keep=1, **{_CACHE: self.cache}).logits[:, -1]

    def generate(self, prompt: torch.Tensor, new_tokens: int) -> torch.Tensor:
        return _greedy(self.model, prompt, new_tokens)


class DeepSpeed(HFEager):
    """`deepspeed.init_inference` of Hugging Face's model: tensor parallelism by AutoTP, or DeepSpeed's own kernels."""

    name = "deepspeed"

    def __init__(self, engine, kernel_inject: bool = False) -> None:
        super().__init__(engine.module)
        self.variant = "kernel injection" if kernel_inject else "AutoTP"
        self._engine = engine

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self._engine(input_ids=ids, use_cache=True, logits_to_keep=1, **{_CACHE: self.cache}).logits[:, -1]

    def generate(self, prompt: torch.Tensor, new_tokens: int) -> torch.Tensor:
        return _greedy(self._engine, prompt, new_tokens)


class HFCompiled(System):
    """Hugging Face's model with its static cache, the decode step compiled.

    Mask and positions are tensors of fixed size that are written in place, as Hugging Face's own generate has them.
    """

    name = "hf-compiled"

    def __init__(self, model, mode: str) -> None:
        self.variant = mode
        self.model = model

    def start(self, prompt: torch.Tensor, capacity: int) -> None:
        # Anew for every size: past a handful of them torch would silently stop compiling.
        torch.compiler.reset()
        self._compiled = torch.compile(self.model.forward, mode=self.variant, dynamic=False)
        batch, length = prompt.shape
        self._cache = StaticCache(config=self.model.config, max_cache_len=capacity)
        self._position = torch.full((batch, 1), length, device=prompt.device)
        slots = torch.arange(capacity, device=prompt.device)
        before = slots < length
        causal = slots <= torch.arange(length, device=prompt.device)[:, None]
        self._mask = before.expand(batch, 1, 1, -1).clone()
        self._run(self.model.forward, prompt, causal.expand(batch, 1, -1, -1), slots[:length].expand(batch, -1))

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        self._mask.index_fill_(3, self._position[0], True)
        logits = self._run(self._compiled, tokens[:, None], self._mask, self._position)
        self._position += 1
        return logits

    def close(self) -> None:
        """The memory of the captured graphs."""
        self._compiled = self._cache = None
        torch.compiler.reset()

    def _run(self, forward: Callable, ids, mask, positions) -> torch.Tensor:
        output = forward(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{_CACHE: self._cache},
        )
        return output.logits[:, -1]


class Ours(System):
    """This project's engine; dense as it comes, sparse once selectors are attached."""

    def __init__(self, engine: DejaVuEngine, name: str) -> None:
        self.engine = engine
        self.name = name
        self.cache = None

    def start(self, prompt: torch.Tensor, capacity: int) -> None:
        made_for = (prompt.shape[0], capacity, self.engine.cache_shapes())
        if self.cache is not None and (self.cache.batch_size, self.cache.capacity, self.cache.shapes) == made_for:
            self.cache.reset()  # with the step that was captured for it
        else:
            self.cache = None
            self.cache = self.engine.new_cache(prompt.shape[0], capacity)
        self.engine.forward(input_ids=prompt, past_key_values=self.cache, logits_to_keep=1)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.engine.decode_one_token(tokens, self.cache)

    def generate(self, prompt: torch.Tensor, new_tokens: int) -> torch.Tensor:
        return _greedy(self.engine, prompt, new_tokens)


def compile_modes(device: torch.device) -> tuple[str, ...]:
    """Modes of torch.compile to try in turn, the fastest first."""
    return ("reduce-overhead", "max-autotune-no-cudagraphs") if device.type == "cuda" else ("default",)


@contextlib.contextmanager
def quiet_stdout() -> Iterator[None]:
    """DeepSpeed prints while it splits a model: to standard error, so that standard output is the table."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def _greedy(model, prompt: torch.Tensor, new_tokens: int) -> torch.Tensor:
    return model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
