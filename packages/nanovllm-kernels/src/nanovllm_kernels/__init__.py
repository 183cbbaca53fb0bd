"""Operators for LLM inference, as functions on torch tensors.

A subpackage's `__init__.py` has the public functions, `reference.py` the plain torch path, `triton_*.py` CUDA kernels.
"""
