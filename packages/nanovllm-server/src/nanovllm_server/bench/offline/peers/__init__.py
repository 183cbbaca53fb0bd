"""Modules that run other engines. `run.py` starts one of them in the interpreter that has the engine."""
