"""Operators for LLM inference: tensors in, tensors out.

Each room is a family of operators: its `__init__.py` holds the public functions, `reference.py` the plain torch that is
both their oracle and their CPU path, `triton_*.py` their CUDA kernels. Nothing here knows models, requests or
schedules, and importing it imports no kernel language.
"""
