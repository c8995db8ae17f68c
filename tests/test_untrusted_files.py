"""Files from anywhere: what is damaged, lies about sizes, points elsewhere or holds code is refused by name."""

import contextlib
import json
import os
import pickle
import shutil
import struct
import zipfile

import pytest
import torch
from checkpoints import write_checkpoint, write_index
from models import bundled, tiny_opt
from safetensors.torch import load_file, save_file
from test_lookahead import random_predictors
from transformers import AutoModelForCausalLM

import dejavu_ds
from dejavu_ds import PredictorSet
from dejavu_ds.checkpoint import bundled_model, load_model
from dejavu_ds.tensor_files import TensorFiles


def refused(folder, message):
    with pytest.raises(ValueError, match=message):
        dejavu_ds.init_inference(folder, dtype=torch.float32)


@pytest.fixture
def sharded(tmp_path):
    return write_checkpoint(tmp_path / "model", tiny_opt(), files=3)


@pytest.fixture
def single(tmp_path):
    return write_checkpoint(tmp_path / "model", tiny_opt())


@pytest.fixture
def bin_file(tmp_path):
    return write_checkpoint(tmp_path / "model", tiny_opt(), kind="bin") / "pytorch_model.bin"


def header_of(path):
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write_header(path, header, data):
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.mark.parametrize(
    "file",
    [
        "../outside.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "..",
        "",
        "a\\b.safetensors",
        "x.bin",
        "a\n.safetensors",
        7,
    ],
    ids=repr,
)
def test_an_index_that_points_elsewhere(file, sharded):
    shutil.copy(sharded / "model-00001-of-00003.safetensors", sharded.parent / "outside.safetensors")
    path = sharded / "model.safetensors.index.json"
    weight_map = json.loads(path.read_text())["weight_map"]
    weight_map["model.decoder.layers.0.fc1.weight"] = file
    write_index(path, weight_map)
    refused(sharded, r"layers\.0\.fc1\.weight is in .*not the name of a \.safetensors file in its own folder")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "[" * 100_000])
def test_an_index_that_is_none(text, sharded):
    (sharded / "model.safetensors.index.json").write_text(text)
    refused(sharded, r"index\.json (is no index|names no tensors)")


def test_files_and_tensors_that_an_index_promises(sharded):
    path = sharded / "model.safetensors.index.json"
    weight_map = json.loads(path.read_text())["weight_map"]
    write_index(path, {**weight_map, "extra": "model-00002-of-00003.safetensors"})
    refused(sharded, r"00002-of-00003\.safetensors lacks extra, which its index says it has")
    write_index(path, {n: file for n, file in weight_map.items() if n != "model.decoder.layers.1.fc2.bias"})
    refused(sharded, r"model\.decoder\.layers\.1\.fc2\.bias is missing")
    write_index(path, weight_map)
    (sharded / "model-00003-of-00003.safetensors").unlink()
    refused(sharded, r"names model-00003-of-00003\.safetensors, which is missing")
    os.mkfifo(sharded / "model-00003-of-00003.safetensors")  # opening it would wait for ever
    refused(sharded, r"00003-of-00003\.safetensors is missing")
    path.unlink()
    refused(sharded, r"no weights at .*expected model\.safetensors or pytorch_model\.bin")


@pytest.mark.parametrize("length", [2**63, 10**9, 17 * 2**20, 0, 5])
def test_safetensors_headers_that_lie(length, single):
    path = single / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(struct.pack("<Q", length) + data[8:] + (b" " * length if 10**7 < length < 10**8 else b""))
    refused(single, r"model\.safetensors is truncated or corrupt")


@pytest.mark.parametrize("size", [0, 5, 500, -1])
def test_truncated_files(size, single):
    path = single / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    refused(single, r"model\.safetensors is truncated or corrupt")


@pytest.mark.parametrize("shape", [[2**40, 60], [77, 61], [2**62, 2**62], [-1, 60], [77]])
def test_safetensors_shapes_that_lie(shape, single):
    header, data = header_of(single / "model.safetensors")
    header["model.decoder.layers.0.fc1.weight"]["shape"] = shape
    write_header(single / "model.safetensors", header, data)
    refused(single, r"model\.safetensors is truncated or corrupt")


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("ffn_dim", 10**12, r"fc1\.weight is \[77, 60\] where config\.json makes it \[1000000000000, 60\]"),
        ("vocab_size", 2**40, r"embed_tokens\.weight is \[131, 60\]"),
        ("num_hidden_layers", 10**9, r"1000000000 layers, the weights are 5. tensors"),
        ("num_hidden_layers", 4, r"layers\.3\..* is missing"),
        ("hidden_size", -60, r"'hidden_size': -60.*correct its config\.json"),
        ("num_hidden_layers", 0, r"'num_hidden_layers': 0"),
        ("num_attention_heads", 0, r"'num_attention_heads': 0"),
        ("num_attention_heads", 7, "60 is no multiple of 7 heads"),
        ("hidden_size", "abc", r"config\.json of .* describes no model.*expected int, got str"),
        ("pad_token_id", 10**6, r"config\.json of .* describes no model"),
    ],
)
def test_configurations_that_lie(field, value, message, single):
    config = json.loads((single / "config.json").read_text())
    (single / "config.json").write_text(json.dumps({**config, field: value}))
    refused(single, message)


def test_weights_that_are_no_floats_or_not_finite(single):
    path, name = single / "model.safetensors", "model.decoder.layers.1.fc2.weight"
    tensors = load_file(path)
    save_file({**tensors, name: tensors[name].to(torch.int8)}, path)
    refused(single, r"layers\.1\.fc2\.weight has dtype I8")
    for value in (float("nan"), float("inf"), -float("inf")):
        tensors[name][3, 5] = value
        save_file(tensors, path)
        refused(single, r"layers\.1\.fc2\.weight has values that are not finite in torch\.float32")
    tensors[name][3, 5] = 1e6  # more than fp16 holds
    save_file(tensors, path)
    load_model(single, torch.float32)
    with pytest.raises(ValueError, match=r"not finite in torch\.float16.*wider range"):
        load_model(single, torch.float16)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["[]", "null", "7", '{"model_type": 7}', "[" * 100_000])
def test_garbled_configurations(file, text, single):
    (single / file).write_text(text)
    if file == "generation_config.json" and text.startswith("{"):
        load_model(single, torch.float32)  # what transformers does not mind in it
    else:
        refused(single, r"(describes no model|is garbled|no model at)")


class Payload:
    """Makes a folder when it is unpickled by somebody who runs what a pickle says."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_bin_file_that_would_run_code(bin_file, tmp_path):
    trap = tmp_path / "trap"
    torch.save({"model.decoder.embed_tokens.weight": Payload(trap)}, bin_file)
    refused(bin_file.parent, r"pytorch_model\.bin holds other things than tensors")
    bin_file.write_bytes(pickle.dumps(Payload(trap)))
    refused(bin_file.parent, r"pytorch_model\.bin is no torch archive")
    assert not trap.exists()
    torch.save([torch.zeros(3)], bin_file)
    refused(bin_file.parent, r"holds a list and not tensors by name")


def rewrite_archive(path, change, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in records.items():
            archive.writestr(name, change(data) if name.endswith("data.pkl") else data)


def test_bin_sizes_that_lie(tmp_path):
    """Numbers of elements in the pickle that the file does not have, and records that would unpack to more."""
    path = tmp_path / "x.bin"
    small, large = b"M\xe8\x03", b"\x8a\x06" + (2**42).to_bytes(6, "little")
    for count in (1, 2):  # of the storage alone; of the tensor too
        torch.save({"w": torch.zeros(1000)}, path)
        rewrite_archive(path, lambda data, count=count: data.replace(small, large, count))
        with pytest.raises(ValueError, match=r"x\.bin is (truncated or )?corrupt"):
            TensorFiles({path: None}).part("w")
    torch.save({"w": torch.zeros(1).expand(10**9, 10**3)}, path)
    with pytest.raises(ValueError, match=r"x\.bin is corrupt: its tensors are said to take more"):
        TensorFiles({path: None})
    torch.save({"w": torch.zeros(10**6)}, path)
    rewrite_archive(path, lambda data: data, zipfile.ZIP_DEFLATED)
    with pytest.raises(ValueError, match=r"x\.bin is corrupt: what it says it holds is more"):
        TensorFiles({path: None})
    torch.save({"w": torch.zeros(1000)}, path)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(ValueError, match=r"x\.bin is no torch archive"):
        TensorFiles({path: None})


def test_a_configuration_that_names_code(single, tmp_path):
    """A class in the checkpoint's folder is not run; the model is the library's own."""
    trap = tmp_path / "trap"
    (single / "evil.py").write_text(f"import os\nos.mkdir({str(trap)!r})\n")
    config = json.loads((single / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (single / "config.json").write_text(json.dumps(config))
    with contextlib.suppress(ValueError):
        assert type(load_model(single, torch.float32)) is type(tiny_opt())
    (single / "config.json").write_text(json.dumps({**config, "model_type": "evil"}))
    with pytest.raises(ValueError, match="no model at"):
        load_model(single, torch.float32)
    assert not trap.exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, None])
def test_what_is_loaded_is_what_transformers_loads(dtype):
    got, want = (
        load_model(bundled_model(), dtype),
        AutoModelForCausalLM.from_pretrained(bundled_model(), dtype=dtype or "auto"),
    )
    assert type(got) is type(want) and not got.training and got.dtype == want.dtype
    assert got.generation_config == want.generation_config and got.config.to_dict() == want.config.to_dict()
    assert got.lm_head.weight is got.model.decoder.embed_tokens.weight
    assert got.state_dict().keys() == want.state_dict().keys()
    for name, tensor in want.state_dict().items():
        assert torch.equal(got.state_dict()[name], tensor) and not got.get_parameter(name).is_meta


@pytest.mark.parametrize("kind", ["both", "both, differing", "head alone"])
def test_heads_that_a_file_has_though_they_are_tied(kind, tmp_path):
    """As transformers has it: equal ones are one, different ones are two, and either may be missing."""
    folder = write_checkpoint(tmp_path / "model", tiny_opt())
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.decoder.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding + 1 if kind == "both, differing" else embedding.clone()
    if kind == "head alone":
        del tensors["model.decoder.embed_tokens.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    want = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.randint(3, 131, (2, 9), generator=torch.Generator().manual_seed(4))
    engine = dejavu_ds.init_inference(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = want(ids).logits
        torch.testing.assert_close(load_model(folder, torch.float32)(ids).logits, logits)
    torch.testing.assert_close(engine(ids.to(engine.device)).logits.cpu(), logits, atol=1e-4, rtol=1e-4)


def test_case_23_predictors_know_a_model_that_is_not_read_yet(tmp_path):
    folder, other = (write_checkpoint(tmp_path / str(seed), tiny_opt(seed), files=2) for seed in (0, 1))
    predictors = random_predictors(tiny_opt(), "half")
    options = {"predictors": predictors, "dtype": torch.float32}
    assert dejavu_ds.init_inference(folder, **options).predictors is predictors
    with pytest.raises(ValueError, match=r"trained for 'unnamed', the model is '1'"):
        dejavu_ds.init_inference(other, **options)


def test_every_flipped_byte_of_predictors_is_noticed(tmp_path):
    random_predictors(tiny_opt(), "half").save_pretrained(tmp_path)
    path = tmp_path / "predictors.safetensors"
    data = path.read_bytes()
    for place in (len(data) - 1, len(data) // 2, len(data) // 3, 9):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(ValueError, match=r"sha256|corrupt|not finite|ascends"):
            PredictorSet.from_pretrained(tmp_path)
    path.write_bytes(data)
    PredictorSet.from_pretrained(tmp_path)
    path.write_bytes(struct.pack("<Q", 10**15) + data[8:])
    with pytest.raises(ValueError, match=r"predictors\.safetensors is truncated or corrupt"):
        PredictorSet.from_pretrained(tmp_path)


def test_predictors_without_a_checksum_are_of_an_earlier_version_and_taken(tmp_path):
    random_predictors(tiny_opt(), "half").save_pretrained(tmp_path)
    path = tmp_path / "predictors.json"
    content = json.loads(path.read_text())
    assert len(content.pop("sha256")) == 64
    path.write_text(json.dumps(content))
    PredictorSet.from_pretrained(tmp_path)
    path.write_text(json.dumps({**content, "sha256": 7}))
    with pytest.raises(ValueError, match="sha256"):
        PredictorSet.from_pretrained(tmp_path)


def test_the_bundled_predictors_have_a_checksum():
    assert "sha256" in json.loads((bundled_model() / "predictors" / "predictors.json").read_text())
    assert PredictorSet.from_pretrained(bundled_model() / "predictors").num_layers == bundled().config.num_hidden_layers
