"""Processes that tests start find what Python compiled before, even where the environment tells it to keep nothing.

Each of some forty would compile torch and all that imports it, which takes longer than they then take to start.
"""

import os
import sys

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# This process is the first to import most of it.
sys.dont_write_bytecode = False
