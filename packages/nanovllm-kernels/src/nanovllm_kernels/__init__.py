"""Operators for LLM inference: tensors in, tensors out.

Each subpackage is a family of operators: `__init__.py` has the public functions, `reference.py` the plain torch that is
both the reference for tests and the CPU path, `triton_*.py` the CUDA kernels. Importing imports no kernel language.
"""
