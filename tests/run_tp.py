"""Run under the launcher by test_tp.py: the same work at any tensor-parallel size, results to a file.

deepspeed --num_gpus N tests/run_tp.py OUT.pt
"""

import os
import sys

import torch

import dejavu_ds
from dejavu_ds import SparsityConfig
from dejavu_ds.checkpoint import bundled_model
from dejavu_ds.launch.common import leave_job


def dense(tp_size: int) -> dict:
    """Tokens and logits of the bundled model without predictors."""
    from models import PROMPTS
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(bundled_model(), padding_side="left")
    engine = dejavu_ds.init_inference(bundled_model(), dtype=torch.float32, tensor_parallel={"tp_size": tp_size})
    results = {"tokens": [], "logits": []}
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt").to(engine.device)
        results["logits"].append(engine(**inputs).logits.cpu())
        results["tokens"].append(engine.generate(**inputs, max_new_tokens=10, do_sample=False).cpu())
    batch = tokenizer(PROMPTS[:4], return_tensors="pt", padding=True).to(engine.device)
    results["batch"] = engine.generate(**batch, max_new_tokens=24, do_sample=False).cpu()
    torch.manual_seed(100 + engine.tp.rank)  # ranks that would draw differently must still agree
    sampled = engine.generate(**batch, max_new_tokens=12, do_sample=True)
    first = engine.tp.broadcast(sampled.clone())
    results["ranks_agree"] = torch.equal(first, sampled)
    results["module"] = engine.module.generate(**batch, max_new_tokens=8, do_sample=False).cpu()
    return results


def sparse(tp_size: int) -> dict:
    """Tokens of the bundled model with its predictors, heads sparse as well; densities and bytes."""
    from models import PROMPTS
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(bundled_model(), padding_side="left")
    engine = dejavu_ds.init_inference(
        bundled_model(),
        predictors=bundled_model() / "predictors",
        sparsity=SparsityConfig(mlp_density=0.2, head_density=0.7, recovery_window=16),
        dtype=torch.float32,
        tensor_parallel={"tp_size": tp_size},
    )
    tokens = []
    for prompt in PROMPTS[:10]:
        inputs = tokenizer(prompt, return_tensors="pt").to(engine.device)
        tokens.append(engine.generate(**inputs, max_new_tokens=64, do_sample=False, eos_token_id=None).cpu())
    batch = tokenizer(PROMPTS[:4], return_tensors="pt", padding=True).to(engine.device)
    report = engine.stats.report().as_dict()
    return {"tokens": tokens, "report": report, "batch": engine.generate(**batch, max_new_tokens=24).cpu()}


def uneven(tp_size: int) -> dict:
    """A random model whose neurons do not divide by the ranks, dense against Hugging Face and sparse."""
    from models import tiny_opt
    from test_lookahead import random_predictors

    sizes = {"hidden_size": 64, "ffn_dim": 77, "num_attention_heads": 4}
    reference = tiny_opt(**sizes)
    ids = torch.randint(3, 131, (2, 9), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        want = reference(ids).logits
    tokens = reference.generate(ids, max_new_tokens=12, do_sample=False)
    shared = {"dtype": torch.float32, "tensor_parallel": {"tp_size": tp_size}}
    engine = dejavu_ds.init_inference(tiny_opt(**sizes), **shared)
    neurons = torch.zeros(tp_size, dtype=torch.int64, device=engine.device)
    neurons[engine.tp.rank] = engine.blocks[0].mlp.neurons
    predictors = random_predictors(reference, "half", sizes=(64, 77, 4))
    sparse = dejavu_ds.init_inference(
        tiny_opt(**sizes), predictors=predictors, sparsity=SparsityConfig(0.3, 0.3, recovery_window=5), **shared
    )
    finer = dejavu_ds.init_inference(
        tiny_opt(**sizes), dtype=torch.float32, tensor_parallel={"tp_size": tp_size, "tp_grain_size": 1}
    )
    finer_neurons = torch.zeros_like(neurons)
    finer_neurons[finer.tp.rank] = finer.blocks[0].mlp.neurons
    return {
        "neurons": engine.tp.all_reduce(neurons).tolist(),
        "finer neurons": finer.tp.all_reduce(finer_neurons).tolist(),
        "finer error": (finer(ids.to(finer.device)).logits.cpu() - want).abs().max().item(),
        "error": (engine(ids.to(engine.device)).logits.cpu() - want).abs().max().item(),
        "same_tokens": torch.equal(
            engine.generate(ids.to(engine.device), max_new_tokens=12, do_sample=False).cpu(), tokens
        ),
        "sparse": sparse.generate(ids.to(engine.device), max_new_tokens=40, do_sample=False, eos_token_id=None).cpu(),
        "report": sparse.stats.report().as_dict(),
    }


def packed(tp_size: int) -> dict:
    """The bundled model in 4 bits, dense, and sparse with packed predictors; bytes of its codes; uneven shards."""
    from models import PROMPTS, tiny_opt
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(bundled_model())
    shared = {"quantize": "nf4", "dtype": torch.float32, "tensor_parallel": {"tp_size": tp_size}}
    dense = dejavu_ds.init_inference(bundled_model(), **shared)
    sparse = dejavu_ds.init_inference(
        bundled_model(),
        predictors=bundled_model() / "predictors",
        sparsity=SparsityConfig(mlp_density=0.2, head_density=0.7, recovery_window=16),
        **(shared | {"quantize": {"type": "nf4", "predictors": True}}),
    )
    results = {"logits": [], "tokens": [], "sparse": []}
    for prompt in PROMPTS[:4]:
        inputs = tokenizer(prompt, return_tensors="pt").to(dense.device)
        results["logits"].append(dense(**inputs).logits.cpu())
        results["tokens"].append(dense.generate(**inputs, max_new_tokens=24, do_sample=False).cpu())
        tokens = sparse.generate(**inputs, max_new_tokens=40, do_sample=False, eos_token_id=None)
        results["sparse"].append(tokens.cpu())
    results["report"] = sparse.stats.report().as_dict()
    codes = sum(b.nbytes for block in dense.blocks for b in block.buffers() if b.dtype == torch.uint8)
    results["code_bytes"] = int(dense.tp.all_reduce(torch.tensor(codes, device=dense.device)))
    uneven = dejavu_ds.init_inference(tiny_opt(hidden_size=64, ffn_dim=77, num_attention_heads=4), **shared)
    ids = torch.randint(3, 131, (2, 9), generator=torch.Generator().manual_seed(4)).to(dense.device)
    results["uneven"] = uneven(ids).logits.cpu()
    return results


def main() -> None:
    """All of it; rank 0 saves."""
    torch.set_num_threads(1)
    tp_size = int(os.environ.get("WORLD_SIZE", "1"))
    results = {"dense": dense(tp_size), "sparse": sparse(tp_size), "uneven": uneven(tp_size), "packed": packed(tp_size)}
    if int(os.environ.get("RANK", "0")) == 0:
        torch.save(results, sys.argv[-1])
    leave_job()


if __name__ == "__main__":
    main()
