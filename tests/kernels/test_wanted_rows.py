"""Down-projections as a GPU runs them, with lists and sums in shared memory, by an interpreter of their assembly.

On a GPU the tests of the projections themselves take these ways.
"""

from functools import partial

import assembly
import pytest
import torch
from kernel_cases import check_beyond, check_down, make_down
from test_packed_projections import FP4, NF4, over_packed

from dejavu_ds.kernels import gather_down_proj as module
from dejavu_ds.kernels import nibbles, wanted_rows
from dejavu_ds.kernels.configs import Config
from dejavu_ds.kernels.gather_down_proj import gather_down_proj
from dejavu_ds.kernels.packed_down_proj import packed_down_proj

pytestmark = [
    pytest.mark.usefixtures("poison_empty"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="needs Triton's interpreter"),
]
# Of a row's products with a table in fp16, and with a factor and a product rounded to fp16 as well.
TABLE, HALF = 1.01 * 2**-11, 1.01 * 3 * 2**-11


@pytest.fixture(autouse=True)
def as_compiled(monkeypatch):
    assembly.patch(monkeypatch)
    monkeypatch.setattr(nibbles, "_INTERPRETED", False)
    monkeypatch.setattr(wanted_rows, "_INTERPRETED", False)
    monkeypatch.setattr(module, "_LEAST_ROWS", 16)


def plain(block_d: int, warps: int, steps: int, programs: int, **more) -> Config:
    return Config(1, steps * 256 * warps // block_d, block_d, False, 1, warps, programs, **more)


def packed(block_d: int, warps: int, steps: int, programs: int, wide: int, stages: int = 1, **more) -> Config:
    return Config(1, steps * 512 * warps * wide // block_d, block_d, False, stages, warps, programs, wide=wide, **more)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize(
    "config, D, units, count, group",
    [
        (plain(64, 2, 4, 1), 64, 1500, 1300, 1),  # three lists
        (plain(32, 4, 2, 6), 72, 300, 250, 1),  # a strip that is not full, two shares
        (plain(16, 2, 1, 2), 33, 120, 90, 1),  # more rows in a warp than columns a thread
        (plain(64, 8, 2, 4), 64, 300, 0, 1),
        (plain(128, 1, 2, 3), 128, 50, 1, 3),
        (plain(64, 4, 2, 4, listed=False), 64, 200, 130, 1),
    ],
    ids=str,
)
def test_rows_in_16_bits(config, D, units, count, group, dtype, device):
    torch.manual_seed(0)
    for skip_zeros in (True, False):
        case = make_down(1, D, units, count, group, skip_zeros, dtype, device)
        check_down(partial(gather_down_proj, config=config), case, True)


@pytest.mark.parametrize(
    "config, D, units, count, group",
    [
        (packed(128, 4, 4, 2, 2), 128, 700, 500, 1),
        (packed(128, 2, 4, 4, 2, half=True), 192, 700, 611, 1),
        (packed(256, 4, 2, 2, 1), 256, 120, 90, 1),
        (packed(32, 1, 1, 4, 2), 64, 60, 50, 3),
        (packed(64, 2, 2, 3, 1, listed=False), 64, 90, 70, 1),
        (packed(64, 1, 2, 3, 2), 64, 90, 0, 1),
    ],
    ids=str,
)
def test_rows_in_4_bits(config, D, units, count, group, device, monkeypatch):
    monkeypatch.setattr(nibbles, "num_threads", lambda: 32 * config.warps)
    torch.manual_seed(0)
    case = make_down(1, D, units, count, group, True, torch.float16, device)
    case["w"].nan_to_num_(0.5, 0.5)
    op = over_packed(partial(packed_down_proj, config=config), case, FP4 if D == 256 else NF4, exactly=True)
    check_down(op, case, True, HALF if config.half else TABLE)


@pytest.mark.parametrize(
    "config, D, units, count, group",
    [
        (packed(128, 4, 2, 4, 2, half=True), 192, 6, 5, 128),  # two blocks a unit, a strip that is not full
        (packed(128, 2, 4, 6, 2, half=True, stages=2), 128, 5, 2, 64),  # shares of no block among those of one
        (packed(64, 1, 2, 3, 1, half=True), 64, 4, 3, 48),  # three blocks a unit
        (packed(256, 4, 2, 2, 1), 256, 3, 3, 16),
        (packed(64, 1, 2, 3, 2), 64, 3, 0, 32),
    ],
    ids=str,
)
def test_units_of_whole_blocks_in_4_bits(config, D, units, count, group, device, monkeypatch):
    assert group % config.block_n == 0
    monkeypatch.setattr(nibbles, "num_threads", lambda: 32 * config.warps)
    torch.manual_seed(0)
    case = make_down(1, D, units, count, group, False, torch.float16, device)
    case["w"].nan_to_num_(0.5, 0.5)
    op = over_packed(partial(packed_down_proj, config=config), case, NF4, exactly=True)
    check_down(op, case, True, HALF if config.half else TABLE)


def test_tokens_have_sums_of_their_own(device):
    torch.manual_seed(0)
    case = make_down(3, 100, 90, 77, 1, True, torch.float16, device)
    for block_b in (1, 2):
        check_down(partial(gather_down_proj, config=plain(64, 2, 2, 4)._replace(block_b=block_b)), case, True)


def test_tokens_have_lists_of_their_own(device, monkeypatch):
    monkeypatch.setattr(nibbles, "num_threads", lambda: 128)
    torch.manual_seed(0)
    case = make_down(3, 128, 90, 77, 1, True, torch.float16, device)
    case["w"].nan_to_num_(0.5, 0.5)
    op = over_packed(partial(packed_down_proj, config=packed(128, 4, 4, 2, 2)), case, NF4, exactly=True)
    check_down(op, case, True, TABLE)


def test_what_stands_beyond_the_count(device):
    torch.manual_seed(0)
    for count in (0, 1, 40):
        case = make_down(1, 64, 200, count, 1, True, torch.float16, device, cap=150)
        check_beyond(partial(gather_down_proj, config=plain(64, 1, 2, 2)), case, lambda y: y)


def test_a_nan_is_wanted(device):
    case = make_down(1, 16, 40, 40, 1, True, torch.float16, device)
    case["h"][0, 2] = float("nan")
    case["w"].fill_(1.0)
    assert gather_down_proj(**case, config=plain(16, 1, 1, 1)).isnan().all()
