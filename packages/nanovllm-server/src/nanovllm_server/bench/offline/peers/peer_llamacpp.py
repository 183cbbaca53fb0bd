"""Measures llama.cpp on the CPU, through llama-cpp-python.

All requests of a batch share one context, and each request is a sequence. The first `llama_decode` computes all
prompts. Each further call computes one token per sequence, also after an end-of-sequence token.
"""

import ctypes
import hashlib
import os
import sys
import time
from collections.abc import Callable, Sequence
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
# llama.cpp rounds the cache of each sequence up to a multiple of this number of tokens.
CACHE_GRANULARITY = 256

Requests = Sequence[dict[str, Any]]
# Takes a context, and the rows of the context's last batch that have logits. Returns the next token of each row.
ChooseTokens = Callable[[Any, list[int]], list[int]]


class LlamaCppPeer:
    """A model of llama.cpp, and a context for the current case (a list of requests to measure)."""

    can_time_first_tokens = True

    def __init__(self, job: dict[str, Any]):
        llama_cpp.llama_backend_init()
        gguf = job["gguf"]
        self._num_threads: int = job["threads"]
        file = _convert(Path(gguf["source"]), gguf["file_type"], Path(gguf["cache_directory"]), self._num_threads)
        self._model = llama_cpp.llama_model_load_from_file(os.fsencode(file), llama_cpp.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp can't load {file}")
        self.version = f"{llama_cpp.__version__} {gguf['file_type']}"
        max_sequences: int = llama_cpp.llama_max_parallel_sequences()
        self.max_batch_size = min(job["max_num_seqs"] or max_sequences, max_sequences)
        self._choose_tokens = _make_token_chooser(self._model, job["temperature"])
        self._context: Any = None

    def start_case(self, request_batches: Sequence[Requests]) -> None:
        """Creates a context that is large enough for each batch, and frees the previous context."""
        if self._context is not None:
            llama_cpp.llama_free(self._context)
        self._context = _create_context(self._model, request_batches, self._num_threads)

    def generate(self, requests: Requests, output_lens: list[int], _salt: str) -> tuple[float, float]:
        """Returns (seconds until all first tokens, seconds until the last token). output_lens: tokens per request."""
        start = time.perf_counter()
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), False)
        batch = llama_cpp.llama_batch_init(sum(len(request["prompt"]) for request in requests), 0, 1)
        try:
            has_logits_by_row = []
            for sequence, request in enumerate(requests):
                for position, token in enumerate(request["prompt"]):
                    is_last = position == len(request["prompt"]) - 1
                    _set_row(batch, len(has_logits_by_row), token, position, sequence, is_last)
                    has_logits_by_row.append(is_last)
            logit_rows = [row for row, has_logits in enumerate(has_logits_by_row) if has_logits]
            tokens = self._decode(batch, logit_rows, len(has_logits_by_row))
            first_tokens_time = time.perf_counter()
            for num_generated in range(1, max(output_lens)):
                running_sequences = [sequence for sequence, length in enumerate(output_lens) if length > num_generated]
                for row, sequence in enumerate(running_sequences):
                    position = len(requests[sequence]["prompt"]) + num_generated - 1
                    _set_row(batch, row, tokens[sequence], position, sequence, True)
                next_tokens = self._decode(batch, list(range(len(running_sequences))), len(running_sequences))
                for sequence, token in zip(running_sequences, next_tokens, strict=True):
                    tokens[sequence] = token
            return first_tokens_time - start, time.perf_counter() - start
        finally:
            llama_cpp.llama_batch_free(batch)

    def _decode(self, batch: Any, logit_rows: list[int], num_rows: int) -> list[int]:
        """Computes the first `num_rows` rows of a batch. Returns the next token of each of the `logit_rows`."""
        batch.n_tokens = num_rows
        status = llama_cpp.llama_decode(self._context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode failed (status {status})")
        return self._choose_tokens(self._context, logit_rows)


def _convert(source: Path, file_type: str, directory: Path, num_threads: int) -> Path:
    """Converts the weights of `source` to `file_type`. Returns the file, which is cached in `directory`."""
    with source.open("rb") as source_file:
        digest = hashlib.file_digest(source_file, "sha256").hexdigest()[:16]
    file = directory / f"{source.stem}-{digest}-{file_type}.gguf"
    if file.exists():
        return file
    directory.mkdir(parents=True, exist_ok=True)
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = FILE_TYPES[file_type]
    options.nthread = num_threads
    options.allow_requantize = True
    partial_file = file.with_suffix(f".{os.getpid()}")
    status = llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(partial_file), ctypes.byref(options))
    if status != 0:
        partial_file.unlink(missing_ok=True)
        raise RuntimeError(f"llama.cpp can't make {file_type} of {source} (status {status})")
    return partial_file.replace(file)


def _create_context(model: Any, request_batches: Sequence[Requests], num_threads: int) -> Any:
    """Creates a context that is large enough for each batch."""
    max_length = max(len(item["prompt"]) + item["max_tokens"] for batch in request_batches for item in batch)
    num_sequences = max(map(len, request_batches))
    options = llama_cpp.llama_context_default_params()
    options.n_seq_max = options.n_outputs_max = num_sequences
    options.n_ctx = num_sequences * -(-max_length // CACHE_GRANULARITY) * CACHE_GRANULARITY
    options.n_batch = max(sum(len(request["prompt"]) for request in batch) for batch in request_batches)
    options.n_threads = options.n_threads_batch = num_threads
    context = llama_cpp.llama_init_from_model(model, options)
    if not context:
        raise RuntimeError(
            f"llama.cpp can't make a context for {num_sequences} sequences of {max_length} tokens: lower --max-num-seqs"
        )
    return context


def _make_token_chooser(model: Any, temperature: float) -> ChooseTokens:
    vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    def choose_likeliest(context: Any, rows: list[int]) -> list[int]:
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(context), shape=(len(rows) * vocab_size,))
        return logits.reshape(len(rows), vocab_size).argmax(axis=1).tolist()

    if temperature == 0:
        # Argmax is faster than llama.cpp's greedy sampler, which creates a struct for each token of the vocabulary.
        return choose_likeliest
    chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
    llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_temp(temperature))
    llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_dist(0))
    return lambda context, rows: [llama_cpp.llama_sampler_sample(chain, context, row) for row in rows]


def _set_row(batch: Any, row: int, token: int, position: int, sequence: int, has_logits: bool) -> None:
    batch.token[row] = token
    batch.pos[row] = position
    batch.n_seq_id[row] = 1
    batch.seq_id[row][0] = sequence
    batch.logits[row] = has_logits
