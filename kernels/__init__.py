"""Triton kernels of the sparse decode path, each beside its torch reference.

This folder is the package `dejavu_ds.kernels`. A top-level package called `kernels` exists on PyPI and
transformers probes for it by name, so this file stays free of `__version__` and of imports.
"""
