"""The decode benchmark: every system through the same tokens, one row each."""

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from dejavu_ds import SparsityConfig
from dejavu_ds.bench.collective import all_reduce_rows
from dejavu_ds.bench.random_predictors import attach_calibrated, random_predictors, union_density
from dejavu_ds.bench.results import make_row, one_line
from dejavu_ds.bench.source import Source
from dejavu_ds.bench.systems import DeepSpeed, HFCompiled, HFEager, Ours, System, compile_modes
from dejavu_ds.bench.timing import peak_bytes, reset_peak, spread, synchronize, time_calls, time_steps
from dejavu_ds.bench.traffic import cache_bytes, check_memory, step_bytes

# Up to so many sequences fc2 skips rows whose activations are zero.
_SKIPPING_BATCH = 4
# The order in which one Hugging Face model can serve all: our engine takes it over, and kernel injection, which leaves
# DeepSpeed in a state of its own where it fails, comes last with another model.
ORDER = ("hf-eager", "hf-compiled", "deepspeed", "dense", "sparse", "deepspeed-kernels")
IN_ONE_PROCESS = ("hf-eager", "hf-compiled", "deepspeed-kernels")


@dataclass(frozen=True)
class Load:
    """What one setting decodes: random tokens, equal for all systems.

    The timed steps lie half before and half after the context, so that it is what they attend to on average.

    prompt    [B, S] int64
    warmup    steps before the timed ones, each [B] int64
    tokens    the timed ones, likewise
    """

    context: int
    prompt: torch.Tensor
    warmup: list[torch.Tensor]
    tokens: list[torch.Tensor]

    @property
    def batch(self) -> int:
        return self.prompt.shape[0]

    @property
    def capacity(self) -> int:
        """Tokens in all."""
        return self.prompt.shape[1] + len(self.warmup) + len(self.tokens)

    @classmethod
    def make(cls, shape, batch: int, context: int, steps: int, warmup: int, device: torch.device) -> "Load":
        """Raises ValueError where the steps do not fit around the context into the model's positions."""
        start = context - steps // 2 - warmup
        stop = start + warmup + steps
        if context > shape.positions:
            raise ValueError(f"context {context} is beyond the {shape.positions} positions of {shape.name}")
        if start < 1 or stop > shape.positions:
            raise ValueError(
                f"{warmup} + {steps} steps around context {context} would run from token {start} to {stop}, "
                f"{shape.name} has positions 1..{shape.positions}: ask for fewer --steps or another context"
            )
        ids = torch.randint(3, shape.vocab, (batch, stop), generator=torch.Generator().manual_seed(0)).to(device)
        columns = [ids[:, i].contiguous() for i in range(start, stop)]
        return cls(context, ids[:, :start].contiguous(), columns[:warmup], columns[warmup:])


@dataclass(frozen=True)
class Plan:
    """One run of the benchmark.

    benchmark        "decode", "batch" or "tp"
    systems          of `ORDER`
    mlp_density, head_density  of one sequence; a batch keeps the union of as many independent sets
    ranks            of random predictors, {"mlp": r, "heads": r}
    limit            GB/s of the device
    generate_tokens  measured end to end; 0: none
    """

    benchmark: str
    source: Source
    systems: tuple[str, ...]
    loads: list[Load]
    mlp_density: float
    head_density: float
    ranks: dict[str, int]
    limit: float
    generate_tokens: int
    progress: Callable[[str], None] = field(default=print)


def run_plan(plan: Plan) -> Iterator[list[dict[str, Any]]]:
    """Rows, system by system; each is gone from memory before the next begins, but for the weights they share.

    Over several ranks rows of the engine's all-reduce, one a batch size, come after them.
    """
    source = plan.source
    try:
        for name in ORDER:
            if name in plan.systems:
                yield _rows(plan, name)
        if source.tp > 1 and {"dense", "sparse"} & set(plan.systems):
            batches = sorted({load.batch for load in plan.loads})
            yield all_reduce_rows(source, plan.benchmark, batches, len(plan.loads[0].tokens))
    finally:
        plan.source.close()


def _rows(plan: Plan, name: str) -> list[dict[str, Any]]:
    """One row a load; the first way to run the system that works at all is taken, else its last error."""
    rows, error = [], None
    for build in _ways(plan, name):
        reset_peak(plan.source.device)
        rows, system = [], None
        try:
            system = build()
        except Exception as problem:
            error = one_line(problem)
        for load in plan.loads if system is not None else ():
            plan.progress(f"{name}, batch {load.batch}, context {load.context}")
            try:
                rows.append(_describe(plan, name, load) | _measure(plan, system, load))
            except Exception as problem:
                error = one_line(problem)
                rows.append(_describe(plan, name, load) | {"variant": system.variant, "error": error})
        if system is not None:
            system.close()
        del system
        _free(plan.source.device)
        if any(row["ms_median"] is not None for row in rows):
            return rows
    return rows or [_describe(plan, name, load) | {"error": error} for load in plan.loads]


def _ways(plan: Plan, name: str) -> Iterator[Callable[[], System]]:
    """How a system may be built, the best first. A new system is a class in `systems` and a case here."""
    source = plan.source
    if name == "hf-eager":
        yield lambda: HFEager(source.model())
    elif name == "hf-compiled":
        for mode in compile_modes(source.device):
            yield lambda mode=mode: HFCompiled(source.model(), mode)
    elif name == "deepspeed":
        yield lambda: DeepSpeed(source.deepspeed())
    elif name == "deepspeed-kernels":
        yield lambda: _kernel_injection(source)
    else:
        yield lambda: _ours(plan, name)


def _kernel_injection(source: Source) -> DeepSpeed:
    if source.device.type != "cuda":
        raise NotImplementedError("DeepSpeed's own kernels are for CUDA")
    source.close()
    return DeepSpeed(source.deepspeed(kernel_inject=True), kernel_inject=True)


def _ours(plan: Plan, name: str) -> Ours:
    engine = plan.source.engine()
    engine.attach({}, SparsityConfig())
    if name == "dense":
        return Ours(engine, name)
    return Sparse(engine, plan)


class Sparse(Ours):
    """Our engine with predictors; random ones are calibrated anew for every load."""

    def __init__(self, engine, plan: Plan) -> None:
        super().__init__(engine, "sparse")
        self._plan = plan

    def prepare(self, load: Load) -> None:
        """Attach what keeps the densities asked for."""
        plan, source = self._plan, self._plan.source
        if source.predictors is not None:
            sparsity = SparsityConfig(plan.mlp_density, plan.head_density)
            self.engine.attach(self.engine.predictor_selectors(source.predictors, sparsity), sparsity)
            return
        asked = {"mlp": plan.mlp_density, "heads": plan.head_density}
        densities = {unit: union_density(density, load.batch) for unit, density in asked.items()}
        ranks = {unit: plan.ranks[unit] for unit, density in densities.items() if density < 1}
        if not ranks:
            raise ValueError("mlp and head density 1 is dense: ask for less, or leave the system sparse out")
        predictors = random_predictors(source.shape, ranks, source.dtype, source.device)

        def run() -> None:
            _warm_up(self, load)
            for tokens in load.tokens:
                self.step(tokens)

        attach_calibrated(self.engine, predictors, densities, run)

    def head_turnover(self, load: Load) -> float | None:
        """Share of the kept heads that were left out for the token before, over the timed steps; None: none are chosen,
        or there is but one step.

        What they have missed of keys and values is computed first, so this share costs time beyond the density's.
        """
        selectors = [block.attention.selector for block in self.engine.blocks if block.attention.selector is not None]
        if not selectors or len(load.tokens) < 2:
            return None
        _warm_up(self, load)
        kept = []
        for tokens in load.tokens:
            self.step(tokens)
            kept.append(torch.cat([selector.selection.mask for selector in selectors]))
        now, before = torch.stack(kept[1:]), torch.stack(kept[:-1])
        return (now & ~before).sum().item() / max(1, now.sum().item())


@torch.no_grad()
def _measure(plan: Plan, system: System, load: Load) -> dict[str, Any]:
    """Figures of one system under one load."""
    source = plan.source
    needed = cache_bytes(source.shape, source.dtype.itemsize, source.tp, load.batch, load.capacity)
    check_memory(needed, source.device, f"the cache of {load.batch} x {load.capacity} tokens")
    if isinstance(system, Sparse):
        system.prepare(load)
    if system.rehearses:
        _warm_up(system, load)
        for tokens in load.tokens:
            system.step(tokens)
    _warm_up(system, load)
    times, host = time_steps(system.step, load.tokens, source.device)
    figures = spread(times)
    figures["variant"] = system.variant
    figures["steps"] = len(times)
    figures["tokens_per_s"] = load.batch * 1e3 / figures["ms_median"]
    figures["host_us_per_step"] = spread(host)["ms_median"] * 1e3
    figures |= _traffic(plan, system, load, figures["ms_median"])
    figures |= _end_to_end(plan, system, load, figures["ms_median"])
    if isinstance(system, Sparse):
        figures["head_turnover"] = system.head_turnover(load)
    figures["peak_bytes"] = peak_bytes(source.device)
    return figures


def _warm_up(system: System, load: Load) -> None:
    """Up to the first timed step; our engine's statistics begin there."""
    system.start(load.prompt, load.capacity)
    for tokens in load.warmup:
        system.step(tokens)
    if isinstance(system, Ours):
        system.engine.stats.reset()


def _traffic(plan: Plan, system: System, load: Load, ms: float) -> dict[str, Any]:
    """Densities as realised in the timed steps, and the bytes that a step with them must read, over its time."""
    source = plan.source
    kept, ranks, active = {"mlp_density": 1.0, "head_density": 1.0}, {}, 1.0
    extra = {}
    # Trained predictors differ in rank from layer to layer, packed ones are of two kinds of weights.
    predictors_by_formula = source.predictors is None and not (source.quantize and source.quantize.predictors)
    if isinstance(system, Ours) and source.checkpoint is None and load.batch <= _SKIPPING_BATCH:
        # Dense or sparse, a row of fc2 is skipped when all sequences leave its neuron at zero.
        active = union_density(source.active_share, load.batch)
    if isinstance(system, Sparse):
        report = system.engine.stats.report()
        kept = {"mlp_density": report.mlp_density, "head_density": report.head_density}
        extra = {"asked_mlp_density": plan.mlp_density, "asked_head_density": plan.head_density}
        extra["weight_bytes_read"] = report.weight_bytes_read
        if source.predictors is None:
            asked = {"mlp": plan.mlp_density, "heads": plan.head_density}
            ranks = {unit: plan.ranks[unit] for unit in asked if union_density(asked[unit], load.batch) < 1}
            extra |= {f"{unit}_rank": rank for unit, rank in ranks.items()}
    nbytes = step_bytes(
        source.shape,
        source.dtype.itemsize,
        tp=source.tp,
        batch=load.batch,
        context=load.context,
        ranks=ranks if predictors_by_formula else {},
        active_share=active,
        quantize=source.quantize.type if isinstance(system, Ours) and source.quantize else None,
        **kept,
    )
    if isinstance(system, Sparse) and not predictors_by_formula:
        nbytes += sum(s.nbytes for b in system.engine.blocks for s in (b.attention.selector, b.mlp.selector) if s)
    rate = nbytes / ms / 1e6
    return {**kept, **extra, "step_bytes": nbytes, "gb_per_s": rate, "share_of_limit": rate / plan.limit}


def _end_to_end(plan: Plan, system: System, load: Load, ms: float) -> dict[str, Any]:
    """Time of a token in the system's own `generate`, from the difference of two lengths: the prefill cancels out.

    What it takes beyond a step is the loop's work on the host, as far as it is not hidden behind the device's.
    """
    source = plan.source
    new = min(plan.generate_tokens, source.shape.positions - load.prompt.shape[1])
    few = 1 + new // 8
    if new < 2 or new <= few or system.generate(load.prompt, few) is None:
        return {}
    short, whole = (
        min(time_calls(lambda n=n: system.generate(load.prompt, n), 2, source.device, warmup=0)) for n in (few, new)
    )
    synchronize(source.device)
    a_token = (whole - short) / (new - few)
    return {
        "generate_ms_per_token": a_token,
        "generate_tokens_per_s": load.batch * 1e3 / a_token if a_token > 0 else None,
        "generate_overhead_us": (a_token - ms) * 1e3,
    }


def _describe(plan: Plan, name: str, load: Load) -> dict[str, Any]:
    source = plan.source
    kernels = name == "deepspeed-kernels"
    sparse = name == "sparse"
    row = make_row(
        benchmark=plan.benchmark,
        shape=source.shape.name,
        system="deepspeed" if kernels else name,
        tp=source.tp,
        batch=load.batch,
        context=load.context,
        dtype=str(source.dtype).removeprefix("torch."),
        quantize=source.quantize.type if source.quantize and name in ("dense", "sparse") else None,
        mlp_density=plan.mlp_density if sparse else 1.0,
        head_density=plan.head_density if sparse else 1.0,
        variant="kernel injection" if kernels else None,
        weights="random" if source.checkpoint is None else "checkpoint",
        limit_gb_per_s=plan.limit,
    )
    if sparse and source.quantize is not None:
        row["quantize_predictors"] = source.quantize.predictors
    if source.checkpoint is None:
        row["active_share"] = source.active_share
    return row


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
