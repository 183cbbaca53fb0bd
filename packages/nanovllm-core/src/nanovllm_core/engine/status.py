"""The constant properties and the statistics that an engine reports."""

from dataclasses import dataclass

GRAMMARS_UNSUPPORTED = (
    "grammars can't be used with this model, because its ModelSpec has no vocabulary: set ModelSpec.vocabulary"
)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Properties of an engine that do not change. Settings: see `EngineConfig`.

    If ranks have different requests, numbers of blocks, slots and bytes are sums over ranks.

    num_blocks: number of cache blocks, not counting the null block, which padding uses.
    num_state_slots: number of slots for recurrent states, not counting the null slot; 0 without recurrent layers.
    num_ranks: number of processes that share the model.
    draft_method: method of speculative decoding; None without speculation.
    matmul_arithmetic: how matrix products are computed, as text for users.
    transfer_engine_id: id of this process for other engines; empty if no other engine can fetch blocks.
    transfer_address: address at which other engines fetch blocks, with the port that was chosen for port 0; empty if
        `transfer_engine_id` is empty.
    transfer_peers: addresses that `Request.prefix_peer` may have.
    """

    model: str
    device: str
    dtype: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    kv_cache_dtype: str
    kv_cache_bytes: int
    prefix_caching: bool
    attention_backend: str
    supports_grammars: bool = False
    num_state_slots: int = 0
    state_bytes: int = 0
    num_ranks: int = 1
    draft_method: str | None = None
    matmul_arithmetic: str = ""
    transfer_engine_id: str = ""
    transfer_address: str = ""
    transfer_peers: tuple[str, ...] = ()

    @property
    def kv_cache_tokens(self) -> int:
        """Capacity of the cache in tokens."""
        return self.num_blocks * self.block_size


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Statistics of an engine. Counters are totals since the engine started.

    num_free_blocks: blocks that no request holds, including cached blocks.
    num_cached_blocks: free blocks that later prompts can use.
    num_free_state_slots: state slots that no request holds, including checkpoints.
    num_checkpoints: free state slots with saved states that later prompts can use.
    num_queried_prompt_tokens: number of prompt tokens that were looked up in the prefix cache.
    num_cached_prompt_tokens: number of prompt tokens that were found in the prefix cache.
    num_computed_tokens: number of tokens that the model computed: prompt tokens, last tokens of decodes, and drafts.
    num_steps_by_size: histogram of tokens per step: pairs (maximum number of tokens, number of steps), by maximum.
        A step counts in the first pair with a large enough maximum. The last maximum is infinite.
    graph_steps: triples (graph mode, kind of step, number of steps), see `StepGraphs.num_steps`.
    verified_drafts_by_position: number of verified drafts; empty without speculation. Position 0 follows the
        request's last token. A draft counts as verified even if a draft before it is rejected.
    accepted_drafts_by_position: number of these drafts that are in the output.
    loaded_tokens: pairs (tier "host" or "disk", number of prompt tokens loaded from this tier); empty without tiers.
        `num_cached_prompt_tokens` counts these tokens too.
    rejected_load_tokens: number of prompt tokens that could have been loaded, but were faster to compute.
    num_held_host_slots: number of slots of the host memory that copies, files and fetches use now.
    num_failed_loads: number of loads that failed. The engine then computed the prompt.
    load_wait_s: total time for which requests waited for loads.
    copied_bytes: pairs (kind of copy, bytes). "store" copies from the cache to host memory, and "load" copies back.
        "write" and "read" copy to and from files.
    copy_s: pairs (kind of copy, seconds), in the order of `copied_bytes`.
    fetches: pairs (`FetchOutcome` of a prompt that another engine may have, number of requests); empty if no other
        engine is configured.
    fetched_tokens, fetched_bytes: prompt tokens and bytes that were fetched from other engines.
    fetch_s: total time for which requests waited for fetches.
    served_bytes: number of bytes that other engines fetched from this engine.
    num_leases: number of fetches by other engines for which this engine holds blocks.
    step_limit_s: time limit of a step with prompts and decodes.
    decode_step_s: moving average of the times of steps without prompts.
    step_time_coefficients: pairs (name, value), see `StepTimeCoefficients`.
    step_time_error: mean relative error of recent predictions of step times.
    """

    num_requests_running: int = 0
    num_requests_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    num_free_state_slots: int = 0
    num_checkpoints: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    num_queried_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_computed_tokens: int = 0
    num_steps_by_size: tuple[tuple[float, int], ...] = ()
    graph_steps: tuple[tuple[str, str, int], ...] = ()
    verified_drafts_by_position: tuple[int, ...] = ()
    accepted_drafts_by_position: tuple[int, ...] = ()
    loaded_tokens: tuple[tuple[str, int], ...] = ()
    rejected_load_tokens: int = 0
    num_held_host_slots: int = 0
    num_failed_loads: int = 0
    load_wait_s: float = 0.0
    copied_bytes: tuple[tuple[str, int], ...] = ()
    copy_s: tuple[tuple[str, float], ...] = ()
    fetches: tuple[tuple[str, int], ...] = ()
    fetched_tokens: int = 0
    fetched_bytes: int = 0
    fetch_s: float = 0.0
    served_bytes: int = 0
    num_leases: int = 0
    step_limit_s: float = 0.0
    decode_step_s: float = 0.0
    step_time_coefficients: tuple[tuple[str, float], ...] = ()
    step_time_error: float = 0.0

    @property
    def kv_cache_usage(self) -> float:
        """Blocks that requests hold, as a fraction of all blocks, 0..1."""
        return 1 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0
