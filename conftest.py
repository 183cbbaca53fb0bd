"""Environment of all processes of a test run: pytest's own process and those that tests start.

Python's bytecode is always kept: otherwise each of about forty processes would compile torch again.

Each process computes with one thread unless the environment sets another number. The models are so small that a second
thread gains little, and it would wait at every operator, because other processes run beside most tests.
"""

import os
import sys

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# This process imports most modules first, so it must write their bytecode too.
sys.dont_write_bytecode = False
# torch reads this variable on its first import. No pytest plugin imports torch before this line.
os.environ.setdefault("OMP_NUM_THREADS", "1")
