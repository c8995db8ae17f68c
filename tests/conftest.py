"""Shared fixtures. Without a GPU the kernels run in Triton's interpreter, so CI still checks their logic."""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile("long", deadline=None, max_examples=5000, suppress_health_check=list(HealthCheck))

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # must precede the first `import triton`
    torch.set_num_threads(1)  # the models are tiny: threads would only wait for one another


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def poison_empty(monkeypatch):
    """Fill every torch.empty with NaN, so that an output a kernel forgot to write is seen."""
    real_empty = torch.empty

    def nan_empty(*args, **kwargs):
        out = real_empty(*args, **kwargs)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    monkeypatch.setattr(torch, "empty", nan_empty)


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
