"""Where the systems' models come from: a checkpoint or a shape, whole or split over ranks."""

import gc
from dataclasses import dataclass, field

import torch

from dejavu_ds import DejaVuEngine, PredictorSet, init_inference
from dejavu_ds.bench.shapes import Shape
from dejavu_ds.bench.systems import quiet_stdout
from dejavu_ds.bench.traffic import check_memory, model_bytes
from dejavu_ds.bench.weights import RandomWeights, empty_model, random_model, random_shards
from dejavu_ds.checkpoint import load_model
from dejavu_ds.collectives import no_compilation
from dejavu_ds.fingerprint import fingerprint
from dejavu_ds.injection_policies import policy_for
from dejavu_ds.quantize import QuantizeConfig


@dataclass
class Source:
    """Hands out models one at a time.

    In one process a single Hugging Face model serves Hugging Face, DeepSpeed and at last our engine, which takes it
    over: one set of weights for all, in memory once. Split over ranks, every system gets its own shards.

    shape         the sizes; of the checkpoint, if there is one
    checkpoint    folder or hub name; None: random weights
    predictors    trained for the checkpoint; None: random ones
    active_share  of the neurons, with random weights (see `weights.fill`)
    quantize      our engine's weights in 4 bits; None: as they are. The others' stay as they are
    """

    shape: Shape
    dtype: torch.dtype
    device: torch.device
    tp: int = 1
    checkpoint: str | None = None
    predictors: PredictorSet | None = None
    active_share: float = 0.5
    quantize: QuantizeConfig | None = None
    _model: torch.nn.Module | None = field(default=None, repr=False)
    _engine: DejaVuEngine | None = field(default=None, repr=False)

    def check_memory(self, ours_only: bool) -> None:
        """Raise ValueError where one rank's share of the model cannot fit, packed if only our engine is to run."""
        quantize = self.quantize.type if ours_only and self.quantize else None
        needed = model_bytes(self.shape, self.dtype.itemsize, self.tp, quantize)
        dtype = quantize or str(self.dtype).removeprefix("torch.")
        check_memory(needed, self.device, f"{self.shape.name} in {dtype} over {self.tp} rank(s)")

    def fresh_model(self):
        """A Hugging Face model of its own."""
        if self.checkpoint is not None:
            return load_model(self.checkpoint, self.dtype).to(self.device).requires_grad_(False)
        return random_model(self.shape, self.dtype, self.device, self.active_share)

    def model(self):
        """The Hugging Face model that the systems of one process share, until `engine` takes it over."""
        if self._engine is not None:
            raise RuntimeError("the engine has taken the shared model over: run Hugging Face's systems before it")
        if self._model is None:
            self._model = self.fresh_model()
        return self._model

    def deepspeed(self, kernel_inject: bool = False):
        """DeepSpeed's engine, by AutoTP or with its own kernels."""
        if kernel_inject:
            return self._deepspeed(self.fresh_model(), replace_with_kernel_inject=True)
        if self.tp == 1:
            return self._deepspeed(self.model())
        if self.checkpoint is not None:
            return self._deepspeed(self.fresh_model())
        return random_shards(self.shape, self.dtype, self.active_share, self._deepspeed)

    def engine(self) -> DejaVuEngine:
        """Our engine, without predictors; the same one at every call."""
        if self._engine is None:
            self._engine = self._ours()
        return self._engine

    def close(self) -> None:
        """Let go of the shared model and the engine."""
        self._model = self._engine = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _deepspeed(self, model, **options):
        import deepspeed

        with quiet_stdout(), no_compilation():
            return deepspeed.init_inference(model, dtype=self.dtype, tensor_parallel={"tp_size": self.tp}, **options)

    def _ours(self) -> DejaVuEngine:
        if self.checkpoint is None and (self.tp > 1 or self.quantize is not None):
            self.close()  # what Hugging Face's systems shared is of no use here
            return self._block_by_block()
        model = self.model() if self.tp == 1 else load_model(self.checkpoint, self.dtype)
        if self.predictors is not None:
            self.predictors.check(fingerprint(model), self.shape.layers)
        self._model = None
        with quiet_stdout():
            return init_inference(model, dtype=self.dtype, quantize=self.quantize, tensor_parallel={"tp_size": self.tp})

    def _block_by_block(self) -> DejaVuEngine:
        """With random weights, which `init_inference` does not know; the engine takes them as it takes a checkpoint's.

        Within DeepSpeed a module that begins without storage is cut like any other.
        """
        from deepspeed.inference.config import DeepSpeedInferenceConfig

        model = empty_model(self.shape, self.dtype)
        config = DeepSpeedInferenceConfig(dtype=self.dtype, tensor_parallel={"tp_size": self.tp})
        graphs = self.device.type == "cuda"
        weights = RandomWeights(self.shape.hidden, self.active_share)
        with quiet_stdout():
            return DejaVuEngine(model, config, policy_for(model.config), None, None, graphs, self.quantize, weights)
