"""Caches compiled grammars. A child process first compiles each grammar within limits of time and memory (vetting)."""

import asyncio
import logging
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

from nanovllm_core.errors import GrammarError
from nanovllm_core.grammar.compiler import Compiler, Grammar
from nanovllm_core.grammar.vetting import Vetter
from nanovllm_core.grammar_types import GrammarSpec
from nanovllm_core.model import Vocabulary

_log = logging.getLogger(__name__)

NUM_COMPILE_THREADS = 8
MAX_CACHE_BYTES = 256 << 20
MAX_GRAMMAR_BYTES = 64 << 20
MAX_SOURCE_LENGTH = 1 << 20
_STOPPED_MESSAGE = "the engine was stopped before this grammar was compiled"
# Niceness of compiling threads, so that serving has priority.
_NICE = 5


class Grammars:
    """Caches compiled grammars. Evicts the least recently used grammar first.

    Call all methods on the event loop's thread. read_vocabulary: called once, when the first grammar is compiled.
    """

    def __init__(self, read_vocabulary: Callable[[], Vocabulary], vocab_size: int, eos_token_ids: tuple[int, ...]):
        self._vetting_compiler = _VettingCompiler(read_vocabulary, vocab_size, eos_token_ids)
        self._grammar_by_spec: OrderedDict[GrammarSpec, Grammar] = OrderedDict()
        self._cache_bytes = 0
        self._compilations: dict[GrammarSpec, _Compilation] = {}
        self._pool = ThreadPoolExecutor(NUM_COMPILE_THREADS, "nanovllm-grammar", initializer=_lower_priority)

    @property
    def num_cached(self) -> int:
        """Number of cached grammars."""
        return len(self._grammar_by_spec)

    def get(self, spec: GrammarSpec) -> Grammar | None:
        """The cached grammar; None if the grammar is not cached."""
        grammar = self._grammar_by_spec.get(spec)
        if grammar is not None:
            self._grammar_by_spec.move_to_end(spec)
        return grammar

    async def compile(self, spec: GrammarSpec) -> Grammar:
        """Return the cached grammar or compile it. Concurrent calls share one compilation. Raises GrammarError.

        If all callers are cancelled before a thread begins the compilation, the compilation is dropped.
        """
        grammar = self.get(spec)
        if grammar is not None:
            return grammar
        if len(spec.source) > MAX_SOURCE_LENGTH:
            raise GrammarError(
                f"this grammar has {len(spec.source)} characters, but may have at most {MAX_SOURCE_LENGTH}"
            )
        compilation = self._compilations.get(spec) or self._start(spec)
        compilation.num_callers += 1
        try:
            # `wait` does not cancel the task if this caller is cancelled. Other callers may wait for the same task.
            await asyncio.wait((compilation.task,))
        finally:
            compilation.num_callers -= 1
            # A compilation that has begun goes on, so that a client that tries again finds its result.
            if not compilation.num_callers and compilation.future.cancel():
                self._forget(spec, compilation)
        if compilation.task.cancelled():
            raise GrammarError(_STOPPED_MESSAGE)
        return compilation.task.result()

    def close(self) -> None:
        """Cancel compilations and end the vetting process."""
        for compilation in tuple(self._compilations.values()):
            compilation.task.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)
        threading.Thread(target=self._vetting_compiler.close).start()

    def _start(self, spec: GrammarSpec) -> "_Compilation":
        try:
            future = self._pool.submit(self._vetting_compiler.compile, spec)
        except RuntimeError as error:  # after `close`, or without memory for a thread
            raise GrammarError(f"grammars can't be compiled now: {error}") from error
        compilation = _Compilation(future, asyncio.create_task(self._wait_for_grammar(future)))
        compilation.task.add_done_callback(lambda _: self._cache_result(spec, compilation))
        self._compilations[spec] = compilation
        return compilation

    async def _wait_for_grammar(self, future: "Future[Grammar]") -> Grammar:
        try:
            grammar = await asyncio.wrap_future(future)
        except GrammarError:
            raise
        # Another error, for example while reading the vocabulary: report it to the callers and in the log.
        except Exception as error:
            _log.exception("a grammar could not be compiled")
            raise GrammarError(f"grammars can't be compiled now: {type(error).__name__}: {error}") from error
        if grammar.num_bytes > MAX_GRAMMAR_BYTES:
            raise GrammarError(
                f"this grammar takes {grammar.num_bytes >> 20} MiB when compiled, but may take at most "
                f"{MAX_GRAMMAR_BYTES >> 20}: make it smaller, or its repetitions shorter"
            )
        return grammar

    def _forget(self, spec: GrammarSpec, compilation: "_Compilation") -> None:
        # The task of a cancelled compilation ends after `cancel` returns. Meanwhile, a new caller may have started
        # another compilation of the same grammar.
        if self._compilations.get(spec) is compilation:
            del self._compilations[spec]

    def _cache_result(self, spec: GrammarSpec, compilation: "_Compilation") -> None:
        self._forget(spec, compilation)
        task = compilation.task
        # Without a call of `exception`, asyncio logs that the exception was never retrieved.
        if task.cancelled() or task.exception() is not None:
            return
        self._grammar_by_spec[spec] = grammar = task.result()
        self._cache_bytes += grammar.num_bytes + len(spec.source)
        while self._cache_bytes > MAX_CACHE_BYTES and len(self._grammar_by_spec) > 1:
            evicted_spec, evicted_grammar = self._grammar_by_spec.popitem(last=False)
            self._cache_bytes -= evicted_grammar.num_bytes + len(evicted_spec.source)


@dataclass(slots=True)
class _Compilation:
    """An unfinished compilation. future: the compilation in the thread pool. task: waits for the future."""

    future: Future[Grammar]
    task: asyncio.Task[Grammar]
    num_callers: int = 0


class _VettingCompiler:
    """Vets and compiles grammars. Starts the vetter and the compiler on first use. Any thread may call the methods."""

    def __init__(self, read_vocabulary: Callable[[], Vocabulary], vocab_size: int, eos_token_ids: tuple[int, ...]):
        self._read_vocabulary = read_vocabulary
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._lock = threading.Lock()

    def compile(self, spec: GrammarSpec) -> Grammar:
        """Vet and compile a grammar. Raises GrammarError."""
        with self._lock:
            # The first read of `_vetter` starts its process, which imports torch while the compiler warms up.
            vetter, compiler = self._vetter, self._compiler
            compiler.warm_up()
        vetted_grammar = vetter.vet(spec)
        return compiler.compile(vetted_grammar.spec, vetted_grammar.parameter_types, vetted_grammar.rules)

    def close(self) -> None:
        """End the vetter's process."""
        with self._lock:
            if "_vetter" in vars(self):
                self._vetter.close()

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        vocabulary = self._read_vocabulary()
        tokens, end_ids = vocabulary
        if len(tokens) > self._vocab_size:
            vocabulary = Vocabulary(tokens[: self._vocab_size], end_ids)
        if not end_ids or not set(end_ids) <= set(self._eos_token_ids):
            raise GrammarError(
                f"the end_ids of the model's vocabulary are {sorted(end_ids)}, but must be some of its end-of-sequence "
                f"tokens {sorted(self._eos_token_ids)}"
            )
        return vocabulary

    @cached_property
    def _vetter(self) -> Vetter:
        vetter = Vetter(lambda: self._vocabulary, self._vocab_size)
        vetter.start()
        return vetter

    @cached_property
    def _compiler(self) -> Compiler:
        return Compiler(self._vocabulary.tokens, self._vocabulary.end_ids, self._vocab_size)


def _lower_priority() -> None:
    if sys.platform == "linux":
        # Other systems have one niceness for the whole process.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
