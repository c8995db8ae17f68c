"""A prompt line of `generate.py --interactive`: every turn goes on from the text, and the cache, of those before."""

import contextlib
import sys
import time
from collections.abc import Callable
from datetime import timedelta

from dejavu_ds.launch.common import rank, world_size

HELP = "type text to continue; each line is added to the text so far; /new forgets it; Ctrl-D ends"
# Nobody need type within the minutes after which a collective gives up.
_PATIENCE = timedelta(days=365)
_LEAST_CAPACITY = 1024


def lines_of_rank_0() -> Callable[[], str | None]:
    """A function that returns the next line typed on rank 0, on every rank alike; None once its input has ended."""
    group = None
    if world_size() > 1:
        import torch.distributed as dist

        # Not the group of the GPUs: theirs watch for work that does not end.
        group = dist.new_group(backend="gloo", timeout=_PATIENCE)
    typed = sys.stdin.isatty() if rank() == 0 else False
    if typed:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (gives `input` its history and its keys)

    def next_line() -> str | None:
        box: list = [None]
        if rank() == 0:
            with contextlib.suppress(EOFError):
                box[0] = input("> " if typed else "")
        if group is not None:
            dist.broadcast_object_list(box, src=0, group=group, device="cpu")
        return box[0]

    return next_line


class Conversation:
    """The text so far, as ids and as the cache that holds them.

    Args:
        engine: whose cache is kept.
        tokenizer: of its model.
        max_new_tokens: of a turn.
        options: further keywords of `generate`.

    Attributes:
        new_tokens: generated in all turns; seconds: that they took, the prefills included.
    """

    def __init__(self, engine, tokenizer, max_new_tokens: int, options: dict) -> None:
        self._engine, self._tokenizer = engine, tokenizer
        self._max_new_tokens, self._options = max_new_tokens, options
        self._cache = engine.new_cache(1, min(_LEAST_CAPACITY, engine.max_positions))
        self._ids = self._encode("")[:, :0]
        self.new_tokens, self.seconds = 0, 0.0

    def forget(self) -> None:
        """Begin a new text."""
        self._cache.crop(0)
        self._ids = self._ids[:, :0]

    def turn(self, line: str, streamer=None) -> bool:
        """Add a line to the text and generate; only what is new runs through the model.

        Returns:
            Whether the text so far had to be forgotten first, because the model has no positions left for more.

        Raises:
            ValueError: a line that is too long by itself, or what `generate` refuses; the text stays as it was.
        """
        import torch

        from dejavu_ds.generation import check_length

        started = self._ids.shape[1] > 0
        added = self._encode("\n" + line, special=False) if started else self._encode(line)
        ids = torch.cat([self._ids, added], dim=1)
        full = started and ids.shape[1] + self._max_new_tokens > self._engine.max_positions
        if full:
            ids = self._encode(line)
        check_length(torch.arange(ids.shape[1]), self._max_new_tokens, self._engine.max_positions)
        if full:
            self.forget()
        cached, begun = self._cache.length, time.perf_counter()
        try:
            out = self._engine.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=self._cache,
                max_new_tokens=self._max_new_tokens,
                streamer=streamer,
                **self._options,
            )
        except ValueError:
            self._cache.crop(min(cached, self._cache.length))
            raise
        self.seconds += time.perf_counter() - begun
        self.new_tokens += out.shape[1] - ids.shape[1]
        # The text goes on where the model wanted to end it.
        self._ids = out[:, :-1] if int(out[0, -1]) in self._ends() else out
        return full

    def _encode(self, text: str, special: bool = True):
        import torch

        ids = self._tokenizer(text, add_special_tokens=special).input_ids
        return torch.tensor([ids], dtype=torch.int64, device=self._engine.device)

    def _ends(self) -> list[int]:
        ends = self._engine.generation_config.eos_token_id
        return ends if isinstance(ends, list) else [ends]


def converse(conversation: Conversation, make_streamer: Callable[[], object]) -> None:
    """Turn after turn until the input ends, on every rank; what a turn is refused for is said and another one taken.

    Args:
        make_streamer: for the tokens of a turn, on rank 0.
    """
    first = rank() == 0
    next_line = lines_of_rank_0()
    if first:
        print(HELP, file=sys.stderr, flush=True)
    while (line := next_line()) is not None:
        if not line.strip():
            continue
        if line.strip() == "/new":
            conversation.forget()
            continue
        try:
            forgotten = conversation.turn(line, make_streamer() if first else None)
        except ValueError as error:
            if first:
                print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
            continue
        if forgotten and first:
            print("(the text before that line is forgotten: the model has no positions left)", file=sys.stderr)
