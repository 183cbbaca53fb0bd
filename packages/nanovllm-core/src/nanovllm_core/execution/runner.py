"""Executes step plans on one device."""

import gc
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from nanovllm_core.cache.memory import CacheLayout, CacheMemory, CacheSize, measure_free_bytes, plan_cache
from nanovllm_core.config import ResolvedConfig
from nanovllm_core.execution.entry_copier import count_staging_bytes
from nanovllm_core.execution.forward import BatchBounds, ForwardOutput, ForwardPass
from nanovllm_core.execution.graphs import CapturedFunctions, CapturedStep, GraphShape, StepGraphs, graph_shapes
from nanovllm_core.execution.host_copy import HostCopyRing
from nanovllm_core.execution.model_proposers import find_draft_spec, make_proposer
from nanovllm_core.execution.plan_messages import PlanPublisher
from nanovllm_core.execution.prompt_scores import PromptScores, score_prompt_tokens
from nanovllm_core.execution.request_table import RequestTable, SamplingOps, StepInputs
from nanovllm_core.execution.step_handle import StepHandle
from nanovllm_core.execution.token_choice import ChoiceGraphs, TokenChooser
from nanovllm_core.layers.compilation import set_cache_directories
from nanovllm_core.model import BuildContext, CausalLM, LaunchAttention, ModelSpec, PagedSpec
from nanovllm_core.parallel import ParallelContext
from nanovllm_core.sampling_params import MAX_TOP_LOGPROBS, SamplingParams
from nanovllm_core.scheduling.plan import (
    BatchShape,
    DraftEntryRange,
    NewBlocks,
    NewRow,
    PromptLogprobsRange,
    ScheduledRows,
    StepPlan,
)
from nanovllm_core.start_phases import log_phase
from nanovllm_kernels.attention import (
    PROPORTIONAL_ESTIMATOR,
    make_attention_estimator,
    min_tokens_of_whole_prompt_graphs,
)
from nanovllm_kernels.platform import describe_device

COMPILED_ROWS = 1024  # number of rows for which torch.compile tunes its code
_GREEDY = SamplingParams(temperature=0.0)


class Runner:
    """The model, the caches and the request table of one rank. All calls come from one thread.

    First call the methods that `start_runner` calls, in the same order. After each later `allocate`, call `capture`
    again.
    is_asynchronous: whether `launch` returns before the device has computed the step.
    attention_estimator: estimates how long the attention of prompt chunks takes.
    proposer: proposes drafts; None without speculation.
    """

    def __init__(
        self,
        model: CausalLM,
        draft_model: CausalLM | None,
        spec: ModelSpec,
        config: ResolvedConfig,
        device: torch.device,
        parallel: ParallelContext,
    ):
        self.device = device
        self.parallel = parallel
        self.device_name = describe_device(device).name
        self.is_asynchronous = device.type != "cpu"
        draft_specs = () if draft_model is None else draft_model.cache_specs()
        layout = CacheLayout.from_specs(model.cache_specs(), config, config.max_drafts, draft_specs)
        self.cache = CacheMemory(layout, device)
        self._config = config
        self._model = model
        self._host_copies: HostCopyRing | None = None
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device)
            # The maximum number of integers that a step copies to the host: the fields of `ChosenTokens`.
            max_ints = config.max_num_seqs * (3 + config.max_drafts) + config.max_draft_step_tokens
            self._host_copies = HostCopyRing(max_ints, config.depth, stream)
        attention = layout.attention_specs[0]
        self.attention_estimator = PROPORTIONAL_ESTIMATOR
        if isinstance(attention, PagedSpec):
            self.attention_estimator = make_attention_estimator(attention.num_heads, attention.num_kv_heads, device)
        self._table = RequestTable(
            config.max_seqs_per_group,
            config.max_model_len,
            layout.block_size,
            spec.vocab_size,
            len(spec.eos_token_ids),
            device,
            has_recurrent_layers=bool(layout.state_specs),
            max_drafts=config.max_drafts,
            parallel=parallel,
        )
        self.proposer = make_proposer(model, draft_model, self.cache, self._table, config, parallel)
        self._token_chooser = TokenChooser(self._table, parallel, config, self.proposer)
        choice_functions = self._token_chooser.choose_padded, self._token_chooser.propose_padded
        self._captured_functions = CapturedFunctions(self._run_padded_forward, *choice_functions, self.proposer)
        self._forward = ForwardPass(model, self._table, self.cache, config, parallel)
        # Sends plans to the other ranks. None if there is one rank. Also None at start-up, because all ranks then run
        # the same steps.
        self.plan_publisher: PlanPublisher | None = None
        # `allocate` lowers this number if the cache holds fewer tokens.
        self.max_model_len = config.max_model_len
        batch_limits = (config.max_seqs_per_group, config.max_tokens_per_group)
        draft_limits = (config.max_drafts, config.max_draft_step_tokens)
        min_whole_prompt_tokens = min_tokens_of_whole_prompt_graphs(self.cache.kv_caches[0], config.attention_backend)
        shapes = graph_shapes(
            config.graph_mode,
            *batch_limits,
            *draft_limits,
            min_whole_prompt_tokens,
            proposes_with_model=self.proposer is not None and self.proposer.uses_cache,
        )
        self.graphs = StepGraphs(shapes)

    @classmethod
    @torch.inference_mode()
    def build(cls, spec: ModelSpec, config: ResolvedConfig, parallel: ParallelContext) -> "Runner":
        """Build the models and the tables.

        Raises the exceptions of `spec.build`, `find_draft_spec`, `CacheLayout.from_specs` and `make_proposer`.
        """
        device = torch.device(config.device)
        # The first call of a collective imports torch.compile, which creates its cache directory at once.
        if device.type == "cuda" or parallel.size > 1:
            set_cache_directories()
        build = BuildContext(device, config.torch_dtype, parallel, config.compile, config.uses_mtp)
        draft_spec = find_draft_spec(spec, config)
        model = spec.build(build)
        draft_model = None if draft_spec is None else draft_spec.build(build)
        return cls(model, draft_model, spec, config, device, parallel)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile kernels by running steps of several shapes."""
        if self._config.attention_backend != "torch":
            self._table.step_buffer.clear()
            num_tokens = min(COMPILED_ROWS, self._config.max_tokens_per_group)
            largest_shape = GraphShape(min(num_tokens, self._config.max_seqs_per_group), num_tokens, num_tokens, "none")
            whole_prompts_shape = largest_shape._replace(has_only_whole_prompts=True)
            shapes = [largest_shape, whole_prompts_shape, GraphShape(1, 1, 1, "none")]
            if max_drafts := self._config.max_drafts:
                shapes.append(GraphShape(1, 1 + max_drafts, 1 + max_drafts, "none", has_drafts=True))
            for shape in tqdm(shapes, desc="compiling", disable=None):
                output = self._run_padded_forward(shape)
                self._token_chooser.choose_padded(int(SamplingOps.RANDOM), output, shape.has_drafts)
                for ops in () if self.proposer is None else self.proposer.captured_ops(may_propose=True):
                    self._token_chooser.propose_padded(ops, output)
                self._run_padded_forward(shape, num_decodes=0)
            if self.proposer is not None:
                self.proposer.warm_up(min(self._config.max_draft_step_tokens, self._config.max_model_len))
        if self.device.type == "cpu":
            # Compile the kernels for few rows, by running them once.
            self._run_plan(self._make_dummy_plan([1], _GREEDY))

    @torch.inference_mode()
    def measure_free_bytes(self) -> int:
        """Bytes that the largest step and the graphs leave for the cache. Raises ConfigError if no memory is free."""
        free_bytes = measure_free_bytes(self._config, self.device, self._run_largest_step)
        self._table.step_buffer.clear()
        free_bytes -= count_staging_bytes(self._config, self.cache.layout)
        return free_bytes - self.graphs.estimate_bytes(self._captured_functions)

    @torch.inference_mode()
    def allocate(self, size: CacheSize) -> None:
        """Replace the caches, and release the graphs that read the old caches."""
        self.graphs.release()
        self.cache.allocate(size.num_blocks, size.num_state_slots)
        self.max_model_len = size.max_model_len
        if self.cache.state_caches:
            # Compile the copy kernel now, not at the first prefix hit.
            null_slot = torch.zeros(1, dtype=torch.int64, device=self.device)
            self.cache.copy_states(null_slot, null_slot)

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture CUDA graphs of steps."""
        self._table.step_buffer.clear()
        self.graphs.capture(self._captured_functions)

    def release_graphs(self) -> None:
        """Free the graphs. Call before this rank leaves its group, because NCCL waits for the graphs that use NCCL."""
        self.graphs.release()
        gc.collect()

    @torch.inference_mode()
    def time_step(self, num_tokens: int, context_len: int = 0) -> float:
        """Measure the seconds of a step with one chunk per group of requests, see `Scheduler`. Call before any request.

        num_tokens: number of tokens of each chunk.
        context_len: number of cached tokens before each chunk.
        """
        shape = BatchShape(1, num_tokens, None, has_only_whole_prompts=context_len == 0, proposes=False)
        return self._time(self._make_dummy_plan([num_tokens], _GREEDY, context_len=context_len, shape=shape))

    @torch.inference_mode()
    def time_decodes(self, num_reqs: int, num_drafts: int = 0, *, proposes: bool = False, num_late: int = 0) -> float:
        """Measure the seconds of a step of decodes, see `time_step`.

        num_reqs: number of requests per group. num_drafts: number of drafts per request.
        proposes: see `BatchShape`.
        num_late: number of late draft entries, see `StepPlan`.
        """
        lengths = [min(1 + num_drafts, self.max_model_len)] * num_reqs
        shape = BatchShape(
            num_reqs, sum(lengths), None if num_drafts else 1, has_drafts=bool(num_drafts), proposes=proposes
        )
        late_entries = [DraftEntryRange(0, 0, min(num_late, self.max_model_len))] if num_late else []
        plan = self._make_dummy_plan(lengths, _GREEDY, shape=shape, late_draft_entries=late_entries)
        num_steps = 3
        if num_steps * lengths[0] + self._config.max_drafts <= self.max_model_len:
            # Decodes have rows already, so fill the rows in a step that is not timed.
            self._run_plan(plan)
            plan = replace(plan, new_rows=[], max_seq_len=num_steps * lengths[0])
        return self._time(plan)

    def _time(self, plan: StepPlan) -> float:
        # The first run may compile or allocate, so run twice.
        duration_s = min(self._run_plan(plan) for _ in range(2))
        self._table.step_buffer.clear()
        self.graphs.num_steps.clear()
        return duration_s

    @torch.inference_mode()
    def launch(self, plan: StepPlan, num_masks: int | None = None) -> StepHandle:
        """Launch a step. On CUDA the host waits for the previous step only if a token mask depends on that step.

        If `config.forbid_sync` is set, any other wait for the device raises RuntimeError.
        num_masks: number of token masks that rank 0 broadcasts; None on rank 0.
        """
        start = time.perf_counter()
        with _forbid_waiting() if self._config.forbid_sync else nullcontext():
            if num_masks is None:
                num_masks = self._token_chooser.begin_step(plan)
            if self.plan_publisher is not None:
                self.plan_publisher.publish(plan, num_masks)
            handle = self._launch(plan, num_masks)
        handle.launch_s = time.perf_counter() - start
        if (has_disagreement := self._forward.has_disagreement) is not None and bool(has_disagreement):
            raise RuntimeError(f"the ranks have different hidden states after step {plan.step_number}")
        return handle

    def _launch(self, plan: StepPlan, num_masks: int) -> StepHandle:
        host_slot = None if self._host_copies is None else self._host_copies.next_slot()
        if host_slot is not None:
            host_slot.begin_event.record(host_slot.stream)
        captured = self.graphs.dispatch(plan.shape, allows_graph=not plan.prompt_logprobs_ranges)
        step = self._table.apply_plan(plan, plan.shape.num_reqs if captured is None else captured.num_reqs)
        if step.state_copies is not None:
            self.cache.copy_states(*step.state_copies)
        if self.proposer is not None and plan.late_draft_entries:
            self.proposer.compute_late_draft_entries(plan.late_draft_entries)
        # Score prompts before choosing tokens, because the choice may wait for the previous step.
        output, graphs, prompt_scores = self._run_model(plan, step, captured)
        chooser = self._token_chooser
        return chooser.choose(step, output, num_masks, host_slot, graphs, prompt_scores, plan.shape.proposes)

    def _run_model(
        self, plan: StepPlan, step: StepInputs, captured: CapturedStep | None
    ) -> tuple[ForwardOutput, ChoiceGraphs | None, Sequence[PromptScores]]:
        """Run the forward pass. Returns its output, the graphs that choose tokens, and the prompt scores.

        captured: the step to replay. If None, launch kernels: the returned graphs are then None.
        """
        forward = self._forward
        if captured is not None:
            captured.replay(plan.shape.num_tokens, lambda output: forward.replan_attention(output, step, plan))
            return captured.output, captured.choice_graphs, ()
        bounds = BatchBounds.from_plan(plan, step.query_lens)
        hidden, batch = forward.run(step.device_rows, bounds)
        prompt_scores = [
            self._score_prompt(prompt_range, plan.scheduled, hidden) for prompt_range in plan.prompt_logprobs_ranges
        ]
        has_samples = bool(step.sampling_indices.size)
        output = forward.make_output(hidden, step.device_rows, batch, bounds, has_samples=has_samples)
        return output, None, prompt_scores

    def _score_prompt(
        self, prompt_range: PromptLogprobsRange, scheduled: ScheduledRows, hidden: Tensor
    ) -> PromptScores:
        owner, own_range = self._table.requests.locate_prompt(prompt_range, scheduled)
        row, start, num_tokens, num_top, first_logits_index = own_range
        # The kernels need aligned memory, so copy the tokens.
        tokens = self._table.tokens[row, start : start + num_tokens].clone()
        hidden = hidden[first_logits_index : first_logits_index + num_tokens]
        # All ranks compute logits, so all ranks need the rows of the rank that has the prompt.
        hidden, tokens = (self.parallel.broadcast_rows(x, owner) for x in (hidden, tokens))
        return score_prompt_tokens(hidden, tokens, num_top, self._forward.compute_logits_of_own_rows, self.parallel)

    def _run_padded_forward(
        self, shape: GraphShape, launch_attention: LaunchAttention | None = None, *, num_decodes: int | None = None
    ) -> ForwardOutput:
        """Run the forward pass of the rows in the step buffer, padded to `shape`. Graphs capture this method."""
        other_bounds = (num_decodes, shape.max_query_len, self._config.max_model_len)
        bounds = BatchBounds(shape.num_tokens, *other_bounds, shape.has_only_whole_prompts, shape.has_drafts)
        rows = self._table.step_buffer.first_rows(shape.num_reqs)
        hidden, batch = self._forward.run(rows, bounds, launch_attention)
        return self._forward.make_output(hidden, rows, batch, bounds)

    def _run_largest_step(self) -> None:
        """Run a step with the full token budget, in which all rows sample with all options."""
        config = self._config
        token_budget, num_rows = config.max_tokens_per_group, config.max_seqs_per_group
        max_length = min(token_budget - (num_rows - 1), config.max_model_len)
        lengths = [max_length]
        while len(lengths) < num_rows and (num_remaining := token_budget - sum(lengths)) > 0:
            even_length = -(-num_remaining // (num_rows - len(lengths)))
            lengths.append(min(even_length, config.max_model_len, num_remaining))
        sampling = SamplingParams(
            top_k=50,
            top_p=0.9,
            min_p=0.1,
            presence_penalty=1.0,
            forbidden_sequences=((0, 0),),
            logprobs=MAX_TOP_LOGPROBS,
        )
        lengths.sort()
        prompt_range = PromptLogprobsRange(len(lengths) - 1, 1, lengths[-1] - 1, MAX_TOP_LOGPROBS, sum(lengths[:-1]))
        self._run_plan(self._make_dummy_plan(lengths, sampling, [prompt_range] if prompt_range.num_tokens else []))

    def _make_dummy_plan(
        self,
        lengths: list[int],
        sampling: SamplingParams,
        logprobs_ranges: Sequence[PromptLogprobsRange] = (),
        *,
        context_len: int = 0,
        shape: BatchShape | None = None,
        late_draft_entries: Sequence[DraftEntryRange] = (),
    ) -> StepPlan:
        """The plan of a step that reads and writes the null block only.

        The tokens are random, because equal tokens would choose the same experts. All groups have the same tokens.

        lengths: numbers of tokens to compute, one per request, in rising order.
        context_len: number of cached tokens before these tokens.
        shape: shape of the batch; by default a batch of whole prompts.
        """
        rng = np.random.default_rng(0)
        prompts = [
            rng.integers(self._table.vocab_size, size=context_len + length, dtype=np.int32) for length in lengths
        ]
        num_groups, num_prompts = self.parallel.num_request_groups, len(lengths)
        rows = np.add.outer(np.arange(num_groups) * self._table.num_rows, np.arange(num_prompts)).reshape(-1)
        new_rows = [
            NewRow(row, ids, len(ids), context_len, sampling, 0, ())
            for row, ids in zip(rows.tolist(), prompts * num_groups, strict=True)
        ]
        scheduled = ScheduledRows(rows, np.array(lengths * num_groups), np.ones(len(rows), np.bool_))
        shape = shape or BatchShape(num_prompts, sum(lengths), None, has_only_whole_prompts=True)
        max_seq_len, late_entries = context_len + max(lengths), [*late_draft_entries]
        return StepPlan(0, new_rows, NewBlocks(), scheduled, shape, max_seq_len, [*logprobs_ranges], late_entries)

    def _run_plan(self, plan: StepPlan) -> float:
        """Run a step. Returns its seconds."""
        handle = self.launch(plan)
        handle.wait()
        return handle.duration_s


def start_runner(spec: ModelSpec, config: ResolvedConfig, parallel: ParallelContext | None = None) -> Runner:
    """Build a runner and prepare it for steps. Raises the exceptions of `Runner.build` and of `plan_cache`.

    parallel: this process's rank; None for a single rank. All ranks must call this function with equal settings.
    """
    parallel = parallel or ParallelContext()
    with log_phase("weights"):
        runner = Runner.build(spec, config, parallel)
    with log_phase("compile"):
        runner.warm_up()
    with log_phase("memory"):
        # All ranks have the same number of blocks, so the rank with the least memory decides.
        free_bytes = parallel.minimum(runner.measure_free_bytes(), runner.device)
        runner.allocate(plan_cache(config, runner.cache.layout, free_bytes))
    with log_phase("capture"):
        runner.capture()
    return runner


@contextmanager
def _forbid_waiting() -> Generator[None]:
    """Make operations in this context raise RuntimeError if the host waits for the device. Events are exempt."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
