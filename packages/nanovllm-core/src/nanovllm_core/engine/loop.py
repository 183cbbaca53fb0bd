"""The engine's loop: plans and launches steps on a thread of its own, and applies the results of finished steps."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import NamedTuple

from nanovllm_core.cache.manager import CacheManager
from nanovllm_core.cache.state_pool import StatePool
from nanovllm_core.config import ResolvedConfig
from nanovllm_core.engine.status import NO_GRAMMARS, EngineInfo, EngineStats
from nanovllm_core.engine.trace import Trace, Tracer, Track
from nanovllm_core.execution.runner import Runner
from nanovllm_core.execution.step_handle import StepHandle
from nanovllm_core.grammar.grammars import Grammars
from nanovllm_core.model import ModelSpec
from nanovllm_core.request import GrammarError, GrammarSpec, ParameterTypes, Request, RequestStatus, StepOutputs
from nanovllm_core.scheduling.budget import StepLimits
from nanovllm_core.scheduling.result_applier import ScheduledStep
from nanovllm_core.scheduling.scheduler import Scheduler
from nanovllm_core.scheduling.step_time import StepTimeModel, calibrate
from nanovllm_kernels.platform import describe_arithmetic
from nanovllm_kernels.spinning import SpinControl, can_limit

Emit = Callable[[StepOutputs, EngineStats | None], None]
# While the engine has requests, it emits its stats at this interval, also during a long step.
STATS_SECONDS = 0.1
# While a step with prompts runs, the next one is planned after this share of the predicted time; few steps end earlier.
# Planning starts earlier by the time that planning and launching take, which grows with the waiting requests.
PLANNED_SHARE = 0.85
PLANNING_LEAD_S = 0.002
WAITING_LEAD_S = 0.001
# Interval at which the thread checks whether the step has finished.
POLL_S = 0.001
_WAITING = (RequestStatus.WAITING_GRAMMAR, RequestStatus.WAITING)


class StepInFlight(NamedTuple):
    """A launched step and the handle that reads its results."""

    step: ScheduledStep
    handle: StepHandle


class EngineLoop:
    """Drives the scheduler and the runner; only its thread `nanovllm-engine` touches them.

    Up to `depth` steps are in flight. The thread waits for the device without sleeping: after a sleep its caches are
    cold, and planning and launching take two to three times as long.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        info: EngineInfo,
        depth: int,
        thread: ThreadPoolExecutor,
        spins: SpinControl,
        tracer: Tracer | None,
        grammars: Grammars | None,
    ):
        self.info = info
        self._grammars = grammars
        # Tasks that compile the grammars of requests, by request key.
        self._compiling: dict[int, asyncio.Task[None]] = {}
        self._grammar_failures: list[tuple[int, str]] = []
        # Requests that neither finished nor were aborted, by key. Used on the event loop's thread only.
        self._open_requests: dict[int, Request] = {}
        self._scheduler = scheduler
        self._runner = runner
        self._depth = depth
        self._tracer = tracer
        self._in_flight: deque[StepInFlight] = deque()
        # When the device began the oldest step in flight, by `time.perf_counter`.
        self._step_start = 0.0
        # Outputs of the last finished step, until they are posted.
        self._outputs: StepOutputs | None = None
        self._thread = thread
        self._spins = spins
        # Messages to the thread, in order of arrival: new requests, and keys of aborted requests.
        self._inbox: deque[Request | int] = deque()
        self._wake = threading.Event()
        self._stopping = False
        # Messages from the thread to the event loop.
        self._outbox: deque[tuple[StepOutputs, EngineStats | None]] = deque()
        self._stats_time = 0.0
        # The stats that the thread took last, and those that were emitted last. A step in flight does not change them.
        self._latest_stats = self._emitted_stats = self._stats()
        self._emitted_time = 0.0
        self._outbox_changed = asyncio.Event()

    @classmethod
    async def build(cls, spec: ModelSpec, config: ResolvedConfig) -> "EngineLoop":
        """Load the model and allocate the cache, off the event loop. Raises the exceptions of `Trace` and `Runner`."""
        # An unusable trace path must fail before the model is loaded, which may take minutes.
        trace = None if config.trace is None else Trace(config.trace)
        spins = SpinControl(is_on=config.device == "cpu" and can_limit())
        thread = ThreadPoolExecutor(1, "nanovllm-engine")
        try:
            events = asyncio.get_running_loop()
            runner = await events.run_in_executor(thread, Runner, spec, config)
            step_times = StepTimeModel()
            limits = config.max_num_batched_tokens, runner.max_model_len
            await events.run_in_executor(thread, calibrate, step_times, runner.time_step, *limits)
        except BaseException:
            thread.shutdown(wait=False)
            spins.close()
            if trace is not None:
                trace.close()
            raise
        cache = CacheManager(
            runner.num_blocks,
            runner.block_size,
            prefix_caching=config.prefix_caching,
            prefix_hash=config.prefix_hash,
            watermark=config.watermark,
            states=StatePool(runner.num_slots, config.max_num_seqs, runner.block_size) if runner.num_slots else None,
        )
        scheduler = Scheduler(
            cache,
            max_num_seqs=config.max_num_seqs,
            limits=StepLimits(
                config.max_num_batched_tokens,
                config.target_step_s,
                config.prompt_step_s,
                config.mixed_step_s,
                runner.attention_rounds,
                runner.graphs.mixed_tokens,
            ),
            step_times=step_times,
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
            block_size=runner.block_size,
            num_blocks=runner.num_blocks,
            kv_cache_dtype=str(config.kv_cache_dtype).removeprefix("torch."),
            kv_cache_bytes=runner.kv_cache_bytes,
            num_state_slots=runner.num_slots,
            state_bytes=runner.state_bytes,
            prefix_caching=config.prefix_caching,
            attention_backend=config.attention_backend,
            grammars=spec.vocabulary is not None,
            arithmetic=describe_arithmetic(runner.device, config.dtype),
        )
        grammars = None
        if spec.vocabulary is not None:
            grammars = Grammars(spec.vocabulary, spec.vocab_size, spec.eos_token_ids)
        tracer = None if trace is None else Tracer(trace, runner.device)
        return cls(scheduler, runner, info, config.depth, thread, spins, tracer, grammars)

    async def compile(self, spec: GrammarSpec) -> ParameterTypes:
        """Compile a grammar and cache it. Returns and raises as `Engine.compile` does."""
        if self._grammars is None:
            raise GrammarError(NO_GRAMMARS)
        return (await self._grammars.compile(spec)).parameter_types

    def submit(self, request: Request) -> None:
        """Queue a validated request with a unique key, once its grammar is compiled."""
        self._open_requests[request.key] = request
        spec = request.sampling.grammar
        if spec is not None and self._grammars is not None:
            request.compiled = self._grammars.get(spec)
            if request.compiled is None:
                request.status = RequestStatus.WAITING_GRAMMAR
                self._compiling[request.key] = asyncio.create_task(self._queue_compiled(request, spec, self._grammars))
                return
        self._send(request)

    async def _queue_compiled(self, request: Request, spec: GrammarSpec, grammars: Grammars) -> None:
        try:
            request.compiled = await grammars.compile(spec)
        except GrammarError as error:
            self._open_requests.pop(request.key, None)
            self._grammar_failures.append((request.key, str(error)))
        else:
            request.status = RequestStatus.WAITING
            self._inbox.append(request)
        del self._compiling[request.key]
        self._wake.set()

    def abort(self, key: int) -> None:
        """Abort a request if it has not finished. Outputs that are already on their way may still be emitted."""
        self._open_requests.pop(key, None)
        if (compiling := self._compiling.pop(key, None)) is not None:
            compiling.cancel()
        self._send(key)

    def _send(self, message: Request | int) -> None:
        self._inbox.append(message)
        self._wake.set()

    def stop(self) -> None:
        """Make `run` return once the steps in flight have finished."""
        self._stopping = True
        self._wake.set()

    def _stats(self) -> EngineStats:
        """All stats except the number of waiting requests, which the event loop's thread counts."""
        scheduler, pool, states = self._scheduler, self._scheduler.cache.pool, self._scheduler.cache.states
        counters, step_times = scheduler.counters, scheduler.step_times
        return EngineStats(
            num_requests_running=scheduler.rows.num_running,
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
            step_limit_s=scheduler.limits.seconds(1, step_times.decode_step_s),
            decode_step_s=step_times.decode_step_s,
            step_time_coefficients=tuple(step_times.coefficients._asdict().items()),
            step_time_error=step_times.error,
        )

    async def run(self, emit: Emit) -> None:
        """Serve until `stop`.

        emit: called with the outputs of each step. Stats come along every STATS_SECONDS, also during a step, and when
            no request is left; else they are None.
        Raises the exception of a failed step; the engine cannot continue after that.
        """
        events = asyncio.get_running_loop()
        stepping = events.run_in_executor(self._thread, self._run_steps, events)
        stepping.add_done_callback(lambda _: self._outbox_changed.set())
        reporting = asyncio.create_task(self._report_stats(emit))
        try:
            while True:
                # Check before emptying the outbox: the thread posts its last outputs before it ends.
                has_ended = stepping.done()
                while self._outbox:
                    outputs, stats = self._outbox.popleft()
                    for key, _, _ in outputs.ends:
                        self._open_requests.pop(key, None)
                    self._emit(emit, outputs, stats)
                if has_ended:
                    break
                await self._outbox_changed.wait()
                self._outbox_changed.clear()
            await stepping
        finally:
            reporting.cancel()
            self.stop()
            await asyncio.wait([stepping])
            self._thread.shutdown()
            for compiling in self._compiling.values():
                compiling.cancel()
            if self._grammars is not None:
                self._grammars.close()

    async def _report_stats(self, emit: Emit) -> None:
        """Emit stats at intervals while requests are open and no finished step carries stats."""
        while True:
            await asyncio.sleep(STATS_SECONDS)
            is_idle = not (
                self._open_requests
                or self._emitted_stats.num_requests_running
                or self._emitted_stats.num_requests_waiting
            )
            if not is_idle and time.monotonic() - self._emitted_time >= STATS_SECONDS:
                self._emit(emit, StepOutputs(), self._latest_stats)

    def _emit(self, emit: Emit, outputs: StepOutputs, stats: EngineStats | None) -> None:
        outputs.failures.extend(self._grammar_failures)
        self._grammar_failures.clear()
        if stats is not None:
            num_waiting = sum(request.status in _WAITING for request in self._open_requests.values())
            self._emitted_stats = stats = replace(stats, num_requests_waiting=num_waiting)
            self._emitted_time = time.monotonic()
        emit(outputs, stats)

    def _run_steps(self, events: asyncio.AbstractEventLoop) -> None:
        """Plan, launch and complete steps until `stop`. Runs on the engine's thread."""
        try:
            while not self._stopping:
                # Launch the next step before posting the last outputs. Post them even if launching fails.
                try:
                    self._launch_steps(events)
                finally:
                    self._post_outputs(events)
                if not self._in_flight:
                    self._post(events, StepOutputs())
                    self._wake.wait()
                    self._wake.clear()
                    continue
                self._outputs = self._complete_oldest_step()
                if not self._runner.is_asynchronous:
                    self._post_outputs(events)
            self._post_outputs(events)
            while self._in_flight:
                self._complete_oldest_step()
        finally:
            if self._tracer is not None:
                self._tracer.trace.close()
            self._spins.close()

    def _post(self, events: asyncio.AbstractEventLoop, outputs: StepOutputs) -> None:
        """Pass outputs to the event loop, with stats if these are due or no request is left."""
        now, scheduler = time.monotonic(), self._scheduler
        is_last = scheduler.rows.num_running + scheduler.num_waiting == 0
        stats = None
        if is_last or now - self._stats_time >= STATS_SECONDS:
            self._stats_time, stats = now, self._stats()
            self._latest_stats = stats
        self._outbox.append((outputs, stats))
        events.call_soon_threadsafe(self._outbox_changed.set)

    def _post_outputs(self, events: asyncio.AbstractEventLoop) -> None:
        outputs, self._outputs = self._outputs, None
        if outputs is not None:
            self._post(events, outputs)

    def _launch_steps(self, events: asyncio.AbstractEventLoop) -> None:
        while len(self._in_flight) < self._depth:
            self._wait_to_plan(events)
            step = self._schedule()
            if step is None:
                break
            if not self._runner.is_asynchronous:
                # On a CPU launching includes computing, which may take long.
                self._latest_stats = self._stats()
            with self._launch_span(step):
                handle = self._runner.launch(step.plan)
            if not self._in_flight:
                self._step_start = time.perf_counter()
            self._in_flight.append(StepInFlight(step, handle))

    def _wait_to_plan(self, events: asyncio.AbstractEventLoop) -> None:
        """Wait until shortly before the step in flight ends, so that the next step includes requests that arrive now.

        Only steps with prompts are long enough for this.
        """
        if len(self._in_flight) != 1:
            return
        step, handle = self._in_flight[0]
        due = self._step_start + PLANNED_SHARE * step.expected_s - PLANNING_LEAD_S
        if time.perf_counter() < due:
            self._post_outputs(events)
        while not (handle.ready or self._stopping):
            self._read_inbox()
            if time.perf_counter() >= due - WAITING_LEAD_S * self._scheduler.num_waiting:
                break
            time.sleep(POLL_S)

    def _schedule(self) -> ScheduledStep | None:
        # Requests may have arrived while the last step was launched.
        self._read_inbox()
        with self._span("plan", self._scheduler.counters.steps):
            return self._scheduler.schedule()

    def _read_inbox(self) -> None:
        while self._inbox:
            message = self._inbox.popleft()
            if isinstance(message, Request):
                self._scheduler.add(message)
            else:
                self._scheduler.abort(message)

    def _complete_oldest_step(self) -> StepOutputs:
        step, handle = self._in_flight.popleft()
        handle.wait()
        self._step_start = time.perf_counter()
        self._scheduler.observe(step, handle.seconds)
        if self._tracer is not None:
            self._tracer.device(step.plan.step, handle)
        with self._span("output", step.plan.step):
            return self._scheduler.complete(step, handle.tokens())

    def _launch_span(self, step: ScheduledStep) -> AbstractContextManager[None]:
        if self._tracer is None:
            return nullcontext()
        expected_us = round(step.expected_s * 1e6, 1)
        name = f"step {step.plan.step}"
        return self._tracer.trace.span("launch", name, **step.work._asdict(), expected_us=expected_us)

    def _span(self, track: Track, step: int) -> AbstractContextManager[None]:
        return nullcontext() if self._tracer is None else self._tracer.trace.span(track, f"step {step}")
