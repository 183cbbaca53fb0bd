"""Runs one peer: `python run.py NAME`, a job as JSON on stdin, lines of JSON on stdout.

Imports nothing but the standard library, as does nothing else beside it until the peer itself is imported: the
interpreter need not have nanovllm.
"""

import importlib
import json
import os
import sys


def main() -> None:
    """Answer one job."""
    job = json.loads(sys.stdin.buffer.read())
    # Peers log to stdout, and so do the processes they start; the answer must stand alone there.
    answer = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    peer = importlib.import_module(f"peer_{sys.argv[1]}")
    for line in peer.measure(job):
        answer.write(json.dumps(line) + "\n")
        answer.flush()


# Peers start processes that import this file again.
if __name__ == "__main__":
    main()
