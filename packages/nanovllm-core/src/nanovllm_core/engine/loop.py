"""The engine's loop: a thread that plans and launches steps, and applies the results of finished steps."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from nanovllm_core.engine.loop_end import end_thread, raise_cause
from nanovllm_core.engine.ranks import RankProcesses
from nanovllm_core.engine.report import collect_stats
from nanovllm_core.engine.status import GRAMMARS_UNSUPPORTED, EngineInfo, EngineStats
from nanovllm_core.engine.trace import StepTracer, trace_launch, trace_span
from nanovllm_core.errors import EngineDeadError, GrammarError
from nanovllm_core.execution.entry_copier import EntryCopier
from nanovllm_core.execution.runner import Runner
from nanovllm_core.execution.step_handle import StepHandle
from nanovllm_core.grammar.grammars import Grammars
from nanovllm_core.grammar_types import GrammarSpec, ParameterTypes
from nanovllm_core.outputs import RequestFailure, StepOutputs
from nanovllm_core.request import Request
from nanovllm_core.request_state import RequestState, RequestStatus
from nanovllm_core.scheduling.plan import ScheduledStep
from nanovllm_core.scheduling.scheduler import Scheduler
from nanovllm_core.transfer.transfers import Transfers
from nanovllm_kernels.openmp_spinning import SpinControl

Emit = Callable[[StepOutputs, EngineStats | None], None]
# Interval at which `run` emits stats while the engine has requests, also during a long step.
STATS_INTERVAL_S = 0.1
# An engine fails if one of its steps takes longer. Steps are planned to take below a second, but may compile kernels.
STEP_TIMEOUT_S = 600.0
# The plan of the next step should be ready after this share of the predicted time of the running step. Few steps end
# earlier.
PLAN_READY_SHARE = 0.85
# Planning takes about PLANNING_LEAD_S, plus PLANNING_LEAD_PER_REQUEST_S per waiting request.
PLANNING_LEAD_S = 0.002
PLANNING_LEAD_PER_REQUEST_S = 0.001
POLL_INTERVAL_S = 0.001  # between checks for new requests while a step runs
# Between checks, while there is no work, whether the host memory is pinned and whether the event loop is closed.
IDLE_POLL_INTERVAL_S = 0.1
_WAITING_STATUSES = (RequestStatus.WAITING_GRAMMAR, RequestStatus.WAITING, RequestStatus.WAITING_KV)


class EngineLoop:
    """Drives scheduler and runner on the thread `nanovllm-engine`, with up to `max_steps_in_flight` steps at once."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        copier: EntryCopier | None,
        transfers: Transfers | None,
        info: EngineInfo,
        max_steps_in_flight: int,
        executor: ThreadPoolExecutor,
        spin_control: SpinControl,
        tracer: StepTracer | None,
        grammars: Grammars | None,
        ranks: RankProcesses | None,
    ):
        self.info = info
        self._ranks = ranks
        self._grammars = grammars
        # Tasks that compile the grammars of requests, by request key.
        self._compile_tasks: dict[int, asyncio.Task[None]] = {}
        self._grammar_failures: list[RequestFailure] = []
        # Unfinished requests by key. Used on the event loop's thread only.
        self._open_requests: dict[int, RequestState] = {}
        self._scheduler = scheduler
        self._runner = runner
        self._copier = copier  # None without a tier of the cache in host memory
        self._transfers = transfers  # None without other engines that share blocks
        self._max_steps_in_flight = max_steps_in_flight
        self._tracer = tracer
        self._steps_in_flight: deque[tuple[ScheduledStep, StepHandle]] = deque()  # oldest first
        # Time of `time.perf_counter` at which the device began the oldest step in flight.
        self._step_start_s = 0.0
        self._unposted_outputs: StepOutputs | None = None
        self._executor = executor
        self._spin_control = spin_control  # shortens the busy waiting of torch's threads
        # Messages to the engine thread in order of arrival. A message is a new request, the key of an aborted request,
        # or a function. A function means: reset the prefix cache, then call the function.
        self._inbox: deque[RequestState | int | Callable[[], object]] = deque()
        self._inbox_changed = threading.Event()
        self._is_stopping = self._is_hanging = False
        self._outbox: deque[tuple[StepOutputs, EngineStats | None]] = deque()
        self._last_stats_collection_s = 0.0
        self._collect_stats = partial(collect_stats, scheduler, runner, transfers)
        self._latest_stats = self.emitted_stats = self._collect_stats()
        self._last_stats_emission_s = 0.0
        self._outbox_changed = asyncio.Event()
        if transfers is not None:
            transfers.wake = self._inbox_changed.set
            if tracer is not None:
                transfers.on_finish = tracer.record_fetch

    async def compile_grammar(self, spec: GrammarSpec) -> ParameterTypes:
        """Compile a grammar and cache it. See `Engine.compile_grammar`."""
        if self._grammars is None:
            raise GrammarError(GRAMMARS_UNSUPPORTED)
        return (await self._grammars.compile(spec)).parameter_types

    def submit(self, key: int, client_request: Request) -> None:
        """Queue a validated request with a unique key. The request waits until its grammar is compiled."""
        self._open_requests[key] = request = RequestState(key, client_request)
        spec = request.sampling.grammar
        if spec is not None and self._grammars is not None:
            request.compiled_grammar = self._grammars.get(spec)
            if request.compiled_grammar is None:
                request.status = RequestStatus.WAITING_GRAMMAR
                self._compile_tasks[key] = asyncio.create_task(self._queue_when_compiled(request, spec, self._grammars))
                return
        self._send_to_thread(request)

    async def _queue_when_compiled(self, request: RequestState, spec: GrammarSpec, grammars: Grammars) -> None:
        try:
            request.compiled_grammar = await grammars.compile(spec)
        except GrammarError as error:
            self._open_requests.pop(request.key, None)
            self._grammar_failures.append(RequestFailure(request.key, str(error)))
        else:
            request.status = RequestStatus.WAITING
            self._inbox.append(request)
        del self._compile_tasks[request.key]
        self._inbox_changed.set()

    def abort(self, key: int) -> None:
        """Abort a request if it has not finished. Outputs of finished steps may still be emitted."""
        self._open_requests.pop(key, None)
        if (compile_task := self._compile_tasks.pop(key, None)) is not None:
            compile_task.cancel()
        self._send_to_thread(key)

    async def reset_prefix_cache(self) -> None:
        """Forget all cached blocks, in all tiers. Returns once no later request can find them."""
        event_loop, reset_event = asyncio.get_running_loop(), asyncio.Event()
        self._send_to_thread(partial(event_loop.call_soon_threadsafe, reset_event.set))
        await reset_event.wait()

    def _send_to_thread(self, message: RequestState | int | Callable[[], object]) -> None:
        self._inbox.append(message)
        self._inbox_changed.set()

    def stop(self) -> None:
        """Make `run` return once the steps in flight have finished."""
        self._is_stopping = True
        self._inbox_changed.set()

    async def run(self, emit: Emit) -> None:
        """Serve until `stop`. Raises the exception of a failed step or rank, after which the engine cannot continue.

        emit: called with the outputs of each step, and with stats about every STATS_INTERVAL_S (None in other calls).
        """
        event_loop = asyncio.get_running_loop()
        steps_future = event_loop.run_in_executor(self._executor, self._run_steps, event_loop)
        steps_future.add_done_callback(lambda _: self._outbox_changed.set())
        stats_task = asyncio.create_task(self._report_stats(emit))
        stats_task.add_done_callback(lambda _: self._outbox_changed.set())
        if self._ranks is not None:
            self._ranks.set_failure_callback(lambda: event_loop.call_soon_threadsafe(self._outbox_changed.set))
        try:
            while True:
                # The thread may wait for an ended rank forever, so do not wait for the thread.
                if self._ranks is not None:
                    self._ranks.check()
                if stats_task.done():
                    stats_task.result()
                # Check before emptying the outbox: the thread posts its last outputs before it ends.
                has_thread_ended = steps_future.done()
                while self._outbox:
                    outputs, stats = self._outbox.popleft()
                    for ended in (*outputs.finishes, *outputs.failures):
                        self._open_requests.pop(ended.key, None)
                    self._emit(emit, outputs, stats)
                if has_thread_ended:
                    break
                await self._outbox_changed.wait()
                self._outbox_changed.clear()
            await raise_cause(steps_future, self._ranks)
        finally:
            self.stop()
            stats_task.cancel()
            try:
                await end_thread(steps_future, self._executor, self._ranks, is_hanging=self._is_hanging)
            finally:
                # Close also after another cancellation. If the event loop has ended, the interpreter may be exiting,
                # and `Grammars.close` could not start a thread.
                if event_loop.is_running():
                    self._close_event_loop_parts()

    def _close_event_loop_parts(self) -> None:
        """Close the parts that the event loop's thread uses."""
        for compile_task in self._compile_tasks.values():
            compile_task.cancel()
        if self._grammars is not None:
            self._grammars.close()
        if self._transfers is not None:
            self._transfers.close()

    async def _report_stats(self, emit: Emit) -> None:
        """While requests are open, emit stats if the outputs of steps have carried no stats for STATS_INTERVAL_S.

        Raises EngineDeadError if a step takes longer than STEP_TIMEOUT_S.
        """
        num_intervals_in_step, last_step_start_s = 0, 0.0
        # Count intervals instead of time, because the process may be suspended.
        while num_intervals_in_step * STATS_INTERVAL_S < STEP_TIMEOUT_S:
            await asyncio.sleep(STATS_INTERVAL_S)
            # On a CPU, a step is not in flight while it is launched, but its requests run.
            is_in_step = bool(self._steps_in_flight) or self._latest_stats.num_requests_running > 0
            is_same_step = is_in_step and self._step_start_s == last_step_start_s
            num_intervals_in_step = num_intervals_in_step + 1 if is_same_step else 0
            last_step_start_s = self._step_start_s
            is_idle = not (
                self._open_requests
                or self.emitted_stats.num_requests_running
                or self.emitted_stats.num_requests_waiting
            )
            if not is_idle and time.monotonic() - self._last_stats_emission_s >= STATS_INTERVAL_S:
                self._emit(emit, StepOutputs(), self._latest_stats)
        self._is_hanging = True
        raise EngineDeadError(f"a step has not ended within {STEP_TIMEOUT_S:g} s")

    def _emit(self, emit: Emit, outputs: StepOutputs, stats: EngineStats | None) -> None:
        """Add failed grammars to the outputs and the number of waiting requests to the stats, then call `emit`."""
        outputs.failures.extend(self._grammar_failures)
        self._grammar_failures.clear()
        if stats is not None:
            num_waiting = sum(request.status in _WAITING_STATUSES for request in self._open_requests.values())
            self.emitted_stats = stats = replace(stats, num_requests_waiting=num_waiting)
            self._last_stats_emission_s = time.monotonic()
        emit(outputs, stats)

    def _run_steps(self, event_loop: asyncio.AbstractEventLoop) -> None:
        """Plan, launch and complete steps until `stop`. Runs on the engine's thread."""
        try:
            while not self._is_stopping:
                # Launch steps first, because the device may be idle. Post the last outputs even if a launch fails.
                try:
                    self._launch_steps(event_loop)
                finally:
                    self._post_outputs(event_loop)
                if not self._steps_in_flight:
                    self._post(event_loop, StepOutputs())
                    self._wait_for_work(event_loop)
                    continue
                self._unposted_outputs = self._complete_oldest_step()
                if not self._runner.is_asynchronous:
                    self._post_outputs(event_loop)
            self._post_outputs(event_loop)
            while self._steps_in_flight:
                self._complete_oldest_step()
            if self._ranks is not None:
                self._ranks.stop()
        except BaseException:
            if self._ranks is not None:
                self._ranks.abandon()
            raise
        finally:
            if self._copier is not None:
                self._copier.close()
            if self._scheduler.tier is not None:
                self._scheduler.tier.close()
            if self._tracer is not None:
                self._tracer.file.close()
            self._spin_control.close()

    def _wait_for_work(self, event_loop: asyncio.AbstractEventLoop) -> None:
        """Wait for a message while no step is in flight, and process copies meanwhile.

        Return early if a request waits, because ended copies may have freed the blocks that it needs.
        """
        while not self._inbox_changed.wait(POLL_INTERVAL_S if self._scheduler.has_copies else IDLE_POLL_INTERVAL_S):
            had_copies = self._scheduler.has_copies
            self._advance_copies()
            # When all copies have ended, return, so that the caller posts stats that show all blocks as free.
            if self._scheduler.num_waiting or (had_copies and not self._scheduler.has_copies):
                break
            if event_loop.is_closed():
                self.stop()
        self._inbox_changed.clear()

    def _post(self, event_loop: asyncio.AbstractEventLoop, outputs: StepOutputs) -> None:
        """Pass outputs to the event loop, with stats if the stats interval is over or no request is left."""
        now_s, scheduler = time.monotonic(), self._scheduler
        has_no_requests = scheduler.rows.num_running + scheduler.num_waiting == 0
        stats = None
        if has_no_requests or now_s - self._last_stats_collection_s >= STATS_INTERVAL_S:
            self._last_stats_collection_s, stats = now_s, self._collect_stats()
            self._latest_stats = stats
        self._outbox.append((outputs, stats))
        event_loop.call_soon_threadsafe(self._outbox_changed.set)

    def _post_outputs(self, event_loop: asyncio.AbstractEventLoop) -> None:
        outputs, self._unposted_outputs = self._unposted_outputs, None
        if outputs is not None:
            self._post(event_loop, outputs)

    def _launch_steps(self, event_loop: asyncio.AbstractEventLoop) -> None:
        while len(self._steps_in_flight) < self._max_steps_in_flight:
            self._wait_to_plan(event_loop)
            step = self._plan_step()
            if step is None:
                break
            if not self._runner.is_asynchronous:
                # On a CPU the launch computes the step. `_report_stats` sends these stats meanwhile.
                self._latest_stats = self._collect_stats()
            with trace_launch(self._tracer, step):
                handle = self._runner.launch(step.plan)
            if not self._steps_in_flight:
                self._step_start_s = time.perf_counter()
            self._steps_in_flight.append((step, handle))
            self._launch_copies(has_plan=False)

    def _wait_to_plan(self, event_loop: asyncio.AbstractEventLoop) -> None:
        """Wait until shortly before the step in flight ends. Requests that arrive meanwhile can join the next step."""
        if len(self._steps_in_flight) != 1:
            return
        step, handle = self._steps_in_flight[0]
        plan_at_s = self._step_start_s + PLAN_READY_SHARE * step.predicted_s - PLANNING_LEAD_S
        if time.perf_counter() < plan_at_s:
            self._post_outputs(event_loop)
        while not (handle.is_finished or self._is_stopping):
            self._read_inbox()
            self._advance_copies()
            if time.perf_counter() >= plan_at_s - PLANNING_LEAD_PER_REQUEST_S * self._scheduler.num_waiting:
                break
            time.sleep(POLL_INTERVAL_S)

    def _plan_step(self) -> ScheduledStep | None:
        # Requests may have arrived while the last step was launched.
        self._read_inbox()
        self._advance_copies()
        with trace_span(self._tracer, "plan", self._scheduler.counters.num_steps):
            step = self._scheduler.schedule()
        # Do not call `_advance_copies`: it could make a request ready, and the thread would still wait for a message.
        self._launch_copies(has_plan=step is not None)
        return step

    def _advance_copies(self) -> None:
        """Process ended copies, and launch new copies. All planned steps must have been launched."""
        if self._copier is not None:
            loads = self._scheduler.complete_copies()
            if self._tracer is not None:
                self._tracer.record_loads(loads)
            if self._transfers is not None:
                self._transfers.poll()
            self._launch_copies(has_plan=False)

    def _launch_copies(self, *, has_plan: bool) -> None:
        """Launch new copies. has_plan: whether a planned step has not been launched yet."""
        if self._copier is not None:
            for batch in self._scheduler.take_copies(has_plan=has_plan):
                self._copier.launch(batch)

    def _read_inbox(self) -> None:
        while self._inbox:
            message = self._inbox.popleft()
            if isinstance(message, RequestState):
                if self._transfers is None or not self._transfers.start_fetch(message):
                    self._scheduler.add(message)
            elif isinstance(message, int):
                if self._transfers is None or not self._transfers.abort(message):
                    self._scheduler.abort(message)
            else:
                self._scheduler.reset_prefix_cache()
                if self._transfers is not None:
                    self._transfers.reset_peer_prefix_cache()
                message()

    def _complete_oldest_step(self) -> StepOutputs:
        step, handle = self._steps_in_flight[0]
        handle.wait()
        self._steps_in_flight.popleft()
        self._step_start_s = time.perf_counter()
        self._scheduler.observe(step, handle.duration_s)
        if self._tracer is not None:
            self._tracer.record_device_span(step.plan.step_number, handle)
        with trace_span(self._tracer, "output", step.plan.step_number):
            return self._scheduler.complete(step, handle.read_results())
