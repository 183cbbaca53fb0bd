"""Scripts that run other engines. `run.py` runs in the interpreter that has the engine, and imports `peer_*.py`."""
