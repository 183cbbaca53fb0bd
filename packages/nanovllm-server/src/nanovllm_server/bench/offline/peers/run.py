"""Runs one peer: `python run.py NAME`. Reads a job as JSON from stdin and writes lines of JSON to stdout.

Imports only the standard library and the peer's module, because the interpreter need not have nanovllm.
"""

import importlib
import json
import os
import sys


def main() -> None:
    """Runs one job."""
    job = json.loads(sys.stdin.buffer.read())
    # Peers and their processes log to stdout: redirect these logs to stderr, so that stdout has only results.
    results = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    peer = importlib.import_module(f"peer_{sys.argv[1]}")
    for line in peer.measure(job):
        results.write(json.dumps(line) + "\n")
        results.flush()


# Peers start processes that import this file again.
if __name__ == "__main__":
    main()
