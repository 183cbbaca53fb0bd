"""What every process of a run is told: tests' own, and those that they start.

They find what Python compiled before, even where the environment tells it to keep nothing: each of some forty would
compile torch and all that imports it, which takes longer than they then take to start.

They compute with one thread, unless the environment says otherwise. Models here are so small that a second one gains
little, and as something else runs beside nearly every test, one would wait for the other's turn at every operator.
"""

import os
import sys

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# This process is the first to import most of it.
sys.dont_write_bytecode = False
# Read when torch is first imported, which no plugin does.
os.environ.setdefault("OMP_NUM_THREADS", "1")
