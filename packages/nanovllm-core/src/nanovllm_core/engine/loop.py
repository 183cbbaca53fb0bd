"""The one loop: plan a step, launch it, and take in an older one while it runs.

Scheduling and bookkeeping happen on the event loop's thread; launching, and with it all of torch, on a thread of its
own; waiting for a GPU on a third. A step goes from one to the next, and comes back when the device has ended it. Up to
`depth` steps are in flight; depth 1 is the same loop. This room must not know who sends requests or where outputs go.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from nanovllm_core.cache.manager import CacheManager
from nanovllm_core.cache.state_pool import StatePool
from nanovllm_core.config import ResolvedConfig
from nanovllm_core.engine.status import NO_GRAMMARS, EngineInfo, EngineStats
from nanovllm_core.engine.trace import Trace, Tracer, Track
from nanovllm_core.execution.runner import Runner
from nanovllm_core.execution.sampler import StepHandle
from nanovllm_core.grammar.grammars import Grammars
from nanovllm_core.model import ModelSpec
from nanovllm_core.request import GrammarError, GrammarSpec, Request, RequestStatus, StepOutputs
from nanovllm_core.scheduling.intake import ScheduledStep
from nanovllm_core.scheduling.plan import StepPlan
from nanovllm_core.scheduling.scheduler import Scheduler

Emit = Callable[[StepOutputs, EngineStats], None]


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A step, and the future of its handle, which is there when the device has ended it."""

    step: ScheduledStep
    handle: asyncio.Future[StepHandle]


class EngineLoop:
    """Scheduler and runner, and the task that drives them."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        info: EngineInfo,
        depth: int,
        launcher: ThreadPoolExecutor,
        tracer: Tracer | None,
        grammars: Grammars | None,
    ):
        self.info = info
        self._grammars = grammars
        # Requests whose grammar isn't ready, by key.
        self._compiling: dict[int, asyncio.Task[None]] = {}
        self._failures: list[tuple[int, str]] = []
        self._scheduler = scheduler
        self._runner = runner
        self._depth = depth
        self._launcher = launcher
        self._tracer = tracer
        self._waiter = ThreadPoolExecutor(1, "nanovllm-wait")
        self._in_flight: deque[StepInFlight] = deque()
        self._wake = asyncio.Event()
        self._stopping = False

    @classmethod
    async def build(cls, spec: ModelSpec, config: ResolvedConfig) -> "EngineLoop":
        """Load the model and size the cache, off the event loop. Raises what `Trace` and `Runner` raise."""
        # First, as loading may take minutes.
        trace = None if config.trace is None else Trace(config.trace)
        launcher = ThreadPoolExecutor(1, "nanovllm-launch")
        try:
            runner = await asyncio.get_running_loop().run_in_executor(launcher, Runner, spec, config)
        except BaseException:
            launcher.shutdown(wait=False)
            if trace is not None:
                trace.close()
            raise
        cache = CacheManager(
            runner.num_blocks,
            config.block_size,
            prefix_caching=config.prefix_caching,
            prefix_hash=config.prefix_hash,
            watermark=config.watermark,
            states=StatePool(runner.num_slots, config.max_num_seqs, config.block_size) if runner.num_slots else None,
        )
        scheduler = Scheduler(
            cache,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=runner.max_model_len,
            eos_token_ids=spec.eos_token_ids,
            seed=config.seed,
        )
        info = EngineInfo(
            model=spec.name,
            device=runner.device_name,
            dtype=str(config.dtype).removeprefix("torch."),
            vocab_size=spec.vocab_size,
            max_model_len=runner.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            block_size=config.block_size,
            num_blocks=runner.num_blocks,
            kv_cache_dtype=str(config.kv_cache_dtype).removeprefix("torch."),
            kv_cache_bytes=runner.kv_cache_bytes,
            num_state_slots=runner.num_slots,
            state_bytes=runner.state_bytes,
            prefix_caching=config.prefix_caching,
            attention_backend=config.attention_backend,
            grammars=spec.vocabulary is not None,
        )
        grammars = None
        if spec.vocabulary is not None:
            grammars = Grammars(spec.vocabulary, spec.vocab_size, spec.eos_token_ids)
        tracer = None if trace is None else Tracer(trace, runner.device)
        return cls(scheduler, runner, info, config.depth, launcher, tracer, grammars)

    async def compile(self, spec: GrammarSpec) -> None:
        """Have a grammar ready. Raises GrammarError."""
        if self._grammars is None:
            raise GrammarError(NO_GRAMMARS)
        await self._grammars.compile(spec)

    def submit(self, request: Request) -> None:
        """Queue a checked request, once its grammar is ready. Raises ValueError when its key is in use."""
        spec = request.sampling.grammar
        if spec is not None and self._grammars is not None:
            request.compiled = self._grammars.get(spec)
            if request.compiled is None:
                request.status = RequestStatus.WAITING_GRAMMAR
                self._compiling[request.key] = asyncio.create_task(self._queue_compiled(request, spec, self._grammars))
                # For the stats, in which it counts as waiting.
                self._wake.set()
                return
        self._scheduler.add(request)
        self._wake.set()

    async def _queue_compiled(self, request: Request, spec: GrammarSpec, grammars: Grammars) -> None:
        try:
            request.compiled = await grammars.compile(spec)
        except GrammarError as error:
            self._failures.append((request.key, str(error)))
        else:
            request.status = RequestStatus.WAITING
            self._scheduler.add(request)
        del self._compiling[request.key]
        self._wake.set()

    def abort(self, key: int) -> None:
        """End a request, if it is still there; nothing more is emitted for it."""
        if (compiling := self._compiling.pop(key, None)) is not None:
            compiling.cancel()
            self._wake.set()
        if self._scheduler.abort(key):
            self._wake.set()

    def stop(self) -> None:
        """Let `run` return once the steps in flight have ended."""
        self._stopping = True
        self._wake.set()

    def stats(self) -> EngineStats:
        """How things stand now."""
        scheduler, pool, states = self._scheduler, self._scheduler.cache.pool, self._scheduler.cache.states
        counters = scheduler.counters
        return EngineStats(
            num_requests_running=scheduler.rows.num_running,
            num_requests_waiting=scheduler.num_waiting + len(self._compiling),
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free,
            num_cached_blocks=pool.num_cached,
            num_free_state_slots=0 if states is None else states.slots.num_free,
            num_checkpoints=0 if states is None else states.slots.num_cached,
            num_steps=counters.steps,
            num_preemptions=counters.preemptions,
            prefix_cache_queries=counters.prefix_queries,
            prefix_cache_hits=counters.prefix_hits,
            prompt_tokens=counters.prompt_tokens,
            generation_tokens=counters.generation_tokens,
            iteration_tokens=counters.tokens,
            graph_steps=tuple((*key, count) for key, count in list(self._runner.graphs.counts.items())),
        )

    async def run(self, emit: Emit) -> None:
        """Serve until `stop`. `emit` gets each step's outputs, and the stats once more when nothing is left to do.

        Raises whatever a step raised; the engine can't go on after that.
        """
        try:
            self._fill()
            while not self._stopping:
                if self._in_flight:
                    outputs = await self._complete()
                    # First the device's next step, then whoever waits for this one.
                    self._fill()
                    emit(self._with_failures(outputs), self.stats())
                else:
                    emit(self._with_failures(StepOutputs()), self.stats())
                    await self._wake.wait()
                    self._wake.clear()
                    self._fill()
            while self._in_flight:
                await self._complete()
        finally:
            self._launcher.shutdown(wait=False, cancel_futures=True)
            self._waiter.shutdown(wait=False, cancel_futures=True)
            for compiling in self._compiling.values():
                compiling.cancel()
            if self._grammars is not None:
                self._grammars.close()
            if self._tracer is not None:
                self._tracer.trace.close()

    def _with_failures(self, outputs: StepOutputs) -> StepOutputs:
        outputs.failures.extend(self._failures)
        self._failures.clear()
        return outputs

    def _fill(self) -> None:
        loop = asyncio.get_running_loop()
        while len(self._in_flight) < self._depth and (step := self._schedule()) is not None:
            handle: asyncio.Future[StepHandle] = loop.create_future()
            self._launcher.submit(self._launch, step.plan, handle)
            self._in_flight.append(StepInFlight(step, handle))

    async def _complete(self) -> StepOutputs:
        oldest = self._in_flight.popleft()
        handle = await oldest.handle
        if self._tracer is not None:
            self._tracer.device(oldest.step.plan.step, handle)
        with self._span("output", oldest.step.plan.step):
            return self._scheduler.complete(oldest.step, handle.tokens())

    def _schedule(self) -> ScheduledStep | None:
        with self._span("plan", self._scheduler.counters.steps):
            return self._scheduler.schedule()

    def _launch(self, plan: StepPlan, future: asyncio.Future[StepHandle]) -> None:
        """On the launching thread."""
        try:
            with self._span("launch", plan.step):
                handle = self._runner.launch(plan)
        except Exception as error:  # noqa: BLE001 (raised where the step is awaited)
            future.get_loop().call_soon_threadsafe(_fail, future, error)
            return
        if handle.ready:
            future.get_loop().call_soon_threadsafe(_settle, future, handle)
        else:
            self._waiter.submit(self._wait, handle, future)

    def _wait(self, handle: StepHandle, future: asyncio.Future[StepHandle]) -> None:
        """On the waiting thread."""
        try:
            handle.wait()
        except Exception as error:  # noqa: BLE001 (raised where the step is awaited)
            future.get_loop().call_soon_threadsafe(_fail, future, error)
        else:
            future.get_loop().call_soon_threadsafe(_settle, future, handle)

    def _span(self, track: Track, step: int) -> AbstractContextManager[None]:
        return nullcontext() if self._tracer is None else self._tracer.trace.span(track, f"step {step}")


def _settle(future: asyncio.Future[StepHandle], handle: StepHandle) -> None:
    if not future.cancelled():
        future.set_result(handle)


def _fail(future: asyncio.Future[StepHandle], error: Exception) -> None:
    if not future.cancelled():
        future.set_exception(error)
