"""`init_inference` and the engine it returns."""

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from deepspeed import InferenceEngine
from deepspeed.accelerator import get_accelerator
from deepspeed.inference.config import DeepSpeedInferenceConfig
from deepspeed.module_inject.layers import LmHeadLinearAllreduce
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from dejavu_ds import decode, generation
from dejavu_ds.block import PerToken, SparseBlock
from dejavu_ds.cache import DejaVuCache, LayerShape
from dejavu_ds.checkpoint import Weights, open_checkpoint, return_freed_memory, tie
from dejavu_ds.checks import (
    check_dtype,
    check_model,
    check_predictors,
    check_quantize,
    check_selectors,
    check_tensor_parallel,
    merge_config,
)
from dejavu_ds.collectives import TensorParallel, no_compilation
from dejavu_ds.config import SparsityConfig
from dejavu_ds.fingerprint import fingerprint
from dejavu_ds.finite import check_weights, raised_everywhere
from dejavu_ds.head import RowParallelHead
from dejavu_ds.injection_policies import Policy, policy_for
from dejavu_ds.inputs import check_inputs, mask_and_positions
from dejavu_ds.kernels.ops import ops_for
from dejavu_ds.kernels.packed_ops import packed_ops_for
from dejavu_ds.kernels.predict_select import whole_rank
from dejavu_ds.mlp import frozen
from dejavu_ds.packed_predictor import PackedPredictor
from dejavu_ds.predictor import PredictorSet
from dejavu_ds.quantize import QuantizeConfig, pack
from dejavu_ds.runner import StepRunner
from dejavu_ds.selection import Listeners, PredictorSelector, Selector
from dejavu_ds.stats import StepStats
from dejavu_ds.taps import UNITS, Tap, tap_of


# The blocks' buffers are written in place, which torch forbids for tensors made under inference_mode.
@torch.inference_mode(False)
def init_inference(
    model: str | os.PathLike | PreTrainedModel,
    config: str | dict[str, Any] | None = None,
    *,
    predictors: str | os.PathLike | PredictorSet | None = None,
    sparsity: SparsityConfig | None = None,
    quantize: str | Mapping[str, Any] | QuantizeConfig | None = None,
    **kwargs: Any,
) -> "DejaVuEngine":
    """In place of `deepspeed.init_inference`: an engine whose decode step reads only the weights that matter.

    Args:
        model: hub name or folder of an OPT, of which each rank reads its own part, block by block; or a loaded
            `OPTForCausalLM`. A loaded model is taken over, as DeepSpeed does: its layers are replaced in place and it
            is moved and converted; keep a copy if you need the original.
        config: DeepSpeed inference configuration, a dict (not changed) or the path of a JSON file.
        predictors: folder, hub id or loaded `PredictorSet`; None runs every head and neuron.
        sparsity: densities and mode; None takes the predictor set's defaults.
        quantize: "nf4" or "fp4" packs the blocks' weights in 4 bits, layer by layer, once each is on its device; a
            `QuantizeConfig`, or its fields as a dict, says more. None leaves them as they are. `dtype` is then that of
            the activations and of what is not packed.
        **kwargs: DeepSpeed's own keywords under their own names, such as `dtype` and `tensor_parallel`. Without
            `dtype` the model keeps the one it has (DeepSpeed would convert to fp16). `enable_cuda_graph`, True here
            on a GPU by default, replays each decode step as one CUDA graph, at every tensor-parallel size.
            `max_out_tokens` bounds a sequence, prompt and continuation together. Those that would have no effect here
            are refused.

    Returns:
        A `deepspeed.InferenceEngine` with `forward` and `generate`.

    Raises:
        ValueError, TypeError: before anything is replaced, on every rank alike, with the value that is wrong.
        NonFiniteError: a ValueError, later: weights that are NaN or infinite in this dtype; on every rank, whichever
            has found them.
    """
    ds_config = merge_config(config, kwargs)
    if not isinstance(model, str | os.PathLike | PreTrainedModel):
        raise TypeError(f"model must be a name, a folder or a loaded OPTForCausalLM, got {type(model).__name__}")
    if sparsity is not None and not isinstance(sparsity, SparsityConfig):
        raise TypeError(f"sparsity must be a SparsityConfig, got {type(sparsity).__name__}")
    if predictors is not None and not isinstance(predictors, str | os.PathLike | PredictorSet):
        raise TypeError(f"predictors must be a folder, a hub id or a PredictorSet, got {type(predictors).__name__}")
    if predictors is None and sparsity is not None:
        raise ValueError("sparsity is given without predictors; pass predictors=, or leave sparsity out for dense")
    quantize = QuantizeConfig.of(quantize)
    dtype = ds_config.pop("dtype", None)
    on_gpu = get_accelerator().device_name() == "cuda"
    cuda_graph = ds_config.pop("enable_cuda_graph", on_gpu)
    if cuda_graph and not on_gpu:
        raise ValueError(f"enable_cuda_graph=True needs a GPU, this machine has a {get_accelerator().device_name()}")
    asked_dtype = DeepSpeedInferenceConfig(dtype=dtype).dtype if dtype is not None else None
    if quantize is not None:
        check_quantize(quantize, asked_dtype)
    if asked_dtype is not None:
        check_dtype(asked_dtype)
    weights = None
    if not isinstance(model, PreTrainedModel):
        model, weights = open_checkpoint(model, asked_dtype)
    # pydantic refuses unknown keywords by name.
    ds_config = DeepSpeedInferenceConfig(dtype=dtype if dtype is not None else model.dtype, **ds_config)
    check_dtype(ds_config.dtype)
    policy = policy_for(model.config)
    check_model(model, policy, on_meta=weights is not None)
    if quantize is not None:
        quantize.check_rows(model.config.hidden_size)
    check_tensor_parallel(ds_config, model.config)
    if predictors is not None:
        if not isinstance(predictors, PredictorSet):
            predictors = PredictorSet.from_pretrained(predictors)
        sparsity = sparsity or SparsityConfig()
        of_model = fingerprint(model, None if weights is None else weights.whole)
        check_predictors(predictors, of_model, policy, model, sparsity.lookahead)
    return DejaVuEngine(model, ds_config, policy, predictors, sparsity, cuda_graph, quantize, weights)


class DejaVuEngine(InferenceEngine):
    """A `deepspeed.InferenceEngine` with contextual sparsity; made by `init_inference`.

    `engine.module` is the Hugging Face model with our blocks; called by itself, with Hugging Face's caches, it is
    dense. An engine serves one thread at a time: the sets that a step selects are held in the blocks.

    Attributes:
        policy: of the model's family.
        tp: this rank's view of the tensor-parallel group.
        quantize: how the blocks' weights are packed; None: they are not.
        stats: densities realised and bytes of weights read, since the last `stats.reset()`.
        runner: of the decode steps.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: DeepSpeedInferenceConfig,
        policy: Policy,
        predictors: PredictorSet | None,
        sparsity: SparsityConfig | None,
        cuda_graph: bool,
        quantize: QuantizeConfig | None = None,
        weights: Weights | None = None,
    ) -> None:
        model.eval().requires_grad_(False)
        # Our blocks take Hugging Face's mask as scaled_dot_product_attention does, whatever the model was loaded with.
        model.set_attn_implementation("sdpa")
        if model.generation_config.use_cache is False:
            # Left there by training; it is no wish of who generates, and steps need the cache.
            model.generation_config.use_cache = True
        tied = model.config.tie_word_embeddings
        layers = policy.layers(model)
        for i, layer in enumerate(layers):
            layers[i] = SparseBlock(layer, i, policy, policy.head_dim(model.config), policy.norm_first(model.config))
        config.injection_policy = {SparseBlock: policy.row_parallel}
        dtype = config.dtype
        if dtype not in get_accelerator().supported_dtypes():
            # DeepSpeed refuses fp16 on CPUs without instructions for it; torch computes it all the same, slowly.
            config.dtype = torch.float32
        on_host = config.keep_module_on_host
        # The device need not hold the whole model in 16 bit: its blocks come to it one by one, and are packed there.
        in_turn = weights is not None or quantize is not None
        config.keep_module_on_host |= in_turn and get_accelerator().device_name() != "cpu"
        if weights is not None:
            # DeepSpeed cuts the blocks and the head on the meta device, where that takes nothing. What is whole on
            # every rank is read before: DeepSpeed would give storage to all of a model that begins without.
            config.keep_module_on_host = True
            weights.fill(model, "", torch.device("cpu"), model.dtype, leave_out=(layers, model.lm_head))
            tie(model)
        with no_compilation():
            super().__init__(model, config)
        config.dtype, config.keep_module_on_host = dtype, on_host
        self.module.to(dtype)
        self.policy = policy
        self.quantize = quantize
        self.predictors = predictors
        self.sparsity = sparsity
        tp = TensorParallel.of(self.mp_group if config.tensor_parallel.tp_size > 1 else None)
        moved = in_turn and not (on_host and quantize is None)
        device = torch.device(get_accelerator().current_device_name()) if moved else self.device
        self.tp = tp.with_one_shot(self.module.config.hidden_size, device)
        self._ops = ops_for(device)
        if weights is None:
            check_weights(self.module, self.tp, device)
        with raised_everywhere(self.tp, device):
            self._pack(device, weights)
        head = self.module.lm_head
        if isinstance(head, LmHeadLinearAllreduce):
            embedding = self.module.get_input_embeddings().weight if tied else None
            self.module.lm_head = RowParallelHead(head.weight, head.bias, embedding, self.tp)
        self.stats = StepStats(self)
        self._side_stream = self._recovery_stream = None
        if self.device.type == "cuda":
            self._side_stream = torch.cuda.Stream()
            # Ahead of the projection beside it, which would fill the device first.
            self._recovery_stream = torch.cuda.Stream(priority=-1)
        self.runner = StepRunner(self, cuda_graph)
        if predictors is not None:
            self.attach(self.predictor_selectors(predictors, sparsity), sparsity)

    def _pack(self, device: torch.device, weights: Weights | None) -> None:
        """The blocks' weights, read if they are not yet, into the gather layout, and into 4 bits if asked for: a
        block's unpacked weights are gone before those of the next come to the device."""
        ops, store = self._ops, frozen
        if self.quantize is not None:
            ops, store = packed_ops_for(device), partial(pack, config=self.quantize)
        prefix = next(f"{name}." for name, module in self.module.named_modules() if module is self.blocks)
        for i, block in enumerate(self.blocks):
            if weights is not None:
                weights.fill(block, f"{prefix}{i}.", device, self.dtype)
            block.to(device).pack(ops, self.tp, store)
            return_freed_memory()
        if weights is not None:
            if not self.module.config.tie_word_embeddings:
                weights.fill(self.module.lm_head, "lm_head.", device, self.dtype)
            weights.close()
        self.module.to(device)

    @property
    def generation_config(self) -> GenerationConfig:
        """The defaults of `generate`, the model's own."""
        return self.module.generation_config

    def can_generate(self) -> bool:
        """True; this and what follows is asked by `transformers.pipeline`."""
        return self.module.can_generate()

    def _prepare_generation_config(self, *args: Any, **kwargs: Any) -> tuple[GenerationConfig, dict]:
        return self.module._prepare_generation_config(*args, **kwargs)

    @property
    def input_modalities(self) -> Any:
        return self.module.input_modalities

    @property
    def output_modalities(self) -> Any:
        return self.module.output_modalities

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
        """Tokens a sequence can have, prompt and continuation together: the model's positions, or `max_out_tokens` if
        that was given and is less."""
        positions = self.module.config.max_position_embeddings
        # DeepSpeed's default is a size of its own kernels' buffers, and nobody's wish.
        given = "max_out_tokens" in self._config.model_fields_set
        return min(positions, self._config.max_out_tokens) if given else positions

    def cache_shapes(self) -> list[LayerShape]:
        """What each layer needs of a cache, with the selectors attached now."""
        return [block.cache_shape() for block in self.blocks]

    def new_cache(self, batch_size: int, capacity: int) -> DejaVuCache:
        """An empty cache for `batch_size` sequences of up to `capacity` tokens; `forward` enlarges it at need."""
        shapes = self.cache_shapes()
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
            attention_mask: [B, cached + S], 0 for padding, in the cache too; or [B, S] for the new tokens, which leaves
                the cached ones as they are; None: no padding among the new ones.
            position_ids: [B, S] or [1, S], ignored for padding. Default: unmasked tokens counted from 0 over the whole
                mask, or onwards from the cache if the mask is of the new tokens only.
            past_key_values, cache: what an earlier call returned (both names, as in the versions of transformers).
            use_cache: False returns no cache.
            logits_to_keep: only the last so many positions; 0: all.
            output_hidden_states: adds the input of every block and the output of the last.
            per_token: evaluation; every token of a prefill uses its own heads and neurons, counted here.

        Returns:
            logits [B, S, V], the cache, hidden states.
        """
        if logits_to_keep < 0:
            raise ValueError(f"logits_to_keep must be 0, for all, or a number of last positions, got {logits_to_keep}")
        past = past_key_values if past_key_values is not None else cache
        inputs = check_inputs(self.module.get_input_embeddings(), input_ids, inputs_embeds)
        B, S = inputs.shape[:2]
        past = self.cache_for(past, B, S)
        mask, position_ids = mask_and_positions(past, attention_mask, position_ids, B, S, self.max_positions)
        if attention_mask is not None and attention_mask.shape[1] > S:
            past.key_mask[:, : past.length] = attention_mask[:, :-S].bool()
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
            hidden = hidden[:, -logits_to_keep:] if logits_to_keep else hidden
            logits = decode.head(self.module, self.policy, hidden)
        output = CausalLMOutputWithPast(logits=logits, hidden_states=tuple(hidden_states) if hidden_states else None)
        if use_cache is not False:
            output[generation.cache_field(CausalLMOutputWithPast)] = past
        return output if return_dict is not False else output.to_tuple()

    @torch.no_grad()
    def decode_one_token(self, tokens: torch.Tensor, cache: DejaVuCache) -> torch.Tensor:
        """One decode step: [B] new tokens -> [B, V] logits of the next ones.

        Raises ValueError for a full cache; enlarge it with `cache.reserve`.
        """
        if cache.length >= cache.capacity:
            raise ValueError(f"the cache is full, it has room for {cache.capacity} tokens; enlarge it with reserve")
        cache.tokens.copy_(tokens)
        return self.runner.step(cache).clone()

    def _generate(self, *inputs: torch.Tensor, **kwargs: Any):
        """`generate` as in transformers, greedy or sampled; see `dejavu_ds.generation`.

        DeepSpeed's constructor binds this as `engine.generate`.
        """
        if kwargs.get("custom_generate") is not None:
            raise ValueError("custom_generate is taken by the engine's own loop and cannot be given")
        past = kwargs.pop("past_key_values", None)
        past = past if past is not None else kwargs.pop("cache", None)
        if past is not None and not isinstance(past, DejaVuCache):
            raise TypeError(_foreign_cache(past))
        ids = kwargs.get("input_ids", kwargs.get("inputs", inputs[0] if inputs else None))
        if ids is not None:
            check_inputs(self.module.get_input_embeddings(), ids, None)
        kwargs["stopping_criteria"] = generation.prepare(self.module, kwargs)
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

        Raises:
            ValueError: a unit or layer that is not there, a tap that comes after the unit has run, one selector in two
                places, or a selector for another number of units.
        """
        check_selectors(selectors, self.blocks)
        self.sparsity = sparsity
        for i, block in enumerate(self.blocks):
            heads, mlp = (selectors.get((unit, i), (None, None))[0] for unit in ("heads", "mlp"))
            masked = sparsity.mode == "masked"
            block.attach(heads, mlp, masked, sparsity.recovery_window, self._recovery_stream)
        listening: dict[Tap, list[Selector]] = {}
        for (unit, _), (selector, tap) in selectors.items():
            selector.unit = unit
            if not selector.of_outputs:
                listening.setdefault(tap, []).append(selector)
        for i, block in enumerate(self.blocks):
            block.at_attention, block.at_mlp = (
                Listeners(listening.get(Tap(i, point), ()), self._ops, self._side_stream)
                for point in ("attention", "mlp")
            )
        self.runner.forget(
            capturable=all(selector.capturable for selector, _ in selectors.values()),
            optional=self._sparse_anywhere(selectors) if sparsity.mode == "auto" else (),
        )
        self.stats.reset()

    def _sparse_anywhere(self, selectors: Mapping[tuple[str, int], object]) -> list[str]:
        """The units that have selectors on some rank; one without neurons has none. Collective."""
        here = [float(any(unit == wanted for unit, _ in selectors)) for wanted in UNITS]
        everywhere = self.tp.all_reduce(torch.tensor(here, device=self.device)).tolist()
        return [unit for unit, count in zip(UNITS, everywhere, strict=True) if count]

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
        selectors = {}
        packed = self.quantize is not None and self.quantize.predictors
        itemsize = 1 if packed else self.dtype.itemsize  # of the second layer
        for unit in UNITS:
            densities = predictors.densities(unit, sparsity.density(unit, predictors.default_density(unit)))
            for i, (predictor, density) in enumerate(zip(predictors.of(unit), densities, strict=True)):
                start, stop = self.local_units(unit, i)
                if predictor is None or density >= 1 or start == stop:
                    continue  # dense; a rank without neurons (DeepSpeed shards by 64) has nothing to choose
                rank = whole_rank(predictor.rank, itemsize)
                shard = predictor.shard(start, stop).padded(rank).to(self.device, self.dtype)
                if packed:
                    shard = PackedPredictor(shard, self.quantize)
                selector = PredictorSelector(shard, predictor.threshold(density), self._ops)
                selectors[unit, i] = selector, tap_of(unit, i, predictors.lookahead)
        return selectors

    def cache_for(self, past: DejaVuCache | None, batch_size: int, new_tokens: int) -> DejaVuCache:
        """`past`, or a new cache in place of None, with room for so many more tokens.

        Raises TypeError or ValueError for a cache of another kind, batch size or engine.
        """
        if past is None:
            return self.new_cache(batch_size, new_tokens)
        if not isinstance(past, DejaVuCache):
            raise TypeError(_foreign_cache(past))
        if past.batch_size != batch_size:
            raise ValueError(f"the cache holds {past.batch_size} sequences, the input {batch_size}")
        made_for = past.shapes, past.key_mask.device, past.layers[0].k.dtype
        if made_for != (self.cache_shapes(), self.device, self.dtype):
            raise ValueError(
                "the cache is of an engine with other heads, sparsity, dtype or device; pass the cache an earlier call "
                "of this engine returned, or one from engine.new_cache"
            )
        if past.length + new_tokens > past.capacity:
            past.reserve(max(past.length + new_tokens, min(2 * past.capacity, self.max_positions)))
        return past


def _foreign_cache(cache: Any) -> str:
    return (
        f"a {type(cache).__name__} cannot hold what the sparse step keeps; pass the cache an earlier call of this "
        "engine returned, or one from engine.new_cache"
    )
