"""`init_inference` and the engine it returns."""

import json
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from deepspeed import InferenceEngine
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.inference.config import DeepSpeedInferenceConfig
from deepspeed.module_inject.layers import LmHeadLinearAllreduce
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from dejavu_ds import decode, generation
from dejavu_ds.block import PerToken, SparseBlock
from dejavu_ds.cache import DejaVuCache
from dejavu_ds.checkpoint import load_model
from dejavu_ds.collectives import TensorParallel, no_compilation
from dejavu_ds.config import SparsityConfig
from dejavu_ds.fingerprint import fingerprint
from dejavu_ds.head import RowParallelHead
from dejavu_ds.injection_policies import Policy, policy_for
from dejavu_ds.kernels.ops import ops_for
from dejavu_ds.predictor import PredictorSet
from dejavu_ds.selection import PredictorSelector, Selector
from dejavu_ds.stats import StepStats
from dejavu_ds.taps import UNITS, Tap, tap_of

_OURS = {
    "injection_policy": "dejavu_ds chooses it by the model's family",
    "injection_dict": "dejavu_ds chooses it by the model's family",
    "replace_with_kernel_inject": "dejavu_ds brings its own blocks and kernels",
    "kernel_inject": "dejavu_ds brings its own blocks and kernels",
    "enable_cuda_graph": "DeepSpeed's graph does not cover generate",
}
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def init_inference(
    model: str | os.PathLike | PreTrainedModel,
    config: str | dict[str, Any] | None = None,
    *,
    predictors: str | os.PathLike | PredictorSet | None = None,
    sparsity: SparsityConfig | None = None,
    **kwargs: Any,
) -> "DejaVuEngine":
    """In place of `deepspeed.init_inference`: an engine whose decode step reads only the weights that matter.

    Args:
        model: hub name or folder of an OPT, or a loaded `OPTForCausalLM`. A loaded model is taken over, as DeepSpeed
            does: its layers are replaced in place and it is moved and converted; keep a copy if you need the original.
        config: DeepSpeed inference configuration, a dict (not changed) or the path of a JSON file.
        predictors: folder, hub id or loaded `PredictorSet`; None runs every head and neuron.
        sparsity: densities and mode; None takes the predictor set's defaults.
        **kwargs: DeepSpeed's own keywords under their own names, such as `dtype` and `tensor_parallel`. Without
            `dtype` the model keeps the one it has (DeepSpeed would convert to fp16).

    Returns:
        A `deepspeed.InferenceEngine` with `forward` and `generate`.

    Raises:
        ValueError, TypeError: before anything is replaced, on every rank alike, with the value that is wrong.
    """
    ds_config = _merge(config, kwargs)
    if sparsity is not None and not isinstance(sparsity, SparsityConfig):
        raise TypeError(f"sparsity must be a SparsityConfig, got {type(sparsity).__name__}")
    if predictors is None and sparsity is not None:
        raise ValueError("sparsity is given without predictors; pass predictors=, or leave sparsity out for dense")
    dtype = ds_config.pop("dtype", None)
    if not isinstance(model, nn.Module):
        model = load_model(model, DeepSpeedInferenceConfig(dtype=dtype).dtype if dtype is not None else None)
    # pydantic refuses unknown keywords by name.
    ds_config = DeepSpeedInferenceConfig(dtype=dtype if dtype is not None else model.dtype, **ds_config)
    if ds_config.dtype not in _DTYPES:
        raise ValueError(f"dtype must be one of float32, float16, bfloat16, got {ds_config.dtype}")
    policy = policy_for(model.config)
    _check_tensor_parallel(ds_config, model.config)
    if predictors is not None:
        if not isinstance(predictors, PredictorSet):
            predictors = PredictorSet.from_pretrained(predictors)
        sparsity = sparsity or SparsityConfig()
        predictors.check(fingerprint(model), model.config.num_hidden_layers, sparsity.lookahead)
    return DejaVuEngine(model, ds_config, policy, predictors, sparsity)


class DejaVuEngine(InferenceEngine):
    """A `deepspeed.InferenceEngine` with contextual sparsity; made by `init_inference`.

    `engine.module` is the Hugging Face model with our blocks; called by itself, with Hugging Face's caches, it is
    dense.

    Attributes:
        policy: of the model's family.
        tp: this rank's view of the tensor-parallel group.
        stats: densities realised and bytes of weights read, since the last `stats.reset()`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: DeepSpeedInferenceConfig,
        policy: Policy,
        predictors: PredictorSet | None,
        sparsity: SparsityConfig | None,
    ) -> None:
        model.eval().requires_grad_(False)
        # Our blocks take Hugging Face's mask as scaled_dot_product_attention does, whatever the model was loaded with.
        model.set_attn_implementation("sdpa")
        tied = model.config.tie_word_embeddings
        layers = policy.layers(model)
        for i, layer in enumerate(layers):
            layers[i] = SparseBlock(layer, i, policy, policy.head_dim(model.config))
        config.injection_policy = {SparseBlock: policy.row_parallel}
        dtype = config.dtype
        if dtype not in get_accelerator().supported_dtypes():
            # DeepSpeed refuses fp16 on CPUs without instructions for it; torch computes it all the same, slowly.
            config.dtype = torch.float32
        with no_compilation():
            super().__init__(model, config)
        config.dtype = dtype
        self.module.to(dtype)
        self.policy = policy
        self.predictors = predictors
        self.sparsity = sparsity
        self.tp = TensorParallel.of(self.mp_group if config.tensor_parallel.tp_size > 1 else None)
        self._ops = ops_for(self.device)
        for block in self.blocks:
            block.pack(self._ops, self.tp)
        head = self.module.lm_head
        if isinstance(head, LmHeadLinearAllreduce):
            embedding = self.module.get_input_embeddings().weight if tied else None
            self.module.lm_head = RowParallelHead(head.weight, head.bias, embedding, self.tp)
        self.stats = StepStats(self)
        if predictors is not None:
            self.attach(self.predictor_selectors(predictors, sparsity), sparsity)

    @property
    def blocks(self) -> nn.ModuleList:
        """The sparse blocks, in order."""
        return self.policy.layers(self.module)

    @property
    def device(self) -> torch.device:
        return self.module.get_input_embeddings().weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.module.get_input_embeddings().weight.dtype

    @property
    def max_positions(self) -> int:
        """Tokens a sequence can have, prompt and continuation together."""
        return self.module.config.max_position_embeddings

    def new_cache(self, batch_size: int, capacity: int) -> DejaVuCache:
        """An empty cache for `batch_size` sequences of up to `capacity` tokens; `forward` enlarges it at need."""
        shapes = [block.cache_shape() for block in self.blocks]
        return DejaVuCache(batch_size, capacity, shapes, self.module.config.hidden_size, self.dtype, self.device)

    @torch.no_grad()
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: DejaVuCache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        output_hidden_states: bool = False,
        return_dict: bool | None = None,
        cache: DejaVuCache | None = None,
        per_token: PerToken | None = None,
    ) -> CausalLMOutputWithPast:
        """Logits of the next token at every position, as Hugging Face's `OPTForCausalLM.forward`.

        One new token a sequence with a filled cache is a sparse decode step; anything else is a dense prefill.

        Args:
            input_ids: [B, S] int64, or `inputs_embeds` [B, S, D] in its place.
            attention_mask: [B, cached + S] (or [B, S] for the new tokens), 0 for padding; None: no padding.
            position_ids: [B, S], default: unmasked tokens counted from 0.
            past_key_values, cache: what an earlier call returned (both names, as in the versions of transformers).
            use_cache: False returns no cache.
            logits_to_keep: only the last so many positions; 0: all.
            output_hidden_states: adds the input of every block and the output of the last.
            per_token: evaluation; every token of a prefill uses its own heads and neurons, counted here.

        Returns:
            logits [B, S, V], the cache, hidden states.
        """
        past = past_key_values if past_key_values is not None else cache
        inputs = self._check_inputs(input_ids, inputs_embeds)
        B, S = inputs.shape[:2]
        past = self._usable_cache(past, B, S)
        mask, position_ids = self._mask_and_positions(past, attention_mask, position_ids, B, S)
        hidden_states = [] if output_hidden_states else None
        if S == 1 and past.length and not output_hidden_states and inputs_embeds is None and bool(mask.all()):
            past.position_ids.copy_(position_ids[:, -1])
            logits = self.decode_one_token(inputs[:, 0], past)[:, None]
        else:
            hidden = decode.prefill(
                self.module, self.policy, past, inputs, mask, position_ids, per_token, hidden_states
            )
            if hidden_states is not None:
                hidden_states.append(hidden)
            logits = self.policy.head(self.module, hidden[:, -logits_to_keep:] if logits_to_keep else hidden)
        output = CausalLMOutputWithPast(logits=logits, hidden_states=tuple(hidden_states) if hidden_states else None)
        if use_cache is not False:
            output[generation.cache_field(CausalLMOutputWithPast)] = past
        return output if return_dict is not False else output.to_tuple()

    @torch.no_grad()
    def decode_one_token(self, tokens: torch.Tensor, cache: DejaVuCache) -> torch.Tensor:
        """One decode step: [B] new tokens -> [B, V] logits of the next ones; `cache` must have room."""
        self.stats.count_step()
        return decode.decode_one_token(self.module, self.policy, cache, tokens)

    def _generate(self, *inputs: torch.Tensor, **kwargs: Any):
        """`generate` as in transformers, greedy or sampled; see `dejavu_ds.generation`."""
        if kwargs.get("custom_generate") is not None:
            raise ValueError("custom_generate is taken by the engine's own loop and cannot be given")
        if kwargs.get("use_cache") is False:
            raise ValueError("use_cache=False: a decode step needs the cache, leave use_cache at True")
        past = kwargs.pop("past_key_values", None)
        past = past if past is not None else kwargs.pop("cache", None)
        if past is not None and not isinstance(past, DejaVuCache):
            raise TypeError(_foreign_cache(past))
        ids = kwargs.get("input_ids", kwargs.get("inputs", inputs[0] if inputs else None))
        if ids is not None:
            self._check_inputs(ids, None)
        kwargs["stopping_criteria"] = generation.prepare(self.module.generation_config, kwargs)
        loop = partial(
            generation.sample,
            engine=self,
            kept_cache=past,
            given_positions=kwargs.pop("position_ids", None),
            to_streamer=kwargs.get("streamer"),
        )
        return self.module.generate(*inputs, custom_generate=loop, **kwargs)

    def attach(self, selectors: Mapping[tuple[str, int], tuple[Selector, Tap]], sparsity: SparsityConfig) -> None:
        """Put these selectors in the place of all that are attached; a unit without one is dense.

        Caches made before are of no use after: the layers may need other ones.

        Args:
            selectors: {(unit, layer): (selector, where it takes its input)}; the tap of a selector whose `of_outputs`
                is set is not used.
            sparsity: of which the mode and the recovery window are used.
        """
        self.sparsity = sparsity
        for i, block in enumerate(self.blocks):
            heads, mlp = (selectors.get((unit, i), (None, None))[0] for unit in ("heads", "mlp"))
            block.at_attention, block.at_mlp = [], []
            block.attach(heads, mlp, masked=sparsity.mode == "masked", window=sparsity.recovery_window)
        for selector, tap in selectors.values():
            if selector.of_outputs:
                continue
            block = self.blocks[tap.layer]
            (block.at_attention if tap.point == "attention" else block.at_mlp).append(selector)
        self.stats.reset()

    def local_units(self, unit: str, layer: int) -> tuple[int, int]:
        """(start, stop) of this rank's among a layer's units; collective, so to be asked on every rank alike."""
        block = self.blocks[layer]
        local = block.attention.heads if unit == "heads" else block.mlp.neurons
        start = self.tp.offset(local, self.device)
        return start, start + local

    def predictor_selectors(
        self, predictors: PredictorSet, sparsity: SparsityConfig
    ) -> dict[tuple[str, int], tuple[Selector, Tap]]:
        """What `attach` takes, made of predictors at the densities asked for."""
        stream = torch.cuda.Stream() if self.device.type == "cuda" else None
        selectors = {}
        for unit in UNITS:
            densities = predictors.densities(unit, sparsity.density(unit, predictors.default_density(unit)))
            for i, (predictor, density) in enumerate(zip(predictors.of(unit), densities, strict=True)):
                start, stop = self.local_units(unit, i)
                if predictor is None or density >= 1 or start == stop:
                    continue  # dense; a rank without neurons (DeepSpeed shards by 64) has nothing to choose
                shard = predictor.shard(start, stop).to(self.device, self.dtype)
                selector = PredictorSelector(shard, predictor.threshold(density), self._ops, stream)
                selectors[unit, i] = selector, tap_of(unit, i, predictors.lookahead)
        return selectors

    def _check_inputs(self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> torch.Tensor:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        if inputs_embeds is not None:
            return inputs_embeds
        if input_ids.dim() != 2 or input_ids.numel() == 0:
            raise ValueError(f"input_ids must be [batch, tokens] with at least one token, got {list(input_ids.shape)}")
        low, high = int(input_ids.min()), int(input_ids.max())
        if low < 0 or high >= self.module.config.vocab_size:
            wrong = low if low < 0 else high
            raise ValueError(f"token id {wrong} is outside the vocabulary of {self.module.config.vocab_size}")
        return input_ids

    def _usable_cache(self, past: Any, batch_size: int, new_tokens: int) -> DejaVuCache:
        if past is None:
            return self.new_cache(batch_size, new_tokens)
        if not isinstance(past, DejaVuCache):
            raise TypeError(_foreign_cache(past))
        if past.batch_size != batch_size:
            raise ValueError(f"the cache holds {past.batch_size} sequences, the input {batch_size}")
        if past.length + new_tokens > past.capacity:
            past.reserve(max(past.length + new_tokens, min(2 * past.capacity, self.max_positions)))
        return past

    def _mask_and_positions(self, past, attention_mask, position_ids, B: int, S: int):
        """Mask of the new tokens and their positions, both [B, S]; checked against the model's positions."""
        if attention_mask is None:
            attention_mask = torch.ones(B, S, dtype=torch.bool, device=self.device)
        if attention_mask.shape not in ((B, S), (B, past.length + S)):
            raise ValueError(
                f"attention_mask must be [{B}, {S}] or, with the cached tokens, [{B}, {past.length + S}]; "
                f"got {list(attention_mask.shape)}"
            )
        mask = attention_mask[:, -S:].bool()
        if position_ids is None:
            counted = mask.long().cumsum(1) - 1
            position_ids = torch.where(mask, counted + (past.position_ids[:, None] if past.length else 0), -1)
        if int(position_ids.max()) >= self.max_positions:
            raise ValueError(
                f"position {int(position_ids.max())} is beyond the model's {self.max_positions} positions; "
                "shorten the input"
            )
        return mask, position_ids


def _merge(config: str | dict[str, Any] | None, kwargs: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed's rule: config and keywords together, a key in both must agree. The caller's dict stays as it is."""
    if isinstance(config, str | Path):
        config = json.loads(Path(config).read_text())
    if config is not None and not isinstance(config, dict):
        raise TypeError(f"config must be a dict or the path of a JSON file, got {type(config).__name__}")
    merged = dict(config or {})
    for key, value in kwargs.items():
        if key in merged and merged[key] != value:
            raise ValueError(f"{key} is {merged[key]!r} in config and {value!r} as a keyword; give it once")
        merged[key] = value
    for key, reason in _OURS.items():
        if merged.get(key):
            raise ValueError(f"{key} cannot be given: {reason}")
        merged.pop(key, None)
    unknown = set(merged) - _ds_keywords()
    if unknown:
        raise ValueError(f"unknown keyword(s) {sorted(unknown)}; neither dejavu_ds nor deepspeed knows them")
    return merged


def _ds_keywords() -> set[str]:
    fields = DeepSpeedInferenceConfig.model_fields
    return set(fields) | {field.alias for field in fields.values() if field.alias}


def _check_tensor_parallel(ds_config: DeepSpeedInferenceConfig, model_config) -> None:
    tp_size = ds_config.tensor_parallel.tp_size
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if tp_size != world:
        raise ValueError(
            f"tensor_parallel tp_size is {tp_size}, but the job has {world} process(es); start it with "
            f"`deepspeed --num_gpus {tp_size}` or set tp_size to {world}"
        )
    heads = model_config.num_attention_heads
    if heads % tp_size:
        fits = [n for n in (1, 2, 4, 8, 16) if heads % n == 0]
        raise ValueError(f"{heads} attention heads cannot be split over tp_size {tp_size}; use one of {fits}")


def _foreign_cache(cache: Any) -> str:
    return (
        f"a {type(cache).__name__} cannot hold what the sparse step keeps; pass the cache an earlier call of this "
        "engine returned, or one from engine.new_cache"
    )
