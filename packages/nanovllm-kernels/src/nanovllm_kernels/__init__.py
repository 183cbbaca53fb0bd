"""Operators for LLM inference, as functions on torch tensors.

A subpackage has its public functions in `__init__.py`, plain torch in `*_reference.py`, CUDA kernels in `triton_*.py`,
`gluon_*.py` and `cute_*.py`, and CPU kernels in `numba_*.py`.
"""
