"""Compiles grammars in threads and child processes, and tracks the state of each output in its grammar."""
