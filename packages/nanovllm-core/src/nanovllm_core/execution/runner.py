"""Runs plans on one device: model, cache and request table in one place.

Everything here happens on the one thread that launches steps. This room must not know about queues, clients or why a
plan is as it is.
"""

import torch
from torch import Tensor

from nanovllm_core.cache.planner import bytes_per_block, plan_cache
from nanovllm_core.config import ResolvedConfig
from nanovllm_core.execution.graphs import GraphDispatcher
from nanovllm_core.execution.memory import free_for_cache
from nanovllm_core.execution.request_table import Needs, RequestTable, StepInputs
from nanovllm_core.execution.sampler import Sampled, StepHandle, sample_tokens
from nanovllm_core.model import BuildContext, ForwardContext, ModelSpec
from nanovllm_core.parallel import ParallelContext
from nanovllm_core.request import MAX_TOP_LOGPROBS, SamplingParams
from nanovllm_core.scheduling.plan import BatchShape, NewRow, ScheduledRow, StepPlan
from nanovllm_kernels.attention import plan_batch
from nanovllm_kernels.batch import build_inputs, commit_tokens
from nanovllm_kernels.platform import describe


class Runner:
    """One rank's model and memory.

    Raises, when made: ConfigError when the cache does not fit; whatever `spec.build` raises.
    """

    @torch.inference_mode()
    def __init__(self, spec: ModelSpec, config: ResolvedConfig):
        self.device = torch.device(config.device)
        self.device_name = describe(self.device).name
        self.graphs = GraphDispatcher()
        self._config = config
        self._model = spec.build(BuildContext(self.device, config.dtype, ParallelContext()))
        self._table = RequestTable(
            config.max_num_seqs,
            config.max_model_len,
            config.block_size,
            spec.vocab_size,
            len(spec.eos_token_ids),
            self.device,
        )
        self._nothing_sampled = torch.empty(0, dtype=torch.int32, device=self.device)
        self._copy_stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        specs = self._model.cache_specs()
        block_bytes = bytes_per_block(specs, config.block_size, config.dtype)
        self._kv_caches = self._allocate(0)
        free_bytes = free_for_cache(config, self.device, self._rehearse)
        self.num_blocks, self.max_model_len = plan_cache(config, free_bytes, block_bytes)
        self._kv_caches = self._allocate(self.num_blocks)
        self.kv_cache_bytes = block_bytes * (self.num_blocks + 1)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> StepHandle:
        """Start a step. On CUDA it returns as soon as everything is queued; nothing here waits for the device."""
        self.graphs.dispatch(plan.shape)
        table = self._table
        step = table.apply(plan)
        width = -(-plan.max_seq_len // self._config.block_size)
        batch = build_inputs(
            step.rows,
            step.query_start_loc,
            table.tokens,
            table.num_computed,
            table.block_table,
            self._config.block_size,
            plan.shape.num_tokens,
            width,
        )
        attention = plan_batch(
            batch.block_tables,
            batch.seq_lens,
            step.query_start_loc,
            num_decodes=sum(1 for entry in plan.scheduled if entry.num_tokens == 1),
            max_query_len=max(entry.num_tokens for entry in plan.scheduled),
            max_seq_len=plan.max_seq_len,
            page_size=self._config.block_size,
            backend=self._config.attention_backend,
        )
        ctx = ForwardContext(attention, batch.slot_mapping, self._kv_caches)
        hidden = self._model.forward(batch.input_ids, batch.positions, ctx)
        sampled = self._sample(hidden, batch.seq_lens, step) if step.num_logprobs else None
        commit_tokens(
            step.rows,
            step.query_start_loc,
            self._nothing_sampled if sampled is None else sampled.tokens,
            step.sample_index,
            table.tokens,
            table.num_computed,
            table.counts if step.needs & Needs.PENALTY else None,
        )
        return StepHandle(sampled, step.num_logprobs, self._copy_stream)

    def _sample(self, hidden: Tensor, seq_lens: Tensor, step: StepInputs) -> Sampled:
        last = step.query_start_loc[1:][step.sample_index].long() - 1
        logits = self._model.compute_logits(hidden[last])
        return sample_tokens(logits, seq_lens[step.sample_index], self._table, step)

    def _rehearse(self) -> None:
        """The step that takes the most memory: a full budget of tokens, every row sampling with all that one can ask.

        Its block tables are empty, so it reads and writes only the null block.
        """
        config = self._config
        budget, num_rows = config.max_num_batched_tokens, config.max_num_seqs
        longest = min(budget - (num_rows - 1), config.max_model_len)
        lengths = [longest]
        while len(lengths) < num_rows and sum(lengths) < budget:
            share = -(-(budget - sum(lengths)) // (num_rows - len(lengths)))
            lengths.append(min(share, config.max_model_len, budget - sum(lengths)))
        lengths.sort()
        sampling = SamplingParams(top_k=50, top_p=0.9, min_p=0.1, presence_penalty=1.0, logprobs=MAX_TOP_LOGPROBS)
        new_rows = [
            NewRow(row, [0] * length, length, 0, sampling, seed=0, stop_ids=()) for row, length in enumerate(lengths)
        ]
        scheduled = [ScheduledRow(row, length, samples=True) for row, length in enumerate(lengths)]
        shape = BatchShape(len(lengths), sum(lengths), None)
        self.launch(StepPlan(0, new_rows, [], scheduled, shape, max_seq_len=max(lengths))).choices()

    def _allocate(self, num_blocks: int) -> tuple[Tensor, ...]:
        """A cache of `num_blocks` blocks and the null block for every layer that wants one."""
        config = self._config
        return tuple(
            torch.zeros(
                (num_blocks + 1, config.block_size, 2 * spec.num_kv_heads, spec.head_dim),
                dtype=config.dtype,
                device=self.device,
            )
            for spec in self._model.cache_specs()
        )
