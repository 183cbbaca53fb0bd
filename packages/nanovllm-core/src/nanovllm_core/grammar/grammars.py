"""The grammars that are ready, and those on their way: compiled once each, on threads, after `vetting` has passed them.

All methods belong to the event loop's thread. This room must not know requests.
"""

import asyncio
import logging
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

from nanovllm_core.grammar.compiler import Compiler, Grammar
from nanovllm_core.grammar.vetting import Vetter
from nanovllm_core.model import Vocabulary
from nanovllm_core.request import GrammarError, GrammarSpec

_log = logging.getLogger(__name__)

# At once: each has a process of its own, so that few slow ones don't hold up a quick one.
NUM_COMPILING = 8
# Of all that are kept, and of one.
MAX_KEPT_BYTES = 256 << 20
MAX_BYTES = 64 << 20
# Characters that one may be written in.
MAX_SOURCE = 1 << 20
_STOPPED = "the engine was stopped before this grammar was compiled"
# Compiling gives way to serving.
_NICE = 5


class Grammars:
    """A cache of compiled grammars, the least recently used given up first."""

    def __init__(self, vocabulary: Callable[[], Vocabulary], vocab_size: int, eos_token_ids: tuple[int, ...]):
        self._tools = _Tools(vocabulary, vocab_size, eos_token_ids)
        self._kept: OrderedDict[GrammarSpec, Grammar] = OrderedDict()
        self._kept_bytes = 0
        self._compiling: dict[GrammarSpec, asyncio.Task[Grammar]] = {}
        self._pool = ThreadPoolExecutor(NUM_COMPILING, "nanovllm-grammar", initializer=_give_way)

    @property
    def num_kept(self) -> int:
        """Grammars in the cache."""
        return len(self._kept)

    def get(self, spec: GrammarSpec) -> Grammar | None:
        """A grammar that is ready."""
        grammar = self._kept.get(spec)
        if grammar is not None:
            self._kept.move_to_end(spec)
        return grammar

    async def compile(self, spec: GrammarSpec) -> Grammar:
        """A grammar, once it is ready; it is compiled once, whoever else waits for it. Raises GrammarError."""
        grammar = self.get(spec)
        if grammar is not None:
            return grammar
        task = self._compiling.get(spec)
        if task is None:
            self._compiling[spec] = task = asyncio.create_task(self._compile(spec))
            task.add_done_callback(lambda done: self._settle(spec, done))
        # Not awaited itself: whoever gives up doesn't end it for the others.
        await asyncio.wait((task,))
        if task.cancelled():
            raise GrammarError(_STOPPED)
        return task.result()

    def close(self) -> None:
        """Give up what is being compiled."""
        for task in tuple(self._compiling.values()):
            task.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)
        threading.Thread(target=self._tools.close).start()

    async def _compile(self, spec: GrammarSpec) -> Grammar:
        if len(spec.source) > MAX_SOURCE:
            raise GrammarError(
                f"this grammar is written in {len(spec.source)} characters, but may take at most {MAX_SOURCE}"
            )
        try:
            grammar = await asyncio.get_running_loop().run_in_executor(self._pool, self._tools.compile, spec)
        except GrammarError:
            raise
        # No process to be had, no vocabulary to be read: who waits must hear of it, and so must who runs the engine.
        except Exception as error:
            _log.exception("a grammar could not be compiled")
            raise GrammarError(f"grammars can't be compiled now: {type(error).__name__}: {error}") from error
        if grammar.num_bytes > MAX_BYTES:
            raise GrammarError(
                f"this grammar takes {grammar.num_bytes >> 20} MiB when compiled, but may take at most "
                f"{MAX_BYTES >> 20}: make it smaller, or its repetitions shorter"
            )
        return grammar

    def _settle(self, spec: GrammarSpec, done: asyncio.Task[Grammar]) -> None:
        del self._compiling[spec]
        # Asked in any case, as a failure that everyone gave up waiting for is nobody's.
        if done.cancelled() or done.exception() is not None:
            return
        self._kept[spec] = grammar = done.result()
        self._kept_bytes += grammar.num_bytes + len(spec.source)
        while self._kept_bytes > MAX_KEPT_BYTES and len(self._kept) > 1:
            old_spec, old = self._kept.popitem(last=False)
            self._kept_bytes -= old.num_bytes + len(old_spec.source)


class _Tools:
    """Vetter and compiler, made on first use; any thread may call."""

    def __init__(self, vocabulary: Callable[[], Vocabulary], vocab_size: int, eos_token_ids: tuple[int, ...]):
        self._make_vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._lock = threading.Lock()

    def compile(self, spec: GrammarSpec) -> Grammar:
        """Vet and compile. Raises GrammarError."""
        with self._lock:
            # At the first grammar both get ready at the same time. The vetter takes longer: it has torch to import.
            vetter, compiler = self._vetter, self._compiler
            compiler.warm()
        vetter.vet(spec)
        return compiler.compile(spec)

    def close(self) -> None:
        """End the vetter's process, if there is one."""
        with self._lock:
            if "_vetter" in vars(self):
                self._vetter.close()

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        vocabulary = self._make_vocabulary()
        tokens, end_ids = vocabulary
        if len(tokens) > self._vocab_size:
            vocabulary = Vocabulary(tokens[: self._vocab_size], end_ids)
        if not end_ids or not set(end_ids) <= set(self._eos_token_ids):
            raise GrammarError(
                f"the model's vocabulary ends answers with {sorted(end_ids)}, which must be some of its end-of-sequence"
                f" tokens, {sorted(self._eos_token_ids)}"
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


def _give_way() -> None:
    if sys.platform == "linux":
        # There a thread has a niceness of its own.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
