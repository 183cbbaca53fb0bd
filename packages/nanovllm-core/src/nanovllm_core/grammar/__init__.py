"""Compiles grammars off the event loop, and tracks the state of each output in its grammar."""
