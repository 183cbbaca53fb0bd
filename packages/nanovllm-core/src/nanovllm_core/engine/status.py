"""Information that an engine reports: constants at its start, and statistics while it runs."""

from dataclasses import dataclass

GRAMMARS_UNSUPPORTED = (
    "grammars can't be used with this model, because its ModelSpec has no vocabulary: set ModelSpec.vocabulary"
)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Properties of an engine that do not change.

    model: name of the model.
    device: name of the device, for example of the GPU.
    dtype: dtype of weights and activations.
    max_model_len: maximum number of prompt and output tokens of a request.
    max_num_seqs: maximum number of requests that run at once.
    max_num_batched_tokens: maximum number of tokens that a step computes.
    block_size: tokens per cache block.
    num_blocks: number of usable cache blocks, without the null block.
    kv_cache_bytes, state_bytes: memory of the KV cache and of the recurrent states, in bytes.
    supports_grammars: whether requests may have a grammar.
    num_state_slots: number of usable state slots, without the null slot; 0 for a model without recurrent layers.
    arithmetic: how matrix products are computed, as text for users.
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
    arithmetic: str = ""

    @property
    def kv_cache_tokens(self) -> int:
        """Number of tokens that the cache holds."""
        return self.num_blocks * self.block_size


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Statistics of an engine. Gauges come first, then counters since the start.

    num_blocks: number of usable cache blocks.
    num_free_blocks: blocks that no request holds, empty or cached.
    num_cached_blocks: free blocks that later prompts can find.
    num_free_state_slots: state slots that no request holds.
    num_checkpoints: free state slots that hold a checkpoint.
    prefix_cache_queries: prompt tokens that were looked up in the prefix cache.
    prefix_cache_hits: prompt tokens that were found in the prefix cache.
    prompt_tokens: prompt tokens of all requests that have been admitted.
    generation_tokens: output tokens.
    iteration_tokens: computed tokens of prompts and decodes.
    graph_steps: triples (graph mode, "decode" or "mixed", number of steps).
    step_limit_s: time limit of a step with prompts and decodes, in seconds.
    decode_step_s: time of a usual step without prompts, in seconds.
    step_time_coefficients: pairs (term, seconds per unit) of the step-time model.
    step_time_error: mean relative error of the model's recent predictions.
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
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    iteration_tokens: int = 0
    graph_steps: tuple[tuple[str, str, int], ...] = ()
    step_limit_s: float = 0.0
    decode_step_s: float = 0.0
    step_time_coefficients: tuple[tuple[str, float], ...] = ()
    step_time_error: float = 0.0

    @property
    def kv_cache_usage(self) -> float:
        """Share of the blocks that requests hold, 0..1."""
        return 1 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0
