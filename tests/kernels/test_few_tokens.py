"""Products of a few tokens on a CPU, against fp64."""

import warnings

import pytest
import torch

from dejavu_ds.kernels import few_tokens

SHAPES = [(1, 1), (2, 5), (7, 64), (64, 33), (401, 48)]


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def randn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def close(found, exact, terms, n):
    # An fp32 sum of n terms in any order is off by at most n roundings of what the terms amount to.
    assert found.shape == exact.shape and found.dtype == torch.float32
    assert ((found.double() - exact).abs() <= n * 2**-24 * terms + 1e-30).all()


@pytest.mark.parametrize("N, D", SHAPES)
@pytest.mark.parametrize("leading", [(1,), (2,), (3,), (1, 1), (1, 2), (0,)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_linear(N, D, leading, bias, threads):
    x, w, b = randn(*leading, D), randn(N, D), randn(N) if bias else None
    exact = x.double() @ w.double().T + (0 if b is None else b.double())
    terms = x.double().abs() @ w.double().abs().T + (0 if b is None else b.double().abs())
    close(few_tokens.linear(x, w, b), exact, terms, D + 1)
    # A shard of columns, as of a tied head, is no contiguous tensor.
    wide = torch.cat((w, w), dim=1)
    close(few_tokens.linear(x, wide[:, :D], b), exact, terms, D + 1)


@pytest.mark.parametrize("N, D", SHAPES)
@pytest.mark.parametrize("leading", [(1,), (2,), (3,), (1, 1), (0,)], ids=str)
def test_times(N, D, leading, threads):
    h, w = randn(*leading, N), randn(N, D)
    close(few_tokens.times(h, w), h.double() @ w.double(), h.double().abs() @ w.double().abs(), N)


@pytest.mark.parametrize("n", [0, 1, 2, 5, 40])
def test_gathered(n, threads):
    x, w = randn(1, 48), randn(40, 48)
    rows = torch.randperm(40, generator=torch.Generator().manual_seed(n))[:n].int()
    picked = w[rows.long()].double()
    close(few_tokens.gathered_linear(x, w, rows), x.double() @ picked.T, x.double().abs() @ picked.abs().T, 48)


def test_what_is_not_gathered_is_not_read():
    """Nor is anything made of what the result's memory held before."""
    x, w = randn(1, 32), torch.full((9, 32), torch.nan)
    w[[2, 5]] = randn(2, 32)
    for _ in range(20):
        torch.full((2,), torch.nan)
        assert few_tokens.gathered_linear(x, w, torch.tensor([5, 2], dtype=torch.int32)).isfinite().all()
    w[5, 3], w[2, 3] = torch.inf, torch.nan
    assert few_tokens.gathered_linear(x, w, torch.tensor([5, 2], dtype=torch.int32)).abs().tolist()[0][0] == torch.inf
    assert few_tokens.gathered_linear(x, w, torch.tensor([5, 2], dtype=torch.int32)).isnan().tolist()[0][1]


def test_which_are_gathered():
    w = randn(4, 8)
    assert few_tokens.can_gather(randn(1, 8), w)
    assert not few_tokens.can_gather(randn(2, 8), w)
    assert not few_tokens.can_gather(randn(1, 8).half(), w.half())
    assert not few_tokens.can_gather(randn(1, 8).to("meta"), w.to("meta"))


def test_nobody_is_told_of_beta_features():
    few_tokens._without_a_warning_of_beta.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        few_tokens.gathered_linear(randn(1, 8), randn(4, 8), torch.tensor([1], dtype=torch.int32))


def test_other_dtypes_and_gradients_are_left_to_torch():
    x, w = randn(1, 8), randn(6, 8)
    assert torch.equal(few_tokens.linear(x.half(), w.half()), torch.nn.functional.linear(x.half(), w.half()))
    assert torch.equal(few_tokens.times(x.half(), w.half().T), x.half() @ w.half().T)
    leaf = x.clone().requires_grad_()
    few_tokens.linear(leaf, w).sum().backward()
    torch.testing.assert_close(leaf.grad, w.sum(0, keepdim=True))
