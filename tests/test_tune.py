"""The search for block sizes: what it tries is right, what it finds is what the kernels then take."""

import json

import pytest
import torch

from dejavu_ds.bench import tune
from dejavu_ds.bench.layer import Layer
from dejavu_ds.bench.shapes import parse_local_shape
from dejavu_ds.kernels import configs
from dejavu_ds.kernels.configs import (
    KERNELS,
    PACKED,
    RECOVERY_REGISTERS,
    RECOVERY_WARPS,
    SUMMED_PARTS,
    WHOLE_ROWS,
    Config,
    read_tuned,
    rows_at_once,
    token_block,
)

TINY = "hidden=64,ffn=96,heads=4,layers=2,vocab=512,positions=128"


def layer_of(batch, device):
    shape, tp = parse_local_shape(TINY)
    return Layer(shape, tp, batch, 16, 0.5, 0.5, torch.float16, torch.device(device))


def fits_beside_recovery(config: Config) -> bool:
    """Whether a multiprocessor of an H200 has registers for its share of all programs and for one of recovery."""
    # They are handed out to a thread in eights.
    registers = -(-configs.most_registers(config, beside_recovery=True) // 8) * 8
    programs = -(-configs.most_programs(config, beside_recovery=True) // 132)
    return 32 * (programs * config.warps * registers + RECOVERY_WARPS * RECOVERY_REGISTERS) <= 65536


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("D", [2048, 4096, 5120, 7168, 9216, 12288])
@pytest.mark.parametrize("B", [1, 2, 4, 8, 16])
def test_candidates(kernel, B, D):
    found = list(tune.candidates(kernel, B, D))
    # Of four tokens' inputs, rows as wide as these leave registers for recovery in two ways alone.
    least = 2 if (kernel, B) == ("packed_qkv", 4) and D > 7168 else 4
    assert least <= len(found) <= 48 and len(set(found)) == len(found)
    for config in found:
        assert kernel != "packed_qkv" or config.dot or fits_beside_recovery(config)
        # Packed rows are walked by a program as they are; a last tile may be masked in part.
        spare = -D % config.block_d
        assert spare == 0 or (kernel in PACKED and kernel in WHOLE_ROWS and spare <= 0.34 * D)
        assert (config.block_b, config.dot) == token_block(B)
        if config.dot:
            assert config.block_n >= 16
        elif kernel in WHOLE_ROWS:
            assert config.block_n * config.block_d <= 64 * 32 * config.warps
        else:
            assert config.block_n % rows_at_once(config, torch.float16) == 0


def test_packed_qkv_is_timed_as_a_step_runs_it(monkeypatch, device):
    """With a bias and a watermark, by which no head has missed anything: so it is compiled to leave room."""
    given = []
    monkeypatch.setattr(tune, "packed_qkv", lambda *args, config: given.append(args))
    (call,) = tune.calls("packed_qkv", layer_of(1, device), buffers=1)
    call(Config(1, 1, 64))
    ((_, _, bias, *_, position, watermark),) = given
    assert bias.shape == (4, 3, 16) and watermark.tolist() == 4 * position.tolist()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("B", [1, 6])
def test_every_candidate_gives_the_same(kernel, B, device):
    torch.manual_seed(0)
    block_b, dot = token_block(B)
    first, second = (Config(block_b, 16, 64, dot), Config(block_b, 32, 32, dot, warps=2, programs=5))
    (call,) = tune.calls(kernel, layer_of(B, device), buffers=1)
    kept = {"gather_up_proj": 48, "packed_up_proj": 48, "gather_qkv": 2, "packed_qkv": 2}.get(kernel)
    results = [call(config) for config in (first, second)]
    results = [y[:, :kept].double() if kept else y.sum(0).double() for y in results]  # a down-projection is in parts
    # fp16 results of fp32 sums in another order: one rounding apart.
    torch.testing.assert_close(*results, rtol=2e-3, atol=1e-4)


def test_what_is_found_is_taken(tmp_path, monkeypatch, device):
    wanted = [Config(1, 4, 64), Config(1, 2, 32), Config(1, 1, 64)]
    monkeypatch.setattr(tune, "candidates", lambda kernel, B, D: wanted)
    # Sparse, then dense: the second has the least product, though it is the fastest of neither.
    times = iter([[3.0] * 3, [2.0] * 3, [1.0] * 3, [3.0] * 3, [4.0] * 3, [9.0] * 3])
    monkeypatch.setattr(tune, "time_rotated", lambda calls, repeats, device: next(times))
    (entry,) = tune._fastest("gather_up_proj", [layer_of(1, device)], 3)
    assert (entry["D"], entry["us"], entry["us_every"]) == (64, 2000.0, 4000.0)
    assert entry["config"] == wanted[1]._asdict()
    path = tmp_path / "tuned.json"
    tune.write_tuned([entry], "a card", path)
    other = {"kernel": "out_proj", "D": 64, "config": Config(16, 16, 64, True)._asdict(), "us": 1.0}
    other |= {"us_every": 2.0, "tried": []}
    tune.write_tuned([other], "a card", path)
    assert json.loads(path.read_text())["device"] == "a card"
    with pytest.raises(ValueError, match="measured on a card, this is another one"):
        tune.write_tuned([other], "another one", path)
    assert read_tuned(path) == {
        ("gather_up_proj", 1, 64): wanted[1],
        ("out_proj", 16, 64): Config(16, 16, 64, True),
    }
    monkeypatch.setattr(configs, "TUNED", read_tuned(path))
    assert configs.config_for("gather_up_proj", 1, 64, torch.bfloat16) == wanted[1]
    assert configs.config_for("gather_up_proj", 1, 64, torch.float32) != wanted[1]
    assert configs.config_for("out_proj", 7, 64, torch.float16) == Config(16, 16, 64, True)


def test_layers_of_one_width_share_a_configuration(monkeypatch, device):
    """Shards of a layer and the whole layer find the same entry, so it is the one that serves them all best."""
    small, large = layer_of(1, device), layer_of(2, device)
    assert tune._alike([small, large, small]) == [[small, small], [large]]
    wanted = [Config(1, 4, 64), Config(1, 2, 32)]
    monkeypatch.setattr(tune, "candidates", lambda kernel, B, D: wanted)
    # The first is better for the whole layer, the second by more for its shard.
    times = iter([[1.0], [2.0], [1.0], [2.0], [9.0], [3.0], [9.0], [3.0]])
    monkeypatch.setattr(tune, "time_rotated", lambda calls, repeats, device: next(times))
    (entry,) = tune._fastest("gather_up_proj", [small, small], 1)
    assert entry["config"] == wanted[1]._asdict() and (entry["us"], entry["us_every"]) == (2000.0, 2000.0)
    assert entry["tried"][0][-4:] == [2000.0, 2000.0, 3000.0, 3000.0]


def test_a_result_that_gpus_sum_has_a_configuration_of_its_own(tmp_path, monkeypatch, device):
    """It comes in a fixed number of parts: the fastest that gives as many is kept beside the fastest."""
    fastest, fitting = Config(1, 16, 32, programs=6), Config(1, 16, 32, programs=2 * SUMMED_PARTS)
    monkeypatch.setattr(tune, "candidates", lambda kernel, B, D: [fastest, fitting])
    times = iter([[1.0], [2.0], [1.0], [2.0]])
    monkeypatch.setattr(tune, "time_rotated", lambda calls, repeats, device: next(times))
    tune.write_tuned(tune._fastest("gather_down_proj", [layer_of(1, device)], 1), "a card", tmp_path / "tuned.json")
    monkeypatch.setattr(configs, "TUNED", read_tuned(tmp_path / "tuned.json"))
    assert configs.config_for("gather_down_proj", 1, 64, torch.float16) == fastest
    assert configs.config_for("gather_down_proj", 1, 64, torch.float16, over_gpus=True) == fitting


@pytest.mark.parametrize(
    "warps, programs, registers",
    [(4, 528, 128), (4, 396, 168), (2, 528, 255), (8, 264, 128), (8, 528, 128), (16, 396, 128)],
)
def test_no_program_is_short_of_registers(warps, programs, registers):
    """A share of 65,536 on each of 132 multiprocessors, in eights; where that is less than sums and words take, 110 for
    four tokens, so many that nothing goes to memory."""
    assert configs.most_registers(Config(1, 1, 64, warps=warps, programs=programs)) == registers


@pytest.mark.parametrize("D", [64, 2048, 4096, 5120, 7168, 9216, 12288])
@pytest.mark.parametrize("B", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["tuned", "by the rule"])
def test_packed_qkv_leaves_room_for_recovery(D, B, dtype):
    """No program has fewer registers for that: there are fewer programs; what is tuned has none too many."""
    config = configs.config_for("packed_qkv", B, D, dtype)
    assert fits_beside_recovery(config)
    if config in configs.TUNED.values():
        assert configs.most_programs(config, beside_recovery=True) == config.programs


def test_registers_are_left_for_recovery_alone():
    config = Config(1, 2, 2048, False, 1, 4, 528)
    assert configs.most_programs(config) == 528
    assert configs.most_programs(config, beside_recovery=True) == 396


def test_the_shipped_table_can_be_read():
    down = [kernel for kernel in KERNELS if kernel not in WHOLE_ROWS]
    for (kernel, block_b, D), config in configs.TUNED.items():
        assert kernel in (*KERNELS, *map(configs.summed, down))
        # The last tile of a packed row need not be full.
        whole_tiles = D % config.block_d == 0 or (kernel in PACKED and kernel in WHOLE_ROWS)
        assert config.block_b == block_b and whole_tiles
