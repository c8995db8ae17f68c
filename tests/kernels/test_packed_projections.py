"""Projections over 4-bit rows against fp64 products with the rows that bitsandbytes decodes."""

import copy
import random
from functools import partial

import pytest
import torch
from kernel_cases import (
    DTYPES,
    NAN,
    assert_exact,
    check_beyond,
    check_down,
    check_qkv,
    check_recover,
    check_up,
    make_down,
    make_qkv,
    make_recover,
    make_up,
    randn,
)

from dejavu_ds.kernels import gather_down_proj, packed_recover_kv, packed_rows, packed_weight
from dejavu_ds.kernels import packed_up_proj as packed_up_proj_module
from dejavu_ds.kernels.configs import Config, token_block
from dejavu_ds.kernels.dense import as_tensor, linear, times
from dejavu_ds.kernels.ops import ops_for
from dejavu_ds.kernels.packed_down_proj import packed_down_proj
from dejavu_ds.kernels.packed_ops import PACKED_TORCH, PACKED_TRITON, packed_ops_for
from dejavu_ds.kernels.packed_qkv import packed_qkv
from dejavu_ds.kernels.packed_up_proj import packed_up_proj
from dejavu_ds.quantize import QuantizeConfig, bitsandbytes_functional, pack

pytestmark = pytest.mark.usefixtures("poison_empty")
PACKED = {"triton": PACKED_TRITON, "torch": PACKED_TORCH}
NF4, FP4, NESTED = QuantizeConfig(), QuantizeConfig("fp4", 128), QuantizeConfig(nested=True)


@pytest.fixture(
    params=[("triton", None), ("torch", 2**18), ("torch", 512)], ids=["triton", "torch", "torch, many tiles"]
)
def implementation(request, monkeypatch):
    """And the elements that the twins decode together."""
    name, tile = request.param
    monkeypatch.setattr(packed_weight, "_TILE_ELEMENTS", {})
    monkeypatch.setattr(packed_weight, "_TILE_ELEMENTS_ELSEWHERE", tile)
    return name


@pytest.fixture(params=[2**18, 512], ids=["one tile", "many tiles"])
def tiles(request, monkeypatch):
    """Elements that are decoded together."""
    monkeypatch.setattr(packed_weight, "_TILE_ELEMENTS", {})
    monkeypatch.setattr(packed_weight, "_TILE_ELEMENTS_ELSEWHERE", request.param)


def decoded(w: torch.Tensor, config: QuantizeConfig) -> torch.Tensor:
    """What bitsandbytes makes of a weight and back; a row of NaN stays one."""
    functional = bitsandbytes_functional()
    flat = w.flatten(0, -2).contiguous()
    data, state = functional.quantize_4bit(
        flat, blocksize=config.blocksize, quant_type=config.type, compress_statistics=config.nested
    )
    return functional.dequantize_4bit(data, state).view(w.shape)


def over_packed(op, case: dict, config: QuantizeConfig, exactly: bool = False):
    """`op` with the case's weight packed; the case then holds the decoded weight, for the truth.

    exactly: as the code's values times the scales in fp32, before they are rounded to the dtype.
    """
    packed = pack(case["w"], config)
    case["w"] = copy.deepcopy(packed).float().dequantize() if exactly else decoded(case["w"], config)
    return lambda **given: op(**{**given, "w": packed})


def product_error(dtype: torch.dtype, dot: bool, half: float = 0.0) -> float:
    """What a kernel rounds of its products besides the sum in fp32, relative to their magnitudes.

    Tensor cores take the table's or the decoded values in the dtype, which the interpreter does not round but cut off
    for bf16; for 16 bits the compiled lookup holds the table in fp16. `half`: how many roundings to half precision a
    product passes.
    """
    compiled = torch.cuda.is_available() and dtype != torch.float32
    in_dtype = dot * torch.finfo(dtype).eps / (1 if dtype == torch.bfloat16 and not compiled else 2)
    return 1.01 * (in_dtype + 2**-11 * (compiled + half * (compiled and dtype == torch.float16)))


def rounded_of(implementation: str, dtype: torch.dtype, B: int, half: float = 0.0) -> tuple[bool, float]:
    """`rounded_once` and `of_terms` of the checks."""
    triton = implementation == "triton"
    return triton, product_error(dtype, token_block(B)[1], half) if triton else 0.0


# Of 16 products in half precision each passes at most 4 additions to one of four sums, and 1 when two of them meet.
UP_HALF = 5


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(
    "B, D, units, count, group, bias, relu, config",
    [
        (1, 64, 40, 11, 1, True, True, NF4),
        (3, 256, 14, 14, 1, True, False, NESTED),
        (2, 128, 9, 4, 5, False, True, FP4),
        (17, 192, 7, 0, 3, True, True, NF4),
        (2, 128, 5, 5, 3, True, False, NF4),
        (5, 128, 40, 33, 1, True, True, FP4),
        (17, 192, 7, 7, 3, False, False, NESTED),
    ],
)
@pytest.mark.parametrize("ahead", [False, True], ids=["waiting", "ahead"])
def test_up(implementation, B, D, units, count, group, bias, relu, config, ahead, dtype, device):
    torch.manual_seed(0)
    case = make_up(B, D, units, count, group, bias, relu, dtype, device)
    op = over_packed(
        partial(PACKED[implementation].gather_up_proj, ahead=ahead), case, config, implementation == "triton"
    )
    check_up(op, case, *rounded_of(implementation, dtype, B, UP_HALF))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(
    "B, D, units, count, group, skip_zeros, config",
    [
        (1, 64, 40, 23, 1, True, NF4),
        (4, 256, 40, 12, 1, True, FP4),
        (3, 256, 9, 9, 16, False, NESTED),
        (2, 128, 9, 4, 15, False, FP4),
        (6, 192, 7, 0, 1, False, NF4),
        (1, 192, 300, 300, 1, False, NESTED),  # several steps, a strip that is not full
        (6, 192, 150, 140, 1, True, NF4),
        (17, 128, 30, 21, 5, False, FP4),
    ],
)
def test_down(implementation, B, D, units, count, group, skip_zeros, config, dtype, device):
    torch.manual_seed(0)
    case = make_down(B, D, units, count, group, skip_zeros, dtype, device)
    op = over_packed(PACKED[implementation].gather_down_proj, case, config, implementation == "triton")
    check_down(op, case, *rounded_of(implementation, dtype, B))


@pytest.mark.parametrize("away", [1, 2])
@pytest.mark.parametrize("B", [1, 3])
@pytest.mark.parametrize("config", [NF4, NESTED], ids=str)
def test_blocks_within_a_unit(config, B, away, device, monkeypatch):
    """Heads of several blocks, of which a share has fewer than are on their way, some, and none."""
    monkeypatch.setattr(gather_down_proj, "_LEAST_ROWS", 16)
    torch.manual_seed(0)
    # 2 strips of 3 shares; blocks of 16 rows, 2 a head.
    of_blocks = Config(token_block(B)[0], 16, 64, False, away, 1, 6)
    for count in (0, 1, 2, 5):
        case = make_down(B, 128, 5, count, 32, False, torch.float16, device)
        if config.nested:
            case["w"].nan_to_num_(0.5)  # rows that must not be read are NaN, and there is no mean of all scales then
        op = over_packed(partial(packed_down_proj, config=of_blocks), case, config, exactly=True)
        check_down(op, case, *rounded_of("triton", torch.float16, B))


def test_a_list_without_room(device):
    """Nothing may be kept, so nothing of the list is read."""
    case = make_down(1, 128, 5, 0, 32, False, torch.float16, device)
    case |= {"h": case["h"][:, :0].contiguous(), "idx": case["idx"][:0], "w": pack(case["w"].nan_to_num_(0.5), NF4)}
    for block_n in (16, 64):
        y = packed_down_proj(**case, config=Config(1, block_n, 64, False, 1, 1, 6))
        assert y.shape[1:] == (1, 128) and not y.any()


@pytest.mark.parametrize("parts", [1, 2])
def test_down_into_fp32_parts(implementation, parts, device):
    """As a rank's share of a sum: the same product, written where it was asked for."""
    torch.manual_seed(0)
    case = make_down(2, 128, 20, 7, 1, False, torch.float16, device)
    op = over_packed(PACKED[implementation].gather_down_proj, case, NF4)
    out = torch.full((parts, 2, 128), NAN, device=device)
    assert op(**case, out=out).data_ptr() == out.data_ptr()
    # fp32 sums of 7 rows in another order.
    torch.testing.assert_close(out.sum(0), op(**case).sum(0), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(
    "B, D, H, head_dim, count, bias, config",
    [
        (1, 64, 4, 5, 3, True, NF4),
        (3, 128, 3, 6, 2, False, FP4),
        (2, 128, 3, 5, 3, True, NESTED),
        (2, 64, 3, 5, 0, True, NF4),
        (6, 128, 3, 20, 3, True, NESTED),
    ],
)
@pytest.mark.parametrize("ahead", [False, True], ids=["waiting", "ahead"])
def test_qkv(implementation, B, D, H, head_dim, count, bias, config, ahead, dtype, device):
    torch.manual_seed(0)
    case = make_qkv(B, D, H, head_dim, count, dtype, device, bias=bias)
    op = over_packed(partial(PACKED[implementation].gather_qkv, ahead=ahead), case, config, implementation == "triton")
    check_qkv(op, case, *rounded_of(implementation, dtype, B, UP_HALF))


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside recovery"])
def test_registers_are_left_for_recovery(beside, device, monkeypatch):
    """With a watermark, that is where recovery runs beside."""
    launches = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **options: launches.append((grid, options["maxnreg"]))

    monkeypatch.setattr(packed_up_proj_module, "_packed_up_proj_kernel", Kernel())
    monkeypatch.setattr(packed_up_proj_module, "most_registers", lambda config, beside: 136 if beside else 144)
    monkeypatch.setattr(packed_up_proj_module, "most_programs", lambda config, beside: 5 if beside else 7)
    case = make_qkv(1, 64, 4, 5, 3, torch.float16, device, bias=True)
    case |= {"w": pack(case["w"], NF4), "watermark": case["position"].repeat(4) if beside else None}
    packed_qkv(**case)
    assert launches == [((5, 1), 136) if beside else ((7, 1), 144)]


def recover_rounded_of(implementation: str, dtype: torch.dtype) -> tuple[bool, float]:
    """By tensor cores, for however few items."""
    return rounded_of(implementation, dtype, 16)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(
    "B, W, D, H, head_dim, T, t, watermark, selected, bias, config",
    [
        (1, 8, 64, 3, 20, 30, 13, [10, 13, 12], [True, True, False], True, NF4),
        (2, 8, 128, 3, 5, 30, 20, [12, 12, 13], [False, True, False], True, FP4),  # two overdue, one selected
        (3, 4, 64, 1, 32, 9, 4, [0], [False], False, NF4),
        # From one to nine inputs: one tile of few items, full or not, and tiles of many.
        (1, 9, 192, 9, 8, 30, 13, list(range(5, 14)), [True] * 9, True, NF4),
        (2, 9, 64, 6, 9, 30, 13, list(range(8, 14)), [True, False] * 3, False, NF4),
        (4, 9, 128, 4, 16, 30, 13, [13, 12, 11, 3], [True] * 3 + [False], True, FP4),
        (5, 9, 128, 4, 16, 30, 13, [13, 12, 11, 3], [True] * 3 + [False], True, FP4),
    ],
)
def test_recover(
    implementation, B, W, D, H, head_dim, T, t, watermark, selected, bias, config, dtype, device, monkeypatch
):
    monkeypatch.setattr(packed_recover_kv, "_FEW", 8)
    torch.manual_seed(0)
    case = make_recover(B, W, D, H, head_dim, T, t, watermark, selected, bias, dtype, device, spare=1)
    op = over_packed(PACKED[implementation].recover_kv, case, config, implementation == "triton")
    check_recover(op, case, *recover_rounded_of(implementation, dtype))


@pytest.mark.parametrize("few, programs", [(1, 1), (6, 5), (1000, 264)])
def test_recovery_of_few_items_and_many(few, programs, device, monkeypatch):
    """Heads of both kinds of tiles in one launch, and all of one kind, of several tiles each; fewer programs than
    tiles, and more. Blocks that the groups of columns divide, and that they do not."""
    monkeypatch.setattr(packed_recover_kv, "_FEW", few)
    monkeypatch.setattr(packed_recover_kv, "_PROGRAMS", programs)
    torch.manual_seed(0)
    watermark, selected = [29, 28, 27, 26, 10, 30, 28], [True] * 6 + [False]
    for D in (256, 320):
        case = make_recover(2, 20, D, 7, 12, 40, 30, watermark, selected, True, torch.float16, device)
        op = over_packed(PACKED_TRITON.recover_kv, case, NF4, exactly=True)
        check_recover(op, case, *recover_rounded_of("triton", torch.float16))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("config", [NF4, FP4, NESTED], ids=str)
@pytest.mark.parametrize("shape", [(2, 64), (2, 3, 128), (1, 1, 256)], ids=str)
def test_every_row(shape, config, dtype, device, tiles):
    """Prefill: the whole weight, of any leading dimensions, on inputs of any."""
    torch.manual_seed(0)
    D = 256
    weight = randn(3, 2, 9, D, dtype=dtype, device=device)
    w, packed = decoded(weight, config).flatten(0, 2).double(), pack(weight, config)
    b, x, h = (randn(*size, dtype=dtype, device=device) for size in ((54,), (*shape[:-1], D), (*shape[:-1], 54)))
    exact = x.double() @ w.T + b.double()
    terms = x.double().abs() @ w.abs().T + b.double().abs()
    assert_exact(linear(x, packed, b), exact, terms, rounded_once=False)
    assert_exact(linear(x, packed), exact - b.double(), terms, rounded_once=False)
    assert_exact(times(h, pack(weight.flatten(0, 2), config)), h.double() @ w, h.double().abs() @ w.abs(), False)


def tiny(B: int, rows: int, columns: int, programs: int) -> Config:
    """Of few rows and columns, so that small cases take several steps in either direction."""
    block_b, dot = token_block(B)
    return Config(block_b, 16 if dot else rows, 64 if dot else columns, dot, 3 if dot else 1, 1, programs)


@pytest.mark.parametrize("programs", [1, 3])
@pytest.mark.parametrize("B", [2, 6])
@pytest.mark.parametrize("group, cap, counts", [(1, 8, (0, 1, 5)), (6, 3, (0, 1, 2))])
def test_what_stands_beyond_the_count(group, cap, counts, B, programs, device):
    torch.manual_seed(0)
    for count in counts:
        case = make_up(B, 64, 12, count, group, True, True, torch.float16, device, cap=cap)
        op = over_packed(partial(packed_up_proj, config=tiny(B, 2, 32, programs)), case, NF4)
        check_beyond(op, case, lambda y, end=count * group: y[:, :end])
        case = make_down(B, 64, 12, count, group, True, torch.float16, device, cap=cap)
        config = tiny(B, 8, 32, programs)._replace(wide=programs // 2 + 1)
        op = over_packed(partial(packed_down_proj, config=config), case, NF4)
        check_beyond(op, case, lambda y: y)


def on_their_way(config: Config, stages: int) -> Config:
    """Rows, or blocks of them, that are loaded while others are multiplied; tensor cores have a pipeline."""
    return config if config.dot else config._replace(stages=stages)


RANDOM_CASES = 2_000 if torch.cuda.is_available() else 60


@pytest.mark.parametrize("first", range(0, RANDOM_CASES, 20))
def test_random_cases(first, device, monkeypatch):
    """A failure names its seed: `run_case(seed, device)` is the case."""
    monkeypatch.setattr(gather_down_proj, "_LEAST_ROWS", 16)
    monkeypatch.setattr(packed_recover_kv, "_PROGRAMS", 2)
    monkeypatch.setattr(packed_recover_kv, "_FEW", 16)
    for seed in range(first, first + 20):
        try:
            run_case(seed, device)
        except Exception as error:
            pytest.fail(f"seed {seed}: {type(error).__name__}: {error}", pytrace=True)


def run_case(seed: int, device: str) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    dtype, D, B = rng.choice(list(DTYPES.values())), rng.choice((128, 384)), rng.choice((1, 2, 3, 4, 5, 16, 17))
    config = QuantizeConfig(rng.choice(("nf4", "fp4")), rng.choice((64, 128)), rng.random() < 0.3)
    kind, bias = rng.choice(("up", "qkv", "down", "recover")), rng.random() < 0.5
    # Units of whole blocks of rows, of parts of one, and of no whole number of them.
    units, group = rng.randint(1, 7), rng.choice((1, 3, 8, 16, 20))
    # What is read of no weight is NaN, and there is no mean of all scales then.
    cap = units if config.nested else rng.randint(1, units)
    count = units if config.nested else rng.randint(0, cap)
    if kind == "recover":
        W, t = rng.randint(1, 9), rng.randint(0, 12)
        watermark = [max(0, t - (W if config.nested else rng.randint(0, W))) for _ in range(3)]
        selected = [config.nested or rng.random() < 0.5 for _ in range(3)]
        case = make_recover(B, W, D, 3, 5, 13, t, watermark, selected, bias, dtype, device, spare=1)
        if config.nested:
            case["w"].nan_to_num_(0.5)
        op = over_packed(PACKED_TRITON.recover_kv, case, config, exactly=True)
        return check_recover(op, case, *recover_rounded_of("triton", dtype))
    if kind == "up":
        case = make_up(B, D, units, count, group, bias, bias, dtype, device, cap=cap)
        rows = rng.choice((1, 2, 4))
        given = rng.choice((None, on_their_way(tiny(B, rows, 64, 3), rng.randint(1, rows))))
        op = over_packed(partial(packed_up_proj, config=given, ahead=rng.random() < 0.5), case, config, exactly=True)
        return check_up(op, case, *rounded_of("triton", dtype, B, UP_HALF))
    if kind == "qkv":
        case = make_qkv(B, D, units, rng.choice((2, 4, 5)), min(count, 4), dtype, device, bias=bias, cap=cap)
        if config.nested:
            case["w"].nan_to_num_(0.5)
        rows = rng.choice((2, 4))
        given = rng.choice((None, on_their_way(tiny(B, rows, 64, 2), rng.randint(1, rows))))
        op = over_packed(partial(packed_qkv, config=given), case, config, exactly=True)
        return check_qkv(op, case, *rounded_of("triton", dtype, B, UP_HALF))
    skip = not config.nested and rng.random() < 0.5
    case = make_down(B, D, 4 * units, count, group, skip, dtype, device, cap=4 * units if config.nested else cap)
    if config.nested:
        case["w"].nan_to_num_(0.5)
    given = on_their_way(tiny(B, rng.choice((8, 16)), 64, 9)._replace(wide=rng.choice((1, 2))), rng.randint(1, 3))
    given = rng.choice((None, given))
    op = over_packed(partial(packed_down_proj, config=given), case, config, exactly=True)
    return check_down(op, case, *rounded_of("triton", dtype, B))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("config", [NF4, FP4, NESTED], ids=str)
@pytest.mark.parametrize("rows, columns", [((0, 10), (0, 384)), ((3, 4), (128, 256)), ((10, 10), (0, 128))], ids=str)
def test_a_tile_has_the_bits_of_bitsandbytes(rows, columns, config, dtype, device, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(packed_rows, "_BLOCK", 128)
    weight = randn(2, 5, 384, dtype=dtype, device=device)
    w, tile = pack(weight, config), (slice(*rows), slice(*columns))
    expected = decoded(weight, config).flatten(0, 1)[tile]
    assert torch.equal(packed_rows.packed_tile_ref(w, *tile), expected)
    if torch.cuda.is_available() or dtype != torch.bfloat16:  # the interpreter does not round to bf16 but cuts off
        assert torch.equal(packed_rows.packed_tile(w, *tile), expected)


def test_a_weight_in_16_bits_is_left_to_torch(device):
    w, x = torch.randn(2, 3, 8, device=device), torch.randn(4, 8, device=device)
    assert torch.equal(linear(x, w), torch.nn.functional.linear(x, w.flatten(0, 1)))
    assert torch.equal(times(x, w[0].T), x @ w[0].T) and as_tensor(w) is w


def test_other_operations_are_those_of_16_bits(device):
    replaced = {"gather_down_proj", "gather_qkv", "gather_up_proj", "recover_kv"}
    packed, plain = packed_ops_for(device)._asdict(), ops_for(device)._asdict()
    assert {name for name in plain if packed[name] is not plain[name]} == replaced
    with pytest.raises(ValueError, match="meta"):
        packed_ops_for("meta")
