"""Environment of all processes of a test run, and the same random numbers for each test.

Python's bytecode is always kept: otherwise each of about forty processes would compile torch again.

Each process computes with one thread unless the environment sets another number. The models are so small that a second
thread gains little, and it would wait at every operator, because other processes run beside most tests.
"""

import os
import sys

import pytest

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# This process imports most modules first, so it must write their bytecode too.
sys.dont_write_bytecode = False
# torch reads this variable on its first import. No pytest plugin imports torch before this line.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def seeded_torch() -> None:
    """Seed torch, so that a test has the same random numbers alone and after any other tests."""
    import torch  # After the variable above is set.

    torch.manual_seed(0)
