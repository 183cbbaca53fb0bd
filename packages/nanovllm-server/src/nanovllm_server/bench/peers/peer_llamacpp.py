"""Measures llama.cpp on the CPU, through llama-cpp-python. Each request is a sequence of one context.

One call of `llama_decode` computes the prompts of up to `max_num_seqs` requests. Each further call computes one token
of every sequence. No token ends a sequence early.
"""

import ctypes
import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

try:
    import llama_cpp  # pyright: ignore[reportMissingImports] (not installed here)
    import numpy as np
except ModuleNotFoundError as error:
    if error.name not in ("llama_cpp", "numpy"):
        raise
    sys.exit(
        f"{error.name} is not installed for {sys.executable}: install llama-cpp-python==0.3.36 into an environment "
        "of its own, and name its interpreter with --peer-python"
    )

FILE_TYPES = {
    "F32": llama_cpp.LLAMA_FTYPE_ALL_F32,
    "F16": llama_cpp.LLAMA_FTYPE_MOSTLY_F16,
    "BF16": llama_cpp.LLAMA_FTYPE_MOSTLY_BF16,
    "Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
}
# llama.cpp rounds the cache of each sequence up to a multiple of so many tokens.
CONTEXT_STEP = 256

Works = Sequence[dict[str, Any]]
# Arguments: a context and the rows of its last batch that have logits. Returns the next token of each row.
Choose = Callable[[Any, list[int]], list[int]]


def measure(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the version, then the result of each run."""
    llama_cpp.llama_backend_init()
    gguf = job["gguf"]
    file = _converted(Path(gguf["source"]), gguf["weights"], Path(gguf["directory"]), job["threads"])
    model = llama_cpp.llama_model_load_from_file(os.fsencode(file), llama_cpp.llama_model_default_params())
    if not model:
        raise RuntimeError(f"llama.cpp can't load {file}")
    choose = _choice(model, job["temperature"])
    yield {"version": f"{llama_cpp.__version__} {gguf['weights']}"}
    for works in job["cases"]:
        size = min(job["max_num_seqs"] or len(works), llama_cpp.llama_max_parallel_sequences())
        batches = [works[start : start + size] for start in range(0, len(works), size)]
        context = _context(model, batches, job["threads"])
        for batch in batches:
            _generate(context, batch, choose, job["warm_up_tokens"])
        for _ in range(job["repeat"]):
            start = time.perf_counter()
            times = [_generate(context, batch, choose, None) for batch in batches]
            last = times[-1][1] - start
            # The time of the prompts of all batches, like a separate run for one token per request.
            first = last - sum(end - begin for begin, end in times)
            yield {"num_tokens": sum(work["max_tokens"] for work in works), "first": first, "last": last}
        llama_cpp.llama_free(context)


def _converted(source: Path, weights: str, directory: Path, threads: int) -> Path:
    """Converts `source` to the file type `weights`. Returns the file, which is cached in `directory`."""
    with source.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()[:16]
    file = directory / f"{source.stem}-{digest}-{weights}.gguf"
    if file.exists():
        return file
    directory.mkdir(parents=True, exist_ok=True)
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = FILE_TYPES[weights]
    options.nthread = threads
    options.allow_requantize = True
    made = file.with_suffix(f".{os.getpid()}")
    status = llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(made), ctypes.byref(options))
    if status != 0:
        made.unlink(missing_ok=True)
        raise RuntimeError(f"llama.cpp can't make {weights} of {source} (status {status})")
    return made.replace(file)


def _context(model: Any, batches: Sequence[Works], threads: int) -> Any:
    """Creates a context that is large enough for each batch."""
    longest = max(len(work["prompt"]) + work["max_tokens"] for works in batches for work in works)
    num_sequences = max(map(len, batches))
    options = llama_cpp.llama_context_default_params()
    options.n_seq_max = options.n_outputs_max = num_sequences
    options.n_ctx = num_sequences * -(-longest // CONTEXT_STEP) * CONTEXT_STEP
    options.n_batch = max(sum(len(work["prompt"]) for work in works) for works in batches)
    options.n_threads = options.n_threads_batch = threads
    context = llama_cpp.llama_init_from_model(model, options)
    if not context:
        raise RuntimeError(
            f"llama.cpp can't make a context for {num_sequences} sequences of {longest} tokens: lower --max-num-seqs"
        )
    return context


def _choice(model: Any, temperature: float) -> Choose:
    vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    def likeliest(context: Any, rows: list[int]) -> list[int]:
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(context), shape=(len(rows) * vocab_size,))
        return logits.reshape(len(rows), vocab_size).argmax(axis=1).tolist()

    if temperature == 0:
        # Faster than llama.cpp's greedy sampler, which creates a struct for each token of the vocabulary.
        return likeliest
    chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
    llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_temp(temperature))
    llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_dist(0))
    return lambda context, rows: [llama_cpp.llama_sampler_sample(chain, context, row) for row in rows]


def _generate(context: Any, works: Works, choose: Choose, at_most: int | None) -> tuple[float, float]:
    """Returns the times of the first tokens and of the last token. at_most: most tokens per request, or None."""
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), False)
    batch = llama_cpp.llama_batch_init(sum(len(work["prompt"]) for work in works), 0, 1)
    limits = [min(work["max_tokens"], at_most or work["max_tokens"]) for work in works]
    try:
        rows = []
        for sequence, work in enumerate(works):
            for position, token in enumerate(work["prompt"]):
                _add(batch, len(rows), token, position, sequence)
                rows.append(position == len(work["prompt"]) - 1)
                batch.logits[len(rows) - 1] = rows[-1]
        tokens = _decode(context, batch, [row for row, is_last in enumerate(rows) if is_last], len(rows), choose)
        first = time.perf_counter()
        for made in range(1, max(limits)):
            running = [sequence for sequence, limit in enumerate(limits) if limit > made]
            for row, sequence in enumerate(running):
                _add(batch, row, tokens[sequence], len(works[sequence]["prompt"]) + made - 1, sequence)
                batch.logits[row] = True
            chosen = _decode(context, batch, list(range(len(running))), len(running), choose)
            for sequence, token in zip(running, chosen, strict=True):
                tokens[sequence] = token
        return first, time.perf_counter()
    finally:
        llama_cpp.llama_batch_free(batch)


def _add(batch: Any, row: int, token: int, position: int, sequence: int) -> None:
    batch.token[row] = token
    batch.pos[row] = position
    batch.n_seq_id[row] = 1
    batch.seq_id[row][0] = sequence


def _decode(context: Any, batch: Any, rows: list[int], num_tokens: int, choose: Choose) -> list[int]:
    """Computes a batch, and returns the next token of each of its `rows`."""
    batch.n_tokens = num_tokens
    status = llama_cpp.llama_decode(context, batch)
    if status != 0:
        raise RuntimeError(f"llama_decode failed (status {status})")
    return choose(context, rows)
