"""The engine's configuration: what the user sets (`EngineConfig`), and all values decided by `resolve`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pathlib import Path

    import torch

Device = Literal["cpu", "cuda"]
AttentionBackend = Literal["torch", "triton", "flash", "cutedsl", "fastest"]
# "auto": the KV cache has the dtype of the weights. "fp8": e4m3 with scales.
KVCacheDtype = Literal["auto", "fp8"]
PrefixHash = Literal["fast", "sha256"]
StateDtype = Literal["float32", "bfloat16"]
# Steps replayed from CUDA graphs. "none": no steps. "full_decode_only": steps in which every request decodes.
# "piecewise": all steps, in several graphs between which attention is launched. "full": all steps, in one graph each.
GraphMode = Literal["none", "full_decode_only", "piecewise", "full"]

PAGE_SIZES = (16, 32, 64, 128)
GIB = 1 << 30
# Default time limits in seconds of a step with prompts only, and of a step with prompts and decodes. Shorter limits
# reduce the throughput of prompts, on a CPU by 44 % for 250 ms without decodes.
PROMPT_STEP_S: dict[Device, float] = {"cpu": 0.5, "cuda": 0.16}
MIXED_STEP_S: dict[Device, float] = {"cpu": 0.25, "cuda": 0.05}


class ConfigError(ValueError):
    """An invalid setting. The message names the setting, its value and the valid values."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine. With None the engine chooses.

    device: device of the model; by default CUDA if there is a GPU.
    dtype: dtype of weights, KV cache and activations; by default the model's own. On a CPU some activations of a bf16
        model are float32.
    max_model_len: most tokens (prompt + output) of a request; by default as many as the model has positions for, or as
        many as the cache holds.
    max_num_seqs: most requests running at once.
    max_num_batched_tokens: token budget of one step.
    target_step_ms: time limit of a step with prompts and decodes, in milliseconds. A shorter limit makes decodes
        smoother and prompts slower. By default 50 on a GPU and 250 on a CPU, or four decode steps if these take longer.
    kv_cache_dtype: "fp8" stores keys and values as e4m3 with a scale per head of each token. The cache then holds about
        twice as many tokens, and decodes read half as many bytes. "auto" uses `dtype`.
    block_size: tokens per KV block: 16, 32, 64 or 128. Prompts share whole blocks. By default 128 where FlashAttention
        reads the cache, because that is faster, and 16 elsewhere.
    num_blocks: blocks of the KV cache; by default as many as the memory allows.
    state_dtype: dtype of the states of recurrent layers. "bfloat16" halves their memory.
    num_state_slots: slots for the states of running requests and for checkpoints; by default as many as the memory
        allows.
    gpu_memory_utilization: share of the GPU's memory for weights, activations and cache together.
    cpu_cache_gib: size of the KV cache on a CPU, in GiB.
    prefix_caching: keep full blocks of finished requests for later prompts that begin with the same tokens.
    prefix_hash: "fast", or "sha256" if clients that do not trust each other share the server.
    watermark: share of the blocks kept free when a new request is admitted, for running requests.
    depth: steps in flight at once; by default 2 on a GPU, so that the host plans while the GPU computes; 1 on a CPU.
    seed: base of the seeds of requests without a seed.
    attention_backend: by default the fastest installed backend, chosen for prompts and decodes separately.
    graph_mode: steps that are replayed from CUDA graphs; by default all that can be captured.
    compile: use torch.compile between attention operators; on by default on a GPU.
    forbid_sync: for debugging: fail if launching a step waits for the GPU.
    trace: file to which the times of each step are written, for Perfetto or chrome://tracing.
    """

    device: Device | None = None
    dtype: torch.dtype | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    target_step_ms: float | None = None
    kv_cache_dtype: KVCacheDtype = "auto"
    block_size: int | None = None
    num_blocks: int | None = None
    state_dtype: StateDtype = "float32"
    num_state_slots: int | None = None
    gpu_memory_utilization: float = 0.9
    cpu_cache_gib: float = 2.0
    prefix_caching: bool = True
    prefix_hash: PrefixHash = "fast"
    watermark: float = 0.01
    depth: Literal[1, 2] | None = None
    seed: int = 0
    attention_backend: AttentionBackend | None = None
    graph_mode: GraphMode | None = None
    compile: bool | None = None
    forbid_sync: bool = False
    trace: Path | None = None


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """`EngineConfig` with a value for every setting, except those that depend on free memory.

    may_shorten: `max_model_len` is a default and may be lowered to what the cache holds.
    target_step_s: `target_step_ms` in seconds; None to use `mixed_step_s` or the time of decode steps.
    prompt_step_s: time limit of a step with prompts only, in seconds. A new request waits for at most two such steps.
    mixed_step_s: time limit in seconds of a step with prompts and decodes without a target, unless four decode steps
        take longer.
    block_size: None until the model is built, see `cache.memory.choose_block_size`.
    """

    device: Device
    dtype: torch.dtype
    max_model_len: int
    may_shorten: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    target_step_s: float | None
    prompt_step_s: float
    mixed_step_s: float
    kv_cache_dtype: torch.dtype
    block_size: int | None
    num_blocks: int | None
    state_dtype: torch.dtype
    num_state_slots: int | None
    gpu_memory_utilization: float
    cpu_cache_gib: float
    prefix_caching: bool
    prefix_hash: PrefixHash
    watermark: float
    depth: Literal[1, 2]
    seed: int
    attention_backend: AttentionBackend
    graph_mode: GraphMode
    compile: bool
    forbid_sync: bool
    trace: Path | None


def resolve(
    config: EngineConfig,
    *,
    max_position: int,
    model_dtype: torch.dtype,
    has_cuda: bool,
    cuda_dtype: torch.dtype | None = None,
    has_flash_attention: bool = False,
    has_cute: bool = False,
    has_fp8: bool = False,
) -> ResolvedConfig:
    """Choose a value for every setting that is None, and check all settings.

    max_position: longest sequence of the model, in tokens.
    model_dtype: dtype of the model's checkpoint.
    has_cuda: whether this machine has a usable GPU.
    cuda_dtype: dtype that the model prefers on a GPU; None for `model_dtype`.
    has_flash_attention, has_cute: whether FlashAttention and CuTe DSL are installed and support the GPU.
    has_fp8: whether the GPU supports FP8.
    Raises ConfigError.
    """
    # Imported here, because processes that only pass a configuration on do not need torch.
    import torch

    device: Device = config.device or ("cuda" if has_cuda else "cpu")
    if device == "cuda" and not has_cuda:
        raise ConfigError("device is 'cuda', but no usable NVIDIA GPU was found: use device 'cpu'")
    backend = _resolve_attention(config.attention_backend, device, has_flash_attention, has_cute)
    max_model_len = max_position if config.max_model_len is None else config.max_model_len
    _require(1 <= max_model_len <= max_position, "max_model_len", max_model_len, f"1..{max_position} for this model")
    max_num_seqs, budget = _resolve_batch(config, device)
    _require(config.block_size in (None, *PAGE_SIZES), "block_size", config.block_size, f"one of {PAGE_SIZES}")
    _require(config.num_blocks is None or config.num_blocks >= 2, "num_blocks", config.num_blocks, "at least 2")
    names = ("float32", "bfloat16")
    _require(config.state_dtype in names, "state_dtype", config.state_dtype, "'float32' or 'bfloat16'")
    target_ms = config.target_step_ms
    _require(target_ms is None or 0 < target_ms < float("inf"), "target_step_ms", target_ms, "above 0")
    utilization = config.gpu_memory_utilization
    _require(0 < utilization <= 1, "gpu_memory_utilization", utilization, "above 0 and at most 1")
    _require(config.cpu_cache_gib > 0, "cpu_cache_gib", config.cpu_cache_gib, "above 0")
    _require(0 <= config.watermark < 1, "watermark", config.watermark, "at least 0 and below 1")
    _require(config.depth in (None, 1, 2), "depth", config.depth, "1 or 2")
    dtype = config.dtype or (cuda_dtype if device == "cuda" else None) or model_dtype
    _require(dtype in (torch.float32, torch.bfloat16, torch.float16), "dtype", dtype, "float32, bfloat16 or float16")
    kv_cache_dtype = dtype
    if _wants_fp8(config, device, backend, has_fp8):
        kv_cache_dtype = torch.float8_e4m3fn
    return ResolvedConfig(
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        may_shorten=config.max_model_len is None,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        target_step_s=None if target_ms is None else target_ms / 1e3,
        prompt_step_s=PROMPT_STEP_S[device],
        mixed_step_s=MIXED_STEP_S[device],
        kv_cache_dtype=kv_cache_dtype,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        state_dtype=torch.float32 if config.state_dtype == "float32" else torch.bfloat16,
        num_state_slots=config.num_state_slots,
        gpu_memory_utilization=utilization,
        cpu_cache_gib=config.cpu_cache_gib,
        prefix_caching=config.prefix_caching,
        prefix_hash=config.prefix_hash,
        watermark=config.watermark,
        depth=config.depth or (1 if device == "cpu" else 2),
        seed=config.seed,
        attention_backend=backend,
        graph_mode=_resolve_graphs(config.graph_mode, backend),
        compile=_resolve_compile(config.compile, backend),
        forbid_sync=config.forbid_sync,
        trace=config.trace,
    )


def _resolve_attention(
    backend: AttentionBackend | None, device: Device, has_flash_attention: bool, has_cute: bool
) -> AttentionBackend:
    if backend is None:
        return "torch" if device == "cpu" else "fastest"
    if backend != "torch" and device == "cpu":
        raise ConfigError(f"attention_backend '{backend}' needs a GPU: use 'torch' with device 'cpu'")
    for name, extra, is_there in (("flash", "flash-attn", has_flash_attention), ("cutedsl", "cutedsl", has_cute)):
        if backend == name and not is_there:
            raise ConfigError(
                f"attention_backend '{name}' needs a Hopper GPU and nanovllm-kernels[{extra}]: install that, or use "
                "'triton'"
            )
    return backend


def _wants_fp8(config: EngineConfig, device: Device, backend: AttentionBackend, has_fp8: bool) -> bool:
    _require(config.kv_cache_dtype in ("auto", "fp8"), "kv_cache_dtype", config.kv_cache_dtype, "'auto' or 'fp8'")
    if config.kv_cache_dtype == "auto":
        return False
    if device == "cuda" and not has_fp8:
        raise ConfigError("kv_cache_dtype 'fp8' needs a GPU of compute capability 8.9 or more: use 'auto'")
    if backend == "flash":
        raise ConfigError("kv_cache_dtype 'fp8' can't be read by attention_backend 'flash': use 'fastest' or 'triton'")
    return True


def _resolve_graphs(mode: GraphMode | None, backend: AttentionBackend) -> GraphMode:
    # The plain torch backend reads lengths on the host, which a graph can't do.
    if backend == "torch":
        if mode not in (None, "none"):
            raise ConfigError(
                f"graph_mode '{mode}' needs a GPU and an attention_backend other than 'torch': use 'none'"
            )
        return "none"
    return mode or "full"


def _resolve_compile(wanted: bool | None, backend: AttentionBackend) -> bool:
    # On a CPU weights are packed in special layouts that torch.compile can't handle.
    if backend == "torch":
        if wanted:
            raise ConfigError("compile needs a GPU and an attention_backend other than 'torch': leave it off")
        return False
    return wanted is not False


def _resolve_batch(config: EngineConfig, device: Device) -> tuple[int, int]:
    """`max_num_seqs` and `max_num_batched_tokens`. The default of each depends on the other."""
    max_num_seqs, budget = config.max_num_seqs, config.max_num_batched_tokens
    block_size = config.block_size or min(PAGE_SIZES)
    if max_num_seqs is None:
        most = 256 if device == "cuda" else 64
        max_num_seqs = most if budget is None else max(min(most, budget - block_size), 1)
    _require(max_num_seqs >= 1, "max_num_seqs", max_num_seqs, "at least 1")
    # With a smaller budget, max_num_seqs decodes would leave less than one block for prompts, which would never run.
    least = max_num_seqs + block_size
    if budget is None:
        budget = max(8192 if device == "cuda" else 1024, least)
    _require(
        budget >= least,
        "max_num_batched_tokens",
        budget,
        f"at least max_num_seqs + block_size = {least}",
    )
    return max_num_seqs, budget


def _require(holds: bool, name: str, value: object, valid: str) -> None:
    if not holds:
        raise ConfigError(f"{name} is {value}, but must be {valid}")
