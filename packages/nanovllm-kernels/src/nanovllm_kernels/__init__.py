"""Operators for LLM inference, as functions on torch tensors.

A subpackage's `__init__.py` has the public functions, `*_reference.py` plain torch, `triton_*.py` CUDA kernels.
"""
