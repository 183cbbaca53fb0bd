"""The engine's outside: requests in, outputs out, in this process or from another."""
