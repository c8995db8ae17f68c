"""Random small cases of every kernel. A failure names its seed: `run_case(seed, device)` is the case."""

import random

import kernel_cases as cases
import pytest
import torch

from dejavu_ds.kernels import decode_attention, gather_down_proj, predict_select, recover_kv
from dejavu_ds.kernels.configs import Config, token_block
from dejavu_ds.kernels.ops import TRITON

pytestmark = pytest.mark.usefixtures("poison_empty")

CASES = 10_000 if torch.cuda.is_available() else 1_000
CHUNK = 50

# Few distinct values for what a kernel is compiled for, so that a GPU spends its time on cases, not on compiling.
BATCHES = (1, 2, 3, 5, 17)
WIDTHS = (5, 33, 64)
HEAD_DIMS = (5, 20, 33)


def config(rng, B: int, rows: int, programs: int) -> Config | None:
    """The rule's, or tiles of `rows` rows, so small that a case of this file takes several steps in either direction.

    Of a single warp, which loads fewer rows together than a tile has.
    """
    block_b, dot = token_block(B)
    stages = 3 if dot else 1
    return rng.choice((None, Config(block_b, 16 if dot else rows, 16, dot, stages, warps=1, programs=programs)))


def fuzz_predict(rng, dtype, device):
    B, N, r = rng.choice(BATCHES), rng.randint(1, 300), rng.choice((16, *WIDTHS))
    live = rng.choice([None, [rng.random() < 0.5 for _ in range(B)]])
    threshold = rng.randint(-8, 40) / 4
    case = cases.make_predict(B, N, r, threshold, live, rng.random() < 0.5, dtype, device)
    cases.check_predict(TRITON.predict_select, case)


def fuzz_up(rng, dtype, device):
    group, relu = rng.choice([(1, True), (6, False)])
    units = rng.randint(1, 40 // group)
    cap = rng.randint(1, units)
    shape = rng.choice(BATCHES), rng.choice(WIDTHS), units, rng.randint(0, cap), group
    case = cases.make_up(*shape, rng.random() < 0.5, relu, dtype, device, cap=cap)
    cases.check_up(
        TRITON.gather_up_proj, case | {"config": config(rng, shape[0], 2, 3), "ahead": rng.random() < 0.5}, True
    )


def fuzz_down(rng, dtype, device):
    group, skip_zeros = rng.choice([(1, True), (6, False)])
    units = rng.randint(1, 60 // group)
    cap = rng.randint(1, units)
    shape = rng.choice(BATCHES), rng.choice(WIDTHS), units, rng.randint(0, cap), group
    case = cases.make_down(*shape, skip_zeros, dtype, device, cap=cap)
    cases.check_down(TRITON.gather_down_proj, case | {"config": config(rng, shape[0], 16, 9)}, True)


def fuzz_attention(rng, dtype, device):
    T = rng.randint(1, 150)
    H = rng.randint(1, 4)
    cap = rng.randint(1, H)
    shape = rng.choice((1, 2, 3)), H, T, rng.randrange(T), rng.choice(HEAD_DIMS), rng.randint(0, cap)
    holes, window = rng.choice((0.0, 0.3, 0.9)), rng.choice((0, 1, 5))
    case = cases.make_attention(*shape, dtype, device, cap=cap, holes=holes, window=window)
    cases.check_attention(TRITON.decode_attention, case, True)


def fuzz_recover(rng, dtype, device):
    B, W, D, H = rng.choice((1, 2, 3)), rng.randint(1, 12), rng.choice(WIDTHS), rng.randint(1, 5)
    t = rng.randint(0, 12)
    watermark = [max(0, t - rng.randint(0, W)) for _ in range(H)]
    selected = [rng.random() < 0.5 for _ in range(H)]
    sizes = B, W, D, H, rng.choice((5, 8)), 13, t, watermark, selected
    bias, spare = rng.random() < 0.5, rng.randint(1, 3)
    case = cases.make_recover(*sizes, bias, dtype, device, spare=spare)
    cases.check_recover(TRITON.recover_kv, case, True)


def fuzz_qkv(rng, dtype, device):
    H = rng.randint(1, 5)
    cap = rng.randint(1, H)
    shape = rng.choice(BATCHES), rng.choice(WIDTHS), H, rng.choice(HEAD_DIMS), rng.randint(0, cap)
    case = cases.make_qkv(*shape, dtype, device, bias=rng.random() < 0.5, cap=cap)
    cases.check_qkv(
        TRITON.gather_qkv, case | {"config": config(rng, shape[0], 2, 3), "ahead": rng.random() < 0.5}, True
    )


def run_case(seed: int, device: str) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    dtype = rng.choice(list(cases.DTYPES.values()))
    rng.choice([fuzz_predict, fuzz_up, fuzz_qkv, fuzz_down, fuzz_attention, fuzz_recover])(rng, dtype, device)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Small cases split their work as large ones do."""
    monkeypatch.setattr(gather_down_proj, "_LEAST_ROWS", 16)
    monkeypatch.setattr(decode_attention, "_ONE_SHARE_KEYS", 20)
    monkeypatch.setattr(decode_attention, "_BLOCK_T", {2: 16, 4: 16})
    monkeypatch.setattr(decode_attention, "_MAX_SHARES", 4)
    monkeypatch.setattr(predict_select, "_BLOCK_N", 16)
    monkeypatch.setattr(predict_select, "_LIST_BLOCKS", 4)
    tiles = (16, 16, 16, 2), (32, 16, 16, 2)
    monkeypatch.setattr(recover_kv, "_TILES", {2: tiles, 4: tiles})
    monkeypatch.setattr(recover_kv, "_FEW", 16)
    monkeypatch.setattr(recover_kv, "_PROGRAMS", 2)


@pytest.mark.parametrize("first", range(0, CASES, CHUNK))
def test_random_cases(first, device):
    for seed in range(first, first + CHUNK):
        try:
            run_case(seed, device)
        except Exception as error:
            pytest.fail(f"seed {seed}: {type(error).__name__}: {error}", pytrace=True)
