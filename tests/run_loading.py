"""Run under the launcher by test_loading_tp.py: checkpoints of every form over the ranks, and what loading takes.

deepspeed --num_gpus N tests/run_loading.py FOLDER

FOLDER/small/*, FOLDER/uneven and FOLDER/broken are checkpoints, or else FOLDER/large is one.
"""

import gc
import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import dejavu_ds
from dejavu_ds import SparsityConfig
from dejavu_ds.checkpoint import open_checkpoint, return_freed_memory
from dejavu_ds.finite import NonFiniteError
from dejavu_ds.launch.common import leave_job, rank, world_size
from dejavu_ds.sharded import DenseModel

SIZES = {"hidden_size": 64, "ffn_dim": 77, "num_attention_heads": 4}
POST_NORM = {"do_layer_norm_before": False, "word_embed_proj_dim": 24}
HUB_NAME = "someone/tiny-opt"
SHARED = {"dtype": torch.float32, "tensor_parallel": {"tp_size": world_size()}}


def ids() -> torch.Tensor:
    return torch.randint(3, 131, (2, 9), generator=torch.Generator().manual_seed(4))


def small(folder: Path) -> dict:
    """Logits and greedy tokens of every small checkpoint, and of one by its name on the hub."""
    results = {}
    names = {path.name: path for path in sorted(folder.iterdir())} | {HUB_NAME: HUB_NAME}
    for name, path in names.items():
        engine = dejavu_ds.init_inference(path, **SHARED)
        tokens = ids().to(engine.device)
        generated = engine.generate(tokens, max_new_tokens=8, do_sample=False)
        results[name] = {"logits": engine(tokens).logits.cpu(), "tokens": generated.cpu()}
    return results


def sparse(path: Path, tp_size: int) -> torch.Tensor:
    """Greedy tokens of a small post-norm checkpoint with heads and neurons left out."""
    from models import tiny_opt
    from test_lookahead import random_predictors

    predictors = random_predictors(tiny_opt(**SIZES, **POST_NORM), "half", sizes=(64, 77, 4))
    engine = dejavu_ds.init_inference(
        path,
        predictors=predictors,
        sparsity=SparsityConfig(0.4, 0.4, recovery_window=5),
        dtype=torch.float32,
        tensor_parallel={"tp_size": tp_size},
    )
    tokens = engine.generate(ids().to(engine.device), max_new_tokens=40, do_sample=False, eos_token_id=None)
    report = engine.stats.report()
    assert report.mlp_density < 0.9 and report.head_density < 0.9
    return tokens.cpu()


def same_parts(folder: Path) -> dict:
    """Whether each rank reads, bit for bit, what DeepSpeed leaves it of a model that is loaded whole."""
    results = {}
    for quantize in (None, "nf4"):
        whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        engines = [dejavu_ds.init_inference(model, quantize=quantize, **SHARED) for model in (whole, folder)]
        states = [{**dict(e.module.named_parameters()), **dict(e.module.named_buffers())} for e in engines]
        same = states[0].keys() == states[1].keys()
        same = same and all(torch.equal(states[0][name], states[1][name]) for name in states[0])
        differing = torch.tensor([float(not same)], device=engines[0].device)
        results[str(quantize)] = not engines[0].tp.all_reduce(differing).item()
        results["neurons"] = [int(engines[1].tp.all_reduce(part)) for part in _by_rank(engines[1])]
    return results


def _by_rank(engine) -> list[torch.Tensor]:
    here = engine.blocks[0].mlp.neurons
    return [torch.tensor([here * (r == rank())], device=engine.device) for r in range(world_size())]


def refusals(folder: Path) -> list[str]:
    """What each rank says of a checkpoint in which one rank's part is not finite."""
    said: list = [None] * world_size()
    try:
        dejavu_ds.init_inference(folder, **SHARED)
    except NonFiniteError as error:
        torch.distributed.all_gather_object(said, str(error))
    return said


def memory(folder: Path) -> dict:
    """Bytes: before loading, at the peak since, of what the model holds, and after it is gone."""
    results = {}
    ways = {
        "None": lambda: dejavu_ds.init_inference(folder, **SHARED).module,
        "nf4": lambda: dejavu_ds.init_inference(folder, quantize="nf4", **SHARED).module,
        "training": lambda: DenseModel.split(*open_checkpoint(folder, torch.float32)).model,
    }
    for name, load in ways.items():
        before = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        model = load()
        peak = _status("VmHWM")
        tensors = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors(model)}
        held = sum(tensors.values())
        del model, tensors
        gc.collect()
        return_freed_memory()
        results[name] = {"before": before, "peak": peak, "held": held, "after": _status("VmRSS")}
    return results


def _tensors(module):
    yield from module.parameters()
    yield from module.buffers()


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def main() -> None:
    """What the folder is for; every rank saves its memory, rank 0 the rest."""
    torch.set_num_threads(1)
    folder = Path(sys.argv[-1])
    if (folder / "large").exists():
        (folder / f"memory{rank()}.json").write_text(json.dumps(memory(folder / "large")))
        leave_job()
        return
    results = {"small": small(folder / "small"), "parts": same_parts(folder / "uneven")}
    results["sparse"] = sparse(folder / "small" / "350m, bin", world_size())
    results["refusals"] = refusals(folder / "broken")
    if rank() == 0:
        torch.save(results, folder / "results.pt")
    leave_job()


if __name__ == "__main__":
    main()
