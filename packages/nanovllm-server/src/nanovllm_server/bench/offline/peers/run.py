"""Runs one peer: `python run.py NAME`. Reads a job as JSON from stdin and writes lines of JSON to stdout.

Imports only the standard library and the peer's module, because the interpreter need not have nanovllm.
"""

import importlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

PEER_CLASSES = {"llamacpp": "LlamaCppPeer", "transformers": "TransformersPeer", "vllm": "VllmPeer"}


def main() -> None:
    """Runs one job."""
    job = json.loads(sys.stdin.buffer.read())
    # Peers and their processes log to stdout: redirect these logs to stderr, so that stdout has only results.
    results = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    name = sys.argv[1]
    peer_class = getattr(importlib.import_module(f"peer_{name}"), PEER_CLASSES[name])
    for line in measure(peer_class(job), job):
        results.write(json.dumps(line) + "\n")
        results.flush()


def measure(peer: Any, job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the peer's version, then the result of each run. A case is a list of requests, measured `repeat` times.

    If the peer's `max_batch_size` is None, one batch has all requests of a case.
    """
    yield {"version": peer.version}
    for case_index, requests in enumerate(job["cases"]):
        batch_size = peer.max_batch_size or len(requests)
        batches = [requests[start : start + batch_size] for start in range(0, len(requests), batch_size)]
        peer.start_case(batches)
        _run(peer, batches, job["warm_up_tokens"], f"{case_index} warm-up")
        for repetition in range(job["repeat"]):
            salt = f"{case_index} {repetition}"
            one_token_run_s = None
            if job["needs_time_to_all_first_tokens"] and not peer.can_time_first_tokens:
                _, _, one_token_run_s = _run(peer, batches, 1, f"{salt} first")
            num_tokens, first_tokens_s, last_token_s = _run(peer, batches, None, salt)
            all_first_tokens_s = first_tokens_s if peer.can_time_first_tokens else one_token_run_s
            yield {"num_tokens": num_tokens, "all_first_tokens_s": all_first_tokens_s, "last_token_s": last_token_s}


def _run(peer: Any, batches: list[list[dict[str, Any]]], max_tokens: int | None, salt: str) -> tuple[int, float, float]:
    """Returns (output tokens, seconds to the first tokens, seconds to the last tokens), each summed over batches.

    max_tokens: additional limit of output tokens per request; None if only the request's own limit applies.
    salt: only runs with the same salt share cached prefixes.
    """
    output_lens = [[min(item["max_tokens"], max_tokens or item["max_tokens"]) for item in batch] for batch in batches]
    times = [peer.generate(batch, batch_lens, salt) for batch, batch_lens in zip(batches, output_lens, strict=True)]
    return sum(map(sum, output_lens)), sum(first_s for first_s, _ in times), sum(last_s for _, last_s in times)


# Processes that a peer starts may import this file again. They must not run the job.
if __name__ == "__main__":
    main()
