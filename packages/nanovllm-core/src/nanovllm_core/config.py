"""The engine's settings. `EngineConfig` has the user's settings. `ResolvedConfig` has a value for every setting."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_args

from nanovllm_core.errors import ConfigError

if TYPE_CHECKING:
    import torch

Device = Literal["cpu", "cuda"]
DType = Literal["float32", "bfloat16", "float16"]
AttentionBackend = Literal["torch", "triton", "flash", "cutedsl", "fastest"]
KVCacheDtype = Literal["auto", "fp8"]
BlockSize = Literal[16, 32, 64, 128]
HashAlgorithm = Literal["fast", "sha256"]
StateDtype = Literal["float32", "bfloat16"]
DraftMethod = Literal["ngram", "draft", "mtp"]
GraphMode = Literal["none", "full_decode_only", "piecewise", "full"]

BLOCK_SIZES: tuple[BlockSize, ...] = (16, 32, 64, 128)
GIB = 1 << 30
MAX_RANKS = 16  # ranks of one engine
# Maximum number of drafts per request and step. With this many drafts, a decode fills at most one new block.
MAX_DRAFTS = BLOCK_SIZES[0] - 1
# A step with drafts may have this many tokens even if `max_num_seqs` is smaller, see `max_draft_step_tokens`.
MIN_DRAFT_STEP_LIMIT = 64
# Default time limit of a step without decodes. A shorter limit reduces the throughput of prompts. A longer limit delays
# new requests, which may wait for two steps.
PROMPT_STEP_LIMIT_S: dict[Device, float] = {"cpu": 0.5, "cuda": 0.16}
# Default time limit of a step with prompts and decodes.
MIXED_STEP_LIMIT_S: dict[Device, float] = {"cpu": 0.25, "cuda": 0.05}


@dataclass(frozen=True, slots=True, kw_only=True)
class IndependentSettings:
    """Settings that depend neither on the device nor on the model. None leaves the choice to the engine.

    The server makes a flag from each field of this class and of `EngineConfig`. A field's annotation is the help text.
    """

    target_step_ms: Annotated[
        float | None,
        "time limit of a step with prompts and decodes, in ms; a shorter limit makes streams smoother and prompts "
        "slower; by default 50 on a GPU and 250 on a CPU, or the time of four decode steps if that is longer",
    ] = None
    kv_cache_dtype: Annotated[
        KVCacheDtype,
        "auto: dtype of the weights; fp8: e4m3 with a scale per head and token, which halves the size of the cache",
    ] = "auto"
    block_size: Annotated[
        BlockSize | None,
        "tokens per KV block; prompts share whole blocks; by default 128 where FlashAttention reads the cache, else 16",
    ] = None
    num_blocks: Annotated[int | None, "blocks of each rank's KV cache; by default as many as the memory holds"] = None
    state_dtype: Annotated[StateDtype, "dtype of recurrent states; bfloat16 halves their memory"] = "float32"
    num_state_slots: Annotated[
        int | None,
        "slots of each rank for states of running requests and for checkpoints; by default as many as the memory holds",
    ] = None
    gpu_memory_utilization: Annotated[float, "share of GPU memory for weights, activations and cache together"] = 0.9
    cpu_cache_gib: Annotated[float, "size of the KV cache on a CPU, in GiB"] = 2.0
    prefix_caching: Annotated[bool, "keep blocks of finished requests for prompts that begin with equal tokens"] = True
    prefix_hash: Annotated[
        HashAlgorithm, "hash that finds cached blocks: sha256 if clients that do not trust each other share the engine"
    ] = "fast"
    kv_offload_gib: Annotated[
        float,
        "host memory of all ranks for copies of cached blocks, in GiB; a prompt loads the blocks that the cache has "
        "evicted, if that is faster than to compute them; 0: none",
    ] = 0.0
    kv_offload_dir: Annotated[
        Path | None,
        "directory for files of cached blocks, which outlive the engine; engines of one user and host may share it; "
        "needs kv_offload_gib",
    ] = None
    kv_offload_disk_gib: Annotated[float, "maximum size of all files in kv_offload_dir, in GiB"] = 100.0
    watermark: Annotated[float, "share of the blocks that stay free for running requests at each admission"] = 0.01
    seed: Annotated[int, "seed from which the engine draws seeds for requests without a seed"] = 0
    tensor_parallel_size: Annotated[
        int, "number of ranks: processes that share the model; on GPUs one rank per GPU of this host"
    ] = 1
    expert_parallel: Annotated[
        bool, "each rank has some whole experts of a mixture; otherwise each rank has a part of every expert"
    ] = False
    dp_attention: Annotated[
        bool,
        "each rank computes the attention of its own requests and holds their KV cache; ranks share only feed-forward "
        "layers and the output head",
    ] = False
    speculate: Annotated[
        DraftMethod | None,
        "speculative decoding, which verifies several proposed tokens (drafts) in one step, and never changes an "
        "answer; ngram: propose the tokens that followed the last tokens earlier in the request; draft: propose the "
        "tokens of a smaller model; mtp: propose the tokens of the model's heads for multi-token prediction",
    ] = None
    num_speculative_tokens: Annotated[int, "maximum number of drafts per request and step"] = 5
    acceptance_length: Annotated[
        float | None,
        "for benchmarks: keep drafts at random, right or wrong, so that a step with drafts gives this mean number of "
        "tokens per request; answers become meaningless",
    ] = None
    check_ranks: Annotated[
        bool, "for debugging: fail if ranks have different hidden states after a step; waits for each step"
    ] = False
    forbid_sync: Annotated[bool, "for debugging: fail if launching a step waits for the GPU"] = False
    trace: Annotated[Path | None, "file for the times of each step, for Perfetto or chrome://tracing"] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(IndependentSettings):
    """Settings of one engine. None leaves the choice to the engine."""

    device: Annotated[Device | None, "device of the model; by default CUDA if there is a GPU"] = None
    dtype: Annotated[
        DType | None,
        "dtype of weights, KV cache and activations; by default the model's; on a CPU some activations stay float32",
    ] = None
    max_model_len: Annotated[
        int | None,
        "maximum number of prompt and output tokens of a request; by default the maximum of the model or the cache",
    ] = None
    max_num_seqs: Annotated[int | None, "maximum number of requests that run at once"] = None
    max_num_batched_tokens: Annotated[int | None, "maximum number of tokens that a step computes"] = None
    depth: Annotated[
        Literal[1, 2] | None,
        "steps in flight at once; by default 2 on a GPU, where the host plans while the GPU computes, and 1 on a CPU",
    ] = None
    attention_backend: Annotated[
        AttentionBackend | None, "attention kernels; by default the fastest installed kernels for each kind of step"
    ] = None
    graph_mode: Annotated[
        GraphMode | None,
        "steps that are replayed from CUDA graphs; none: no step; full_decode_only: steps without prompts; piecewise: "
        "all steps, with attention launched between graphs; full: all steps, with one graph per step",
    ] = None
    compile: Annotated[bool | None, "use torch.compile between attention operators; by default on a GPU"] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig(IndependentSettings):
    """`EngineConfig` with a value for every setting that depends on the device or the model.

    `cache.memory.choose_block_size` replaces a `block_size` of None once the model is built.
    may_shorten_context: whether the engine may lower `max_model_len` if the cache is too small.
    """

    device: Device
    dtype: DType
    max_model_len: int
    may_shorten_context: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    depth: Literal[1, 2]
    attention_backend: AttentionBackend
    graph_mode: GraphMode
    compile: bool

    @property
    def num_request_groups(self) -> int:
        """The number of disjoint groups of requests, see `ParallelContext.num_request_groups`."""
        return self.tensor_parallel_size if self.dp_attention else 1

    @property
    def max_seqs_per_group(self) -> int:
        """The maximum number of requests that run at once in one group of requests."""
        return self.max_num_seqs // self.num_request_groups

    @property
    def max_tokens_per_group(self) -> int:
        """The maximum number of tokens that a step computes for one group of requests."""
        return -(-self.max_num_batched_tokens // self.num_request_groups)

    @property
    def max_drafts(self) -> int:
        """The maximum number of drafts per request and step; 0 without speculation."""
        return 0 if self.speculate is None else self.num_speculative_tokens

    @property
    def uses_mtp(self) -> bool:
        """Whether the model's heads for multi-token prediction propose drafts."""
        return self.speculate == "mtp"

    @property
    def max_draft_step_tokens(self) -> int:
        """The maximum number of tokens of a step with drafts. The logits of all these tokens are in memory at once."""
        return min(max(self.max_seqs_per_group, MIN_DRAFT_STEP_LIMIT), self.max_tokens_per_group)

    @property
    def torch_dtype(self) -> "torch.dtype":
        """The dtype of weights and activations."""
        return _torch_dtype(self.dtype)

    @property
    def torch_kv_cache_dtype(self) -> "torch.dtype":
        """The dtype of the KV cache."""
        return _torch_dtype("float8_e4m3fn" if self.kv_cache_dtype == "fp8" else self.dtype)

    @property
    def torch_state_dtype(self) -> "torch.dtype":
        """The dtype of recurrent states."""
        return _torch_dtype(self.state_dtype)


def resolve(
    config: EngineConfig,
    *,
    max_position: int,
    model_dtype: "torch.dtype",
    has_cuda: bool,
    cuda_dtype: "torch.dtype | None" = None,
    has_flash_attention: bool = False,
    has_cute: bool = False,
    has_fp8: bool = False,
    num_gpus: int | None = None,
) -> ResolvedConfig:
    """Choose a value for every setting that is None, and check all settings. Raises ConfigError.

    max_position: maximum number of tokens that the model supports.
    model_dtype: dtype of the checkpoint.
    cuda_dtype: default dtype on a GPU; None for `model_dtype`.
    has_flash_attention: whether FlashAttention is installed and supports the GPU.
    has_cute: whether CuTe DSL is installed and supports the GPU.
    has_fp8: whether the GPU supports FP8.
    num_gpus: number of usable GPUs; None stands for 1 if `has_cuda` is True, and for 0 if not.
    """
    device: Device = config.device or ("cuda" if has_cuda else "cpu")
    if device == "cuda" and not has_cuda:
        raise ConfigError("device is 'cuda', but no usable NVIDIA GPU was found: use device 'cpu'")
    backend = _resolve_attention_backend(config.attention_backend, device, has_flash_attention, has_cute)
    max_model_len = max_position if config.max_model_len is None else config.max_model_len
    _require(1 <= max_model_len <= max_position, "max_model_len", max_model_len, f"1..{max_position} for this model")
    max_num_seqs, max_num_batched_tokens = _resolve_batch(config, device)
    _require(config.block_size in (None, *BLOCK_SIZES), "block_size", config.block_size, f"one of {BLOCK_SIZES}")
    _require(config.num_blocks is None or config.num_blocks >= 2, "num_blocks", config.num_blocks, "at least 2")
    is_valid_state_dtype = config.state_dtype in ("float32", "bfloat16")
    _require(is_valid_state_dtype, "state_dtype", config.state_dtype, "'float32' or 'bfloat16'")
    target_ms = config.target_step_ms
    _require(target_ms is None or 0 < target_ms < float("inf"), "target_step_ms", target_ms, "above 0")
    utilization = config.gpu_memory_utilization
    _require(0 < utilization <= 1, "gpu_memory_utilization", utilization, "above 0 and at most 1")
    _require(config.cpu_cache_gib > 0, "cpu_cache_gib", config.cpu_cache_gib, "above 0")
    _check_offload(config)
    _require(0 <= config.watermark < 1, "watermark", config.watermark, "at least 0 and below 1")
    _require(config.depth in (None, 1, 2), "depth", config.depth, "1 or 2")
    _check_speculation(config)
    preferred_dtype = (cuda_dtype if device == "cuda" else None) or model_dtype
    dtype = config.dtype or str(preferred_dtype).removeprefix("torch.")
    _require(dtype in ("float32", "bfloat16", "float16"), "dtype", dtype, "'float32', 'bfloat16' or 'float16'")
    _check_kv_cache_dtype(config, device, backend, has_fp8)
    num_ranks, max_ranks = config.tensor_parallel_size, MAX_RANKS
    if device == "cuda":
        max_ranks = min(max_ranks, int(has_cuda) if num_gpus is None else num_gpus)
    _require(1 <= num_ranks <= max_ranks, "tensor_parallel_size", num_ranks, f"1..{max_ranks} on this machine")
    _require(num_ranks > 1 or not config.expert_parallel, "expert_parallel", True, "False if tensor_parallel_size is 1")
    _require(num_ranks > 1 or not config.dp_attention, "dp_attention", True, "False if tensor_parallel_size is 1")
    # With different requests, ranks have different hidden states.
    _require(not (config.check_ranks and config.dp_attention), "check_ranks", True, "False with dp_attention")
    settings: dict[str, Any] = {field.name: getattr(config, field.name) for field in fields(IndependentSettings)}
    if config.kv_offload_dir is not None:
        # Engines find each other's files by hash, and "fast" hashes differ between processes.
        settings["prefix_hash"] = "sha256"
    return ResolvedConfig(
        **settings,
        device=device,
        dtype=cast(DType, dtype),
        max_model_len=max_model_len,
        may_shorten_context=config.max_model_len is None,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        depth=config.depth or (1 if device == "cpu" else 2),
        attention_backend=backend,
        graph_mode=_resolve_graph_mode(config.graph_mode, backend),
        compile=_resolve_compile(config.compile, backend),
    )


def _resolve_attention_backend(
    backend: AttentionBackend | None, device: Device, has_flash_attention: bool, has_cute: bool
) -> AttentionBackend:
    if backend is None:
        return "torch" if device == "cpu" else "fastest"
    if backend != "torch" and device == "cpu":
        raise ConfigError(f"attention_backend '{backend}' needs a GPU: use 'torch' with device 'cpu'")
    for name, extra, is_installed in (("flash", "flash-attn", has_flash_attention), ("cutedsl", "cutedsl", has_cute)):
        if backend == name and not is_installed:
            raise ConfigError(
                f"attention_backend '{name}' needs a Hopper GPU and nanovllm-kernels[{extra}]: install that, or use "
                "'triton'"
            )
    return backend


def _check_offload(config: EngineConfig) -> None:
    num_gib, directory, disk_gib = config.kv_offload_gib, config.kv_offload_dir, config.kv_offload_disk_gib
    _require(0 <= num_gib < float("inf"), "kv_offload_gib", num_gib, "at least 0")
    _require(0 < disk_gib < float("inf"), "kv_offload_disk_gib", disk_gib, "above 0")
    _require(config.prefix_caching or not num_gib, "kv_offload_gib", num_gib, "0 without prefix_caching")
    _require(num_gib > 0 or directory is None, "kv_offload_dir", directory, "None without kv_offload_gib")


def _check_speculation(config: EngineConfig) -> None:
    methods = get_args(DraftMethod)
    _require(config.speculate in (None, *methods), "speculate", config.speculate, f"None or one of {methods}")
    num_drafts = config.num_speculative_tokens
    _require(1 <= num_drafts <= MAX_DRAFTS, "num_speculative_tokens", num_drafts, f"1..{MAX_DRAFTS}")
    if (length := config.acceptance_length) is not None:
        _require(config.speculate is not None, "acceptance_length", length, "None without speculate")
        _require(1 <= length <= 1 + num_drafts, "acceptance_length", length, f"1..{1 + num_drafts} (1 + drafts)")
    if config.speculate is not None and config.dp_attention:
        raise ConfigError("speculate does not support dp_attention yet: leave out one of these settings")


def _check_kv_cache_dtype(config: EngineConfig, device: Device, backend: AttentionBackend, has_fp8: bool) -> None:
    _require(config.kv_cache_dtype in ("auto", "fp8"), "kv_cache_dtype", config.kv_cache_dtype, "'auto' or 'fp8'")
    if config.kv_cache_dtype == "auto":
        return
    if device == "cuda" and not has_fp8:
        raise ConfigError("kv_cache_dtype 'fp8' needs a GPU of compute capability 8.9 or more: use 'auto'")
    if backend == "flash":
        raise ConfigError("kv_cache_dtype 'fp8' can't be read by attention_backend 'flash': use 'fastest' or 'triton'")


def _resolve_graph_mode(mode: GraphMode | None, backend: AttentionBackend) -> GraphMode:
    # The torch backend reads lengths on the host, which a captured graph can't do.
    if backend == "torch":
        if mode not in (None, "none"):
            raise ConfigError(
                f"graph_mode '{mode}' needs a GPU and an attention_backend other than 'torch': use 'none'"
            )
        return "none"
    return mode or "full"


def _resolve_compile(uses_compile: bool | None, backend: AttentionBackend) -> bool:
    # On a CPU, weights are packed in layouts that torch.compile can't handle.
    if backend == "torch":
        if uses_compile:
            raise ConfigError("compile needs a GPU and an attention_backend other than 'torch': leave it off")
        return False
    return uses_compile is not False


def _resolve_batch(config: EngineConfig, device: Device) -> tuple[int, int]:
    """Returns (max_num_seqs, max_num_batched_tokens). The default of each depends on the other."""
    max_num_seqs, token_budget = config.max_num_seqs, config.max_num_batched_tokens
    num_groups = max(config.tensor_parallel_size, 1) if config.dp_attention else 1
    # Besides the decodes, each step must have space for one block of tokens per group. If not, prompts might never run.
    min_prompt_tokens = num_groups * (config.block_size or BLOCK_SIZES[0])
    if max_num_seqs is None:
        default = 256 if device == "cuda" else 64
        max_num_seqs = default if token_budget is None else max(min(default, token_budget - min_prompt_tokens), 1)
        max_num_seqs = max(max_num_seqs - max_num_seqs % num_groups, num_groups)
    _require(max_num_seqs >= 1, "max_num_seqs", max_num_seqs, "at least 1")
    is_divisible = max_num_seqs % num_groups == 0
    _require(
        is_divisible,
        "max_num_seqs",
        max_num_seqs,
        f"a multiple of tensor_parallel_size ({num_groups}), for dp_attention",
    )
    min_budget = max_num_seqs + min_prompt_tokens
    if token_budget is None:
        token_budget = max(8192 if device == "cuda" else 1024, min_budget)
    min_prompt_text = "block_size" if num_groups == 1 else "tensor_parallel_size * block_size"
    valid_budgets = f"at least max_num_seqs + {min_prompt_text} = {min_budget}"
    _require(token_budget >= min_budget, "max_num_batched_tokens", token_budget, valid_budgets)
    return max_num_seqs, token_budget


def _require(is_valid: bool, setting: str, value: object, valid_values: str) -> None:
    if not is_valid:
        raise ConfigError(f"{setting} is {value}, but must be {valid_values}")


def _torch_dtype(name: str) -> "torch.dtype":
    # A process that only forwards a configuration should not load torch.
    import torch

    return getattr(torch, name)
