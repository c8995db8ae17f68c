"""A model by name or folder, whole or one rank's share of it."""

import contextlib
import ctypes
import os
from collections.abc import Collection, Iterator
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel

from dejavu_ds import tensor_files
from dejavu_ds.finite import NonFiniteError, finite
from dejavu_ds.injection_policies import policy_for
from dejavu_ds.tensor_files import TensorFiles


def bundled_model() -> Path:
    """Folder of the trained 7 M OPT that comes with the package; its predictors are in `predictors/` inside."""
    return Path(__file__).parent / "models" / "opt-7m"


def load_model(name: str | os.PathLike, dtype: torch.dtype | None) -> PreTrainedModel:
    """An OPT from a folder or from the hub, whole, in eval mode on the CPU.

    Args:
        dtype: None takes the checkpoint's own.

    Raises:
        ValueError: as `open_checkpoint`, or weights that are not finite in that dtype.
    """
    model, weights = open_checkpoint(name, dtype)
    weights.fill(model, "", torch.device("cpu"), model.dtype)
    tie(model)
    weights.close()
    return model


def open_checkpoint(name: str | os.PathLike, dtype: torch.dtype | None) -> "tuple[PreTrainedModel, Weights]":
    """An OPT from a folder or from the hub in eval mode on the meta device, and its weights, unread.

    No code of the checkpoint's is run. Its files are checked against one another and against the configuration first,
    so that nothing is allocated for sizes that are not there.

    Args:
        dtype: of the model; None takes the checkpoint's own.

    Raises:
        ValueError: no such folder or hub model, a family without a policy, weights that are quantised already, missing,
            damaged, or of other shapes than the configuration says.
    """
    name = os.fspath(name)
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"no model at {name!r}: give a folder with config.json and weights, or a hub name such as "
            f"facebook/opt-1.3b ({_first_line(error)})"
        ) from error
    # A garbled one fails in many ways, here and below.
    except Exception as error:
        raise ValueError(f"config.json of {name!r} describes no model: {_one_line(error)}") from error
    policy_for(config)
    refuse_quantized(config)
    files = tensor_files.find(name)
    # Modules take time and memory even on the meta device.
    if config.num_hidden_layers > len(files.entries):
        raise ValueError(
            f"config.json of {name!r} says {config.num_hidden_layers} layers, the weights are {len(files.entries)} "
            "tensors in all: they do not belong together"
        )
    own = config.dtype or next((e.dtype for e in files.entries.values() if isinstance(e.dtype, torch.dtype)), None)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype or own)
    except Exception as error:
        raise ValueError(f"config.json of {name!r} describes no model: {_one_line(error)}") from error
    try:
        model.generation_config = GenerationConfig.from_pretrained(name)
    except OSError:
        pass  # there is none or no JSON in it: the model keeps what transformers has made of config.json
    except Exception as error:
        raise ValueError(f"generation_config.json of {name!r} is garbled: {_one_line(error)}") from error
    return model.eval(), Weights(model, files)


class Weights:
    """The parameters of a model on the meta device, in the files of its checkpoint.

    Files may name them from the causal model ("model.decoder...") or from the base model inside ("decoder...").

    Raises ValueError for a parameter that no file has, or has in another shape or as something else than floats.
    """

    def __init__(self, model: PreTrainedModel, files: TensorFiles) -> None:
        self._files = files
        self._prefix = f"{model.base_model_prefix}."
        self._names: dict[str, str] = {}
        self._alias: dict[str, str] = {}
        if model.config.tie_word_embeddings:
            self._check_tie(model)
        problems = []
        for parameter, tensor in model.named_parameters():
            name = self._find(parameter)
            entry = files.entries.get(name) if name else None
            if entry is None:
                problems.append(f"{parameter} is missing")
            elif entry.shape != tuple(tensor.shape):
                problems.append(f"{name} is {list(entry.shape)} where config.json makes it {list(tensor.shape)}")
            elif isinstance(entry.dtype, str):
                problems.append(f"{name} has dtype {entry.dtype}, not one of 16 or 32 bits")
            else:
                self._names[parameter] = name
        if problems:
            more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
            raise ValueError(
                f"the weights of {model.config._name_or_path!r} do not fit its config.json: "
                f"{'; '.join(problems[:3])}{more}"
            )

    def whole(self, parameter: str) -> torch.Tensor:
        """A parameter as its file has it, mapped: what is not looked at is not read."""
        return self._files.part(self._names[parameter])

    def fill(
        self,
        module: nn.Module,
        prefix: str,
        device: torch.device,
        dtype: torch.dtype,
        leave_out: Collection[nn.Module] = (),
    ) -> None:
        """Read what this rank holds of a module's parameters; those of a module that DeepSpeed has split are parts.

        Args:
            prefix: of the names of its parameters: "" or the module's name and a dot.
            leave_out: modules inside to leave as they are.

        Raises:
            NonFiniteError: values that are not finite, with the name of the tensor.
        """
        for owner, name, parameter in own_parameters(module, prefix, leave_out):
            if parameter in self._names:  # a tied head's is not: `tie`
                value = self._read(parameter, _part(owner, name), device, dtype)
                setattr(owner, name, nn.Parameter(value, requires_grad=False))

    def close(self) -> None:
        """Let go of the files."""
        self._files.close()

    def _read(
        self, parameter: str, part: tuple[int, int, int | None], device: torch.device, dtype: torch.dtype
    ) -> torch.Tensor:
        mapped = self._files.part(self._names[parameter], *part)
        value = torch.empty(mapped.shape, dtype=dtype, device=device).copy_(mapped)
        if not finite(value):
            name = self._names[parameter]
            raise NonFiniteError(
                f"{name} has values that are not finite in {dtype}: {self._files.entries[name].path} is damaged, or "
                "needs a dtype with a wider range"
            )
        return value

    def _find(self, parameter: str) -> str | None:
        """The name under which the files have a parameter."""
        for name in (self._alias.get(parameter), parameter, parameter.removeprefix(self._prefix)):
            if name in self._files.entries:
                return name
        return None

    def _check_tie(self, model: PreTrainedModel) -> None:
        """As transformers does: a head that differs from the embedding it should be tied to is not tied after all, and
        where only the head is there, the embedding is read from it."""
        names = {id(module): name for name, module in model.named_modules()}
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        head_name = self._find(f"{names[id(head)]}.weight")
        parameter = f"{names[id(embedding)]}.weight"
        embedding_name = self._find(parameter)
        if head_name is None or embedding_name == head_name:
            return
        if embedding_name is None:
            self._alias[parameter] = head_name
            return
        shapes = {self._files.entries[name].shape for name in (head_name, embedding_name)}
        if len(shapes) == 1 and torch.equal(self._files.part(head_name), self._files.part(embedding_name)):
            return
        model.config.tie_word_embeddings = False
        head.weight = nn.Parameter(torch.empty_like(head.weight), requires_grad=False)


def own_parameters(
    module: nn.Module, prefix: str, leave_out: Collection[nn.Module] = ()
) -> Iterator[tuple[nn.Module, str, str]]:
    """(owner, name in the owner, whole name) of a module's parameters, of all but the modules left out."""
    for name, child in module.named_children():
        if child not in leave_out:
            yield from own_parameters(child, f"{prefix}{name}.", leave_out)
    for name in [name for name, _ in module.named_parameters(recurse=False)]:
        yield module, name, prefix + name


def tie(model: PreTrainedModel) -> None:
    """Give the head the embedding's weight, where they are one."""
    if model.config.tie_word_embeddings:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight


def return_freed_memory() -> None:
    """Have the C library give what was freed back to the system.

    glibc keeps freed tensors of less than 32 MB for later. Between those that stay they are of little use, and of many
    processes on a host each would keep its own.
    """
    # Other C libraries have no such function, and need none.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _part(module: nn.Module, name: str) -> tuple[int, int, int | None]:
    """(dim, start, stop) of what this rank holds of a parameter; DeepSpeed has decided where to cut."""
    if not hasattr(module, "_partition_sizes"):
        return 0, 0, None
    from deepspeed.module_inject.layers import LinearAllreduce  # slow, and not needed for a model that is whole

    by_input = isinstance(module, LinearAllreduce)
    if by_input and name != "weight":
        return 0, 0, None
    sizes, rank = module._partition_sizes, module.tp_index
    start = sum(sizes[:rank])
    return int(by_input), start, start + sizes[rank]


def refuse_quantized(config: PretrainedConfig) -> None:
    """ValueError for the configuration of a model whose weights are quantised already.

    bitsandbytes packs a linear's weight [out, in] along `in`. For q, k, v and fc1 that is the gather layout; out_proj
    and fc2 lie transposed there, and a block of theirs would spread over 64 rows. To decode and pack them again the
    other way round rounds twice: a third model, neither the checkpoint nor what `quantize` makes of the original.
    """
    quantization = getattr(config, "quantization_config", None)
    if not quantization:
        return
    if not isinstance(quantization, dict):
        quantization = quantization.to_dict()
    method = quantization.get("quant_method")
    method = getattr(method, "value", method)
    reason = "only weights of 16 or 32 bits are taken"
    if method == "bitsandbytes" and quantization.get("load_in_4bit"):
        reason = (
            "sparse steps pick single columns of out_proj and fc2, whose blocks run across the columns there, and to "
            "pack them anew would make another model"
        )
    raise ValueError(
        f"the weights of {config._name_or_path or 'this model'} are quantised already, by {method}: {reason}. Load the "
        "checkpoint in 16 bits, and give quantize='nf4' or 'fp4' to have it packed"
    )


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
