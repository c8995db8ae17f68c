"""Inputs, fp64 truths and checks that the kernel tests share.

Everything an operation must not read holds NaN. An operation under test is the kernel or its torch reference; both
are held to the truth, not to each other.
"""

import copy
from collections.abc import Callable

import torch

from dejavu_ds.kernels.ops import TORCH, TRITON

NAN = float("nan")
BEYOND = {-1: NAN, -(2**31): float("inf"), 2**30: NAN, 2**31 - 1: 1.0}
"""What may stand in a slot beyond the count, no unit's number, and in h there."""
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
IMPLEMENTATIONS = {"triton": TRITON, "torch": TORCH}


def assert_exact(
    out: torch.Tensor, exact: torch.Tensor, terms: torch.Tensor, rounded_once: bool, of_terms: float = 0.0
) -> None:
    """Compare with the fp64 truth element by element; `terms` is the sum of the magnitudes that were added up.

    A kernel computes in fp32 and rounds its result once. Torch may round to the dtype in between, so its error is
    relative to the terms, and so is what else is rounded, by `of_terms`. The last summand covers the subnormals of
    fp16.
    """
    assert out.shape == exact.shape, f"shape {tuple(out.shape)}, expected {tuple(exact.shape)}"
    assert torch.isfinite(out).all(), "NaN or infinity in the output"
    eps = torch.finfo(out.dtype).eps
    bound = eps * exact.abs() + 8 * torch.finfo(torch.float32).eps * terms if rounded_once else 4 * eps * terms
    excess = (out.double() - exact).abs() - bound - of_terms * terms - torch.finfo(out.dtype).smallest_normal
    assert (excess <= 0).all(), f"error beyond its bound by {excess.max().item():.2e}"


def assert_same_bits(a: torch.Tensor, b: torch.Tensor) -> None:
    """Equal including NaN: what an operation must leave alone."""
    assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def scalar(value: int, device: str) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int32, device=device)


def randn(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.randn(*shape).to(device, dtype)


def pick(units: int, cap: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A capacity of `cap` slots whose first `count` hold distinct units in random order; the set as a mask, too."""
    order = torch.randperm(units)
    kept = torch.zeros(units, dtype=torch.bool)
    kept[order[:count]] = True
    # Slots beyond the count point nowhere, or to a unit that holds NaN, where there is one.
    beyond = torch.tensor([*BEYOND, int(order[-1])])[torch.randint(0, len(BEYOND) + 1, (cap - count,))]
    return torch.cat([order[:count], beyond]).int(), kept


def rows_of(idx: torch.Tensor, count: int, group: int) -> torch.Tensor:
    return torch.cat([torch.arange(group) + int(unit) * group for unit in idx[:count]] or [torch.empty(0)]).long()


def check_beyond(op: Callable, case: dict, kept: Callable) -> None:
    """What stands in the slots beyond the count has no effect on the bits of the results that `kept` picks."""
    count, group = int(case["count"]), case.get("group", 1)
    clean = copy.deepcopy(case)
    clean["idx"][count:] = 0
    if "h" in case:
        clean["h"][:, count * group :] = 0.0
    expected = kept(op(**clean))
    for unit, value in BEYOND.items():
        other = copy.deepcopy(case)
        other["idx"][count:] = unit
        if "h" in case:
            other["h"][:, count * group :] = value
        assert_same_bits(kept(op(**other)), expected)


def make_up(B, D, units, count, group, bias, relu, dtype, device, cap=None):
    idx, kept = pick(units, cap or units, count)
    unread = ~kept.repeat_interleave(group)
    w, b = torch.randn(units * group, D) / D**0.5, torch.randn(units * group)
    w[unread], b[unread] = NAN, NAN
    return {
        "x": randn(B, D, dtype=dtype, device=device),
        "w": w.to(device, dtype),
        "b": b.to(device, dtype) if bias else None,
        "idx": idx.to(device),
        "count": scalar(count, device),
        "group": group,
        "relu": relu,
    }


def check_up(op: Callable, case: dict, rounded_once: bool, of_terms: float = 0.0) -> None:
    count, group = int(case["count"]), case["group"]
    rows = rows_of(case["idx"].cpu(), count, group).to(case["x"].device)
    x, w = case["x"].double(), case["w"][rows].double()
    exact, terms = x @ w.T, x.abs() @ w.abs().T
    if case["b"] is not None:
        b = case["b"][rows].double()
        exact, terms = exact + b, terms + b.abs()
    if case["relu"]:
        exact = exact.clamp(min=0)
    y, again = op(**case), op(**case)
    assert y.shape == (x.shape[0], case["idx"].numel() * group) and y.dtype == case["x"].dtype
    assert_exact(y[:, : count * group], exact, terms, rounded_once, of_terms)
    assert_same_bits(y[:, : count * group], again[:, : count * group])


def make_down(B, D, units, count, group, skip_zeros, dtype, device, cap=None):
    idx, kept = pick(units, cap or units, count)
    w = torch.randn(units * group, D)
    w[~kept.repeat_interleave(group)] = NAN
    h = torch.randn(B, idx.numel() * group)
    if skip_zeros:
        h[torch.rand(h.shape) < 0.3] = 0.0
        zero = torch.rand(count * group) < 0.4
        h[:, : count * group][:, zero] = 0.0
        never_live = (h[:, : count * group] == 0).all(dim=0)
        if B < 5:
            w[rows_of(idx, count, group)[never_live]] = float("inf")
    h[:, count * group :] = NAN
    return {
        "h": h.to(device, dtype),
        "w": w.to(device, dtype),
        "idx": idx.to(device),
        "count": scalar(count, device),
        "group": group,
        "skip_zeros": skip_zeros,
    }


def check_down(op: Callable, case: dict, rounded_once: bool, of_terms: float = 0.0) -> None:
    count, group = int(case["count"]), case["group"]
    rows = rows_of(case["idx"].cpu(), count, group).to(case["h"].device)
    h, w = case["h"][:, : count * group].double(), case["w"][rows].double()
    if case["skip_zeros"]:
        w[(h == 0).all(dim=0)] = 0.0
    y, again = op(**case), op(**case)
    assert y.dim() == 3 and y.dtype == torch.float32
    # Torch has rounded to the dtype on the way.
    total = y.sum(0) if rounded_once else y.sum(0).to(case["h"].dtype)
    assert_exact(total, h @ w, h.abs() @ w.abs(), rounded_once, of_terms)
    assert_same_bits(y, again)


def make_attention(B, H, T, t, head_dim, count, dtype, device, cap=None, holes=0.3, window=0):
    """With a window, heads may be skipped: each has a watermark, on both sides of where it is overdue."""
    head_idx, kept = pick(H, cap or H, count)
    q = torch.randn(B, head_idx.numel(), head_dim)
    q[:, count:] = NAN
    key_mask = torch.rand(B, T) >= holes
    caches = torch.randn(2, B, H, T, head_dim)
    hidden = ~key_mask
    hidden[:, t] = False  # the new token is attended whatever the mask says
    caches.masked_fill_(hidden[None, :, None, :, None], NAN)
    caches[:, :, ~kept] = NAN
    caches[:, :, :, t + 1 :] = NAN
    k_cache, v_cache = caches.to(device, dtype)
    watermark = t - torch.randint(0, window + 2, (H,), dtype=torch.int32)
    return {
        "q": q.to(device, dtype),
        "k_cache": k_cache.contiguous(),
        "v_cache": v_cache.contiguous(),
        "head_idx": head_idx.to(device),
        "count": scalar(count, device),
        "position": scalar(t, device),
        "key_mask": key_mask.to(device),
        "scale": head_dim**-0.5,
        "mask": kept.to(device),
        "watermark": watermark.to(device) if window else None,
        "window": window,
        "recovered_total": torch.full((1,), 2**40, device=device) if window else None,
        "tickets": torch.zeros(2 * B * head_idx.numel(), dtype=torch.int32, device=device),
    }


def attention_truth(case: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale * q @ K.T) @ V in fp64, and the terms of its error bound, each [B, count, head_dim]."""
    count, t = int(case["count"]), int(case["position"])
    heads = case["head_idx"][:count].long()
    q = case["q"][:, :count].double()
    k, v = (case[name][:, heads, : t + 1].double() for name in ("k_cache", "v_cache"))
    attended = case["key_mask"][:, : t + 1].clone()
    attended[:, t] = True
    k = torch.where(attended[:, None, :, None], k, 0.0)
    v = torch.where(attended[:, None, :, None], v, 0.0)
    score = case["scale"] * (k @ q[..., None]).squeeze(-1)
    p = torch.where(attended[:, None], score, -torch.inf).softmax(dim=-1)
    # An error in a score is a relative error of its weight.
    largest = case["scale"] * (k.abs() @ q.abs()[..., None]).squeeze(-1).amax(dim=-1)
    terms = (1 + largest[..., None]) * (p[:, :, None] @ v.abs()).squeeze(2)
    return (p[:, :, None] @ v).squeeze(2), terms


def check_attention(op: Callable, case: dict, rounded_once: bool) -> None:
    count = int(case["count"])
    exact, terms = attention_truth(case)
    first, second = copy.deepcopy(case), copy.deepcopy(case) | {"tickets": None}
    out, again = op(**first), op(**second)
    assert not first["tickets"].any()
    check_watermark(case, first)
    check_watermark(case, second)
    assert out.shape == case["q"].shape and out.dtype == case["q"].dtype
    assert_exact(out[:, :count], exact, terms, rounded_once)
    assert_same_bits(out[:, :count], again[:, :count])
    for name in ("k_cache", "v_cache"):
        assert_same_bits(first[name], case[name])


def check_watermark(before: dict, after: dict) -> None:
    """What the step at t leaves in `watermark` and `recovered_total`, in plain Python."""
    if before["watermark"] is None:
        return
    t, window, recovered, moved = int(before["position"]), before["window"], 0, []
    for start, kept in zip(before["watermark"].tolist(), before["mask"].tolist(), strict=True):
        overdue = t - start >= window
        recovered += overdue and not kept
        moved.append(t + 1 if kept or overdue else start)
    assert after["watermark"].tolist() == moved
    if before["recovered_total"] is not None:
        assert after["recovered_total"].item() == before["recovered_total"].item() + recovered


def make_recover(B, W, D, H, head_dim, T, t, watermark, selected, bias, dtype, device, spare=1):
    """The ring is `spare` positions longer than the window W, one at least."""
    watermark, selected = torch.tensor(watermark, dtype=torch.int32), torch.tensor(selected)
    missing = t - watermark
    due = (selected & (missing > 0)) | (missing >= W)
    R = W + spare
    inputs = torch.full((B, R, D), NAN)
    for head in due.nonzero().flatten().tolist():
        positions = torch.arange(int(watermark[head]), t + 1) % R
        inputs[:, positions] = torch.randn(B, positions.numel(), D)
    w, b = torch.randn(H, 3, head_dim, D) / D**0.5, torch.randn(H, 3, head_dim)
    w[~due], b[~due] = NAN, NAN
    w[:, 0], b[:, 0] = NAN, NAN
    cache = torch.full((B, H, T, head_dim), NAN).to(device, dtype)
    return {
        "inputs": inputs.to(device, dtype),
        "w": w.to(device, dtype),
        "b": b.to(device, dtype) if bias else None,
        "selected": selected.to(device),
        "watermark": watermark.to(device),
        "position": scalar(t, device),
        "k_cache": cache,
        "v_cache": cache.clone(),
        "window": W,
    }


def check_recover(op: Callable, case: dict, rounded_once: bool, of_terms: float = 0.0) -> None:
    W, R, t = case["window"], case["inputs"].shape[1], int(case["position"])
    first, second = copy.deepcopy(case), copy.deepcopy(case)
    assert op(**first) is None
    op(**second)
    assert torch.equal(first["watermark"], case["watermark"])
    for part, name in ((1, "k_cache"), (2, "v_cache")):
        assert_same_bits(first[name], second[name])
        untouched = first[name].clone()
        for head, start in enumerate(case["watermark"].tolist()):
            if t - start < W and not (case["selected"][head] and t > start):
                continue
            positions = torch.arange(start, t + 1, device=untouched.device)
            x, w = case["inputs"][:, positions % R].double(), case["w"][head, part].double()
            exact, terms = x @ w.T, x.abs() @ w.abs().T
            if case["b"] is not None:
                b = case["b"][head, part].double()
                exact, terms = exact + b, terms + b.abs()
            assert_exact(first[name][:, head, start : t + 1], exact, terms, rounded_once, of_terms)
            untouched[:, head, start : t + 1] = case[name][:, head, start : t + 1]
        assert_same_bits(untouched, case[name])


def make_qkv(B, D, H, head_dim, count, dtype, device, bias=True, cap=None, late=(), t=3, T=7):
    """The heads `late` have missed steps before t: what makes their keys and values holds NaN."""
    idx, kept = pick(H, cap or H, count)
    w, b = torch.randn(H, 3, head_dim, D) / D**0.5, torch.randn(H, 3, head_dim)
    w[~kept], b[~kept] = NAN, NAN
    late = list(late)
    w[late, 1:], b[late, 1:] = NAN, NAN
    watermark = torch.full((H,), t, dtype=torch.int32)
    watermark[late] = t - 1 - torch.arange(len(late), dtype=torch.int32)
    caches = [torch.full((B, H, T, head_dim), NAN).to(device, dtype) for _ in range(2)]
    return {
        "x": randn(B, D, dtype=dtype, device=device),
        "w": w.to(device, dtype),
        "b": b.to(device, dtype) if bias else None,
        "idx": idx.to(device),
        "count": scalar(count, device),
        "k_cache": caches[0],
        "v_cache": caches[1],
        "position": scalar(t, device),
        "watermark": watermark.to(device) if late else None,
    }


def check_qkv(op: Callable, case: dict, rounded_once: bool, of_terms: float = 0.0) -> None:
    count, t = int(case["count"]), int(case["position"])
    heads = case["idx"][:count].long()
    first, second = copy.deepcopy(case), copy.deepcopy(case)
    q, again = op(**first), op(**second)
    B, head_dim = case["x"].shape[0], case["w"].shape[2]
    assert q.shape == (B, case["idx"].numel(), head_dim) and q.dtype == case["x"].dtype
    x, w = case["x"].double(), case["w"][heads].double()
    exact, terms = torch.einsum("bd,hprd->bhpr", x, w), torch.einsum("bd,hprd->bhpr", x.abs(), w.abs())
    if case["b"] is not None:
        b = case["b"][heads].double()
        exact, terms = exact + b, terms + b.abs()
    assert_exact(q[:, :count], exact[:, :, 0], terms[:, :, 0], rounded_once, of_terms)
    assert_same_bits(q[:, :count], again[:, :count])
    now = torch.ones_like(heads, dtype=torch.bool) if case["watermark"] is None else case["watermark"][heads] >= t
    for part, name in ((1, "k_cache"), (2, "v_cache")):
        assert_exact(first[name][:, heads[now], t], exact[:, now, part], terms[:, now, part], rounded_once, of_terms)
        assert_same_bits(first[name], second[name])
        untouched = first[name].clone()
        untouched[:, heads[now], t] = case[name][:, heads[now], t]
        assert_same_bits(untouched, case[name])


def make_predict(B, N, r, threshold, live, bias, dtype, device):
    """Multiples of 1/4, small enough that a sum is the same in any order; some lie on the threshold itself."""
    wide = torch.full((B, r + 5), NAN)
    wide[:, 3 : 3 + r] = torch.randint(0, 3, (B, r)).float()
    w2, b2 = torch.randint(-4, 5, (N, r)) / 4, torch.randint(-4, 5, (N,)) / 4
    w2[torch.rand(N) < 0.05] = NAN
    if live is not None:
        wide[~torch.tensor(live)] = NAN
    return {
        "z": wide.to(device, dtype)[:, 3 : 3 + r],
        "w2": w2.to(device, dtype),
        "b2": b2.to(device, dtype) if bias else None,
        "threshold": threshold,
        "live": None if live is None else torch.tensor(live, device=device),
        "idx_out": torch.full((N,), -1, dtype=torch.int32, device=device),
        "count_out": torch.full((1,), -1, dtype=torch.int32, device=device),
        "mask_out": torch.ones(N, dtype=torch.bool, device=device),
        "kept_total": torch.full((1,), 2**40, device=device),
        "tickets": torch.zeros(2, dtype=torch.int32, device=device),
    }


def check_predict(op: Callable, case: dict) -> None:
    w2 = case["w2"].double()
    if case.get("scale") is not None:
        w2 *= case["scale"].double()[:, None]
    logits = case["z"].double() @ w2.T
    if case["b2"] is not None:
        logits += case["b2"].double()
    logits = logits.tolist()
    live = [True] * len(logits) if case["live"] is None else case["live"].tolist()
    rows = [row for row, alive in zip(logits, live, strict=True) if alive]
    kept = [n for n in range(case["w2"].shape[0]) if any(row[n] > case["threshold"] for row in rows)]
    for changed in ({}, {"tickets": None}, {"kept_total": None}):
        before = case["kept_total"].item()
        assert op(**(case | changed)) is None
        assert case["count_out"].item() == len(kept)
        assert case["idx_out"][: len(kept)].tolist() == kept
        assert case["mask_out"].nonzero().flatten().tolist() == kept
        assert case["kept_total"].item() - before == (0 if "kept_total" in changed else len(kept))
        assert not case["tickets"].any()
