"""The engine as a model of the LM Evaluation Harness, and local files as its tasks.

The harness (lm-eval, Gao et al. 2021, https://github.com/EleutherAI/lm-evaluation-harness) chooses examples, writes
prompts and computes metrics; here it gets likelihoods and text from the very path that generates. Needs the extra
`dejavu-ds[eval]`.
"""

import contextlib
import copy
import json
import math
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from dejavu_ds.engine import DejaVuEngine
from dejavu_ds.evaluate import Scorer

# For the standard errors of metrics without a formula; within 3 % of what endless resampling would give.
_BOOTSTRAP_ITERATIONS = 1000
_ACCURACY = {"aggregation": "mean", "higher_is_better": True}
_METRICS = {
    "loglikelihood": [
        {"metric": "acc", **_ACCURACY},
        {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
    ],
    "multiple_choice": [{"metric": "acc", **_ACCURACY}, {"metric": "acc_norm", **_ACCURACY}],
}


@dataclass(frozen=True)
class TaskResult:
    """One metric of one task; `stderr` is None where the harness knows none."""

    task: str
    metric: str
    value: float
    stderr: float | None


class EngineLM(TemplateLM):
    """Scores and generates through an engine, with the selectors that are attached to it.

    Args:
        tokenizer: Hugging Face's; texts get the special tokens that it adds by default, as with the harness's own
            Hugging Face models.
        mode: as `Scorer` says. In "decode" the context goes through the decode step like the continuation: after a
            dense prefill, the first token of an answer would be the dense model's, and often it is the only one.
        batch_size: sequences of equal length at once, for dense and masked.

    Attributes:
        scorer: with the densities realised.
        tokens: predicted, since the engine was wrapped.
    """

    def __init__(self, engine: DejaVuEngine, tokenizer, mode: str, batch_size: int = 8) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.scorer = Scorer(engine, mode)
        self.tokens = 0
        self._engine = engine
        self._batch_size = batch_size

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without context."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        special = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return self.tokenizer.encode(string, **special, verbose=False)

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
        """Each text's log-likelihood in windows as long as the model allows, every token predicted once."""
        windows, owners = [], []
        for i, (text,) in enumerate(request.args for request in requests):
            ids = self.tok_encode(text, add_special_tokens=False)
            parts = get_rolling_token_windows(ids, self.prefix_token_id, self._engine.max_positions, context_len=1)
            cut = [(None, *make_disjoint_window(part)) for part in parts]
            windows += cut
            owners += [i] * len(cut)
        totals = [0.0] * len(requests)
        for i, (value, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            totals[i] += value
        return totals

    def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:
        """Texts up to the first of the stop strings: a dense prefill, then decode steps, one request at a time.

        Raises:
            ValueError: in masked mode, which has no cache to generate with.
        """
        if self.scorer.mode == "masked":
            raise ValueError("mode masked scores given text and cannot generate: run this task in mode decode")
        answers = []
        for context, options in tqdm([request.args for request in requests], disable=self._silent(disable_tqdm)):
            answers.append(self._generate(context, dict(options)))
        return answers

    def _generate(self, context: str, options: dict[str, Any]) -> str:
        stops = options.pop("until", None) or []
        stops = [stops] if isinstance(stops, str) else list(stops)
        new_tokens = options.pop("max_gen_toks", 256)
        if not options.get("do_sample"):
            options = {"do_sample": False}
        room = self._engine.max_positions - new_tokens
        if room < 1:
            raise ValueError(
                f"the task asks for {new_tokens} new tokens, the model has {self._engine.max_positions} positions; "
                "lower max_gen_toks"
            )
        ids = torch.tensor([self.tok_encode(context)[-room:]], device=self._engine.device)
        out = self._engine.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            tokenizer=self.tokenizer,
            **({"stop_strings": stops} if stops else {}),
            **options,
        )
        new = out[0, ids.shape[1] :]
        self.tokens += len(new)
        text = self.tokenizer.decode(new, skip_special_tokens=True)
        return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]

    def _loglikelihood_tokens(
        self, requests: list[tuple], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """[(anything, context ids, continuation ids)] -> [(log-likelihood, whether greedy search would write it)]."""
        longest = self._engine.max_positions + 1  # the last token is predicted, not read
        by_length = defaultdict(list)
        for i, (_, context, continuation) in enumerate(requests):
            if len(continuation) >= longest:
                raise ValueError(
                    f"a continuation of {len(continuation)} tokens does not fit the model's {longest - 1} positions"
                )
            ids = (context + continuation)[-longest:]
            by_length[len(ids)].append((i, ids, len(continuation)))
        results: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        with tqdm(total=len(requests), disable=self._silent(disable_tqdm), desc=self.scorer.mode) as bar:
            for _, group in sorted(by_length.items()):
                for start in range(0, len(group), self._batch_size):
                    batch = group[start : start + self._batch_size]
                    for (i, _, _), result in zip(batch, self._score(batch), strict=True):
                        results[i] = result
                    bar.update(len(batch))
        return results

    def _score(self, batch: list[tuple[int, list[int], int]]) -> list[tuple[float, bool]]:
        """Of sequences of one length, the last `count` tokens of each."""
        if len(batch[0][1]) < 2:
            return [(0.0, True)] * len(batch)
        ids = torch.tensor([ids for _, ids, _ in batch])
        logits = self.scorer.logits(ids[:, :-1])
        ids, results = ids.to(logits.device), []
        for row, (_, _, count) in enumerate(batch):
            start = ids.shape[1] - count
            log_probabilities = logits[row, start - 1 :].float().log_softmax(-1)
            targets = ids[row, start:]
            value = log_probabilities.gather(-1, targets[:, None]).sum().item()
            results.append((value, bool((log_probabilities.argmax(-1) == targets).all())))
            self.tokens += count
        return results

    def _silent(self, disable_tqdm: bool) -> bool:
        return disable_tqdm or self._engine.tp.rank != 0


def local_task(name: str, path: str | os.PathLike) -> dict[str, Any]:
    """The harness's configuration of a task whose items are in a .jsonl file, one JSON object a line.

    {"context", "continuation"}: the continuation's likelihood after the context and a space; `acc`, whether greedy
    search would write it, and `perplexity` of whole continuations, as lambada has it.
    {"query", "choices", "gold"}: the choices' likelihoods after the query and a space; `acc` by the highest, and
    `acc_norm` by the highest per byte; gold counts from 0.
    Few-shot examples are other items of the file.

    Raises:
        ValueError: a file that is missing or empty, or a line of another form.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"task {name}: cannot read {path}: {error}; give a .jsonl file") from error
    kinds = {_kind_of(line, f"{path} line {number}") for number, line in enumerate(lines, start=1) if line.strip()}
    if len(kinds) != 1:
        raise ValueError(f"{path} holds {'no items' if not kinds else 'items of both forms'}; give items of one form")
    (output_type,) = kinds
    if output_type == "loglikelihood":
        fields = {"doc_to_text": "{{context}}", "doc_to_target": " {{continuation}}", "target_delimiter": ""}
    else:
        fields = {"doc_to_text": "{{query}}", "doc_to_choice": "choices", "doc_to_target": "gold"}
    return {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path.resolve())}},
        "test_split": "test",
        "fewshot_split": "test",
        "output_type": output_type,
        "metric_list": copy.deepcopy(_METRICS[output_type]),
        **fields,
    }


def run_task(
    lm: EngineLM, task: str | dict[str, Any], num_fewshot: int | None = None, limit: int | None = None
) -> list[TaskResult]:
    """Let the harness run one task: a name that it knows (its data come from the hub), or what `local_task` gives.

    Collective under tensor parallelism; the results are on the first rank of each host, elsewhere the list is empty.

    Args:
        num_fewshot: examples in the prompt; None takes the task's own number, or 0.
        limit: only so many items.

    Raises:
        ValueError: a name that the harness does not know.
    """
    manager = TaskManager(include_defaults=isinstance(task, str))
    if isinstance(task, str) and not manager.match_tasks([task]):
        raise ValueError(
            f"lm-eval knows no task {task!r}; `lm-eval ls tasks` lists them, --task-file takes a local one"
        )
    # A pool of processes for the bootstrap, its default, is no good among the ranks of a job.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    with _standard_output_kept():
        results = simple_evaluate(
            lm,
            tasks=[task],
            num_fewshot=num_fewshot,
            limit=limit,
            bootstrap_iters=_BOOTSTRAP_ITERATIONS,
            log_samples=False,
            task_manager=manager,
        )
    return [] if results is None else list(_metrics(results["results"]))


def _metrics(results: dict[str, dict[str, Any]]) -> Iterator[TaskResult]:
    """The harness's {task: {"metric,filter": value, "metric_stderr,filter": ...}}, flat."""
    for task, values in results.items():
        for key, value in values.items():
            metric, _, choice = key.partition(",")
            if not choice or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            stderr = values.get(f"{metric}_stderr,{choice}")
            known = isinstance(stderr, (int, float)) and math.isfinite(stderr)
            yield TaskResult(
                task, metric if choice == "none" else f"{metric},{choice}", value, stderr if known else None
            )


def _kind_of(line: str, where: str) -> str:
    """The harness's output type for one item."""
    try:
        item = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    if isinstance(item, dict):
        if all(isinstance(item.get(key), str) for key in ("context", "continuation")):
            return "loglikelihood"
        choices, gold = item.get("choices"), item.get("gold")
        if isinstance(item.get("query"), str) and isinstance(choices, list) and isinstance(gold, int):
            if 0 <= gold < len(choices):
                return "multiple_choice"
            raise ValueError(f"{where}: gold is {gold}, but there are {len(choices)} choices, counted from 0")
    raise ValueError(f'{where}: expected {{"context", "continuation"}} or {{"query", "choices", "gold"}}')


@contextlib.contextmanager
def _standard_output_kept() -> Iterator[None]:
    """What the harness prints goes to standard error."""
    with contextlib.redirect_stdout(sys.stderr):
        yield
