"""Run under the launcher by test_cases.py on two ranks; results of all ranks to a file.

CUDA_VISIBLE_DEVICES=0,2 deepspeed tests/run_cases.py FOLDER, in which are checkpoints and out.pt will be
"""

import os
import sys
from pathlib import Path

import torch
from transformers import BitsAndBytesConfig

import dejavu_ds
from dejavu_ds import SparsityConfig
from dejavu_ds.checkpoint import bundled_model
from dejavu_ds.launch.common import leave_job

TP = {"tensor_parallel": {"tp_size": 2}}


GREEDY = {"max_new_tokens": 64, "do_sample": False, "eos_token_id": None}


def sparse_engine(head_density: float = 0.7, **kwargs):
    """The bundled model, neurons and heads sparse."""
    sparsity = SparsityConfig(mlp_density=0.2, head_density=head_density, recovery_window=16)
    predictors = bundled_model() / "predictors"
    return dejavu_ds.init_inference(bundled_model(), predictors=predictors, sparsity=sparsity, **kwargs)


def prompt() -> torch.Tensor:
    """[2, 9] ids that every vocabulary here has."""
    return torch.randint(3, 131, (2, 9), generator=torch.Generator().manual_seed(4))


def refusal(make) -> str:
    """What a call says when it refuses; "" if it does not."""
    try:
        make()
    except (ValueError, TypeError) as error:
        return str(error)
    return ""


def quantised_already():
    """A model whose configuration says that bitsandbytes has packed it, scales nested."""
    from models import tiny_opt

    model = tiny_opt(hidden_size=64, num_attention_heads=4)
    model.config.quantization_config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True)
    return dejavu_ds.init_inference(model, **TP)


def agreement(engine, **options) -> bool:
    """Whether the ranks, which draw and keep time otherwise, get the same tokens."""
    torch.manual_seed(100 + engine.tp.rank)
    tokens = engine.generate(prompt().to(engine.device), max_new_tokens=40, eos_token_id=None, **options)
    lengths = torch.zeros(2, device=engine.device)
    lengths[engine.tp.rank] = tokens.shape[1]
    low, high = engine.tp.all_reduce(lengths).tolist()
    return low == high and torch.equal(engine.tp.broadcast(tokens.clone()), tokens)


def broken_layer(engine) -> list[list[str]]:
    """What each rank says of NaN that begins in rank 1's part of layer 2, for the token at position 12: by the loop on
    the device and by that on the host."""
    from test_finite import break_layer

    said = []
    for options in ({}, {"repetition_penalty": 1.2}):
        mlp = engine.blocks[2].mlp
        if engine.tp.rank == 1:
            break_layer(engine, 2, float("nan"), 12)
        said.append(
            refusal(lambda options=options: engine.generate(prompt().to(engine.device), **{**GREEDY, **options}))
        )
        for name in ("prefill", "decode"):
            vars(mlp).pop(name, None)
    ranks: list = [None, None]
    torch.distributed.all_gather_object(ranks, said)
    return ranks


def main() -> None:
    """All of it; rank 0 saves."""
    torch.set_num_threads(1)
    folder = Path(sys.argv[-1])
    results = {"logits": {}, "refusals": {}}
    for path in sorted(p for p in folder.iterdir() if p.is_dir()):
        engine = dejavu_ds.init_inference(path, dtype=torch.float32, **TP)
        results["logits"][path.name] = engine(prompt().to(engine.device)).logits.cpu()
    if not torch.cuda.is_available():
        results["refusals"]["graph"] = refusal(lambda: sparse_engine(enable_cuda_graph=True, **TP))
    results["refusals"]["quantised"] = refusal(quantised_already)
    engine = sparse_engine(dtype=torch.float32, **TP)
    results["tokens"] = engine.generate(prompt().to(engine.device), **GREEDY).cpu()
    few = sparse_engine(head_density=0.1, dtype=torch.float32, **TP)
    results["tokens of few heads"] = few.generate(prompt().to(engine.device), **GREEDY).cpu()
    results["agree"] = {
        name: agreement(engine, do_sample=True, **options)
        for name, options in {
            "on the device": {"top_k": 50},
            "on the host": {"repetition_penalty": 1.2},
            "by the clock": {"max_time": 0.05 * (1 + engine.tp.rank)},
            "several": {"num_return_sequences": 3},
        }.items()
    }
    results["broken"] = broken_layer(dejavu_ds.init_inference(bundled_model(), dtype=torch.float32, **TP))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    mine = (engine.tp.rank, int(os.environ["LOCAL_RANK"]), visible, str(engine.device))
    ranks = [None, None]
    torch.distributed.all_gather_object(ranks, mine)
    results["ranks"] = ranks
    if engine.tp.rank == 0:
        torch.save(results, folder / "out.pt")
    leave_job()


if __name__ == "__main__":
    main()
