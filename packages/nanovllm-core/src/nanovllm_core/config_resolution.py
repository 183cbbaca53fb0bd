"""Chooses the engine's final settings from the user's settings, and checks them."""

from dataclasses import fields
from typing import TYPE_CHECKING, Any, cast, get_args

from nanovllm_core.config import (
    BLOCK_SIZES,
    DEFAULT_MAX_BATCHED_TOKENS,
    DEFAULT_MAX_NUM_SEQS,
    MAX_DRAFTS,
    MAX_RANKS,
    AttentionBackend,
    Device,
    DraftMethod,
    DType,
    EngineConfig,
    GraphMode,
    ResolvedConfig,
    SharedSettings,
    TransferCarrier,
)
from nanovllm_core.errors import ConfigError

if TYPE_CHECKING:
    import torch


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
    has_flash_attention, has_cute: whether FlashAttention or CuTe DSL is installed and supports the GPU.
    has_fp8: whether the GPU supports FP8.
    num_gpus: number of usable GPUs; None means 1 if `has_cuda` is True, else 0.
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
    _check_transfer(config)
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
    # With `dp_attention`, ranks have different requests, so their hidden states differ.
    _require(not (config.check_ranks and config.dp_attention), "check_ranks", True, "False with dp_attention")
    settings: dict[str, Any] = {field.name: getattr(config, field.name) for field in fields(SharedSettings)}
    if config.kv_offload_dir is not None or config.uses_transfer:
        # Engines find each other's blocks by hash, and "fast" hashes differ between processes.
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
                f"attention_backend '{name}' needs a Hopper GPU and nanovllm-kernels[{extra}]: otherwise use 'triton'"
            )
    return backend


def _check_offload(config: EngineConfig) -> None:
    num_gib, directory, disk_gib = config.kv_offload_gib, config.kv_offload_dir, config.kv_offload_disk_gib
    _require(0 <= num_gib < float("inf"), "kv_offload_gib", num_gib, "at least 0")
    _require(0 < disk_gib < float("inf"), "kv_offload_disk_gib", disk_gib, "above 0")
    _require(config.prefix_caching or not num_gib, "kv_offload_gib", num_gib, "0 without prefix_caching")
    _require(num_gib > 0 or directory is None, "kv_offload_dir", directory, "left out if kv_offload_gib is 0")


def _check_transfer(config: EngineConfig) -> None:
    listen, peers, prefill_peer = config.transfer_listen, config.transfer_peers, config.prefill_peer
    for name, address in (("transfer_listen", listen), *(("transfer_peers", peer) for peer in peers)):
        if address is not None:
            _require(is_transfer_address(address), name, address, "HOST:PORT or ipc:///PATH")
    for address in peers:
        _require(not address.endswith(":0"), "transfer_peers", address, "an address with a port above 0")
    _require(
        prefill_peer is None or prefill_peer in peers, "prefill_peer", prefill_peer, f"one of transfer_peers {peers}"
    )
    if config.uses_transfer:
        _require(config.kv_offload_gib > 0, "kv_offload_gib", config.kv_offload_gib, "above 0 for transfers")
        is_missing = config.transfer_secret_file is None
        _require(not is_missing, "transfer_secret_file", None, "a file for transfer_listen and transfer_peers")
    carriers = get_args(TransferCarrier)
    _require(config.transfer_carrier in carriers, "transfer_carrier", config.transfer_carrier, f"one of {carriers}")


def is_transfer_address(address: str) -> bool:
    """Whether `address` is HOST:PORT, where an IPv6 address has brackets, or ipc:///PATH."""
    host, colon, port = address.rpartition(":")
    if address.startswith("ipc:///"):
        return len(address) > len("ipc:///")
    is_bracketed = host.startswith("[") and host.endswith("]")
    has_valid_host = bool(host) and (is_bracketed or ":" not in host) and "/" not in host
    return bool(colon) and has_valid_host and port.isascii() and port.isdecimal() and int(port) <= 65535


def _check_speculation(config: EngineConfig) -> None:
    methods = get_args(DraftMethod)
    _require(config.speculate in (None, *methods), "speculate", config.speculate, f"None or one of {methods}")
    num_drafts = config.num_speculative_tokens
    _require(1 <= num_drafts <= MAX_DRAFTS, "num_speculative_tokens", num_drafts, f"1..{MAX_DRAFTS}")
    if (length := config.acceptance_length) is not None:
        _require(config.speculate is not None, "acceptance_length", length, "left out without speculate")
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
        default = DEFAULT_MAX_NUM_SEQS[device]
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
        token_budget = max(DEFAULT_MAX_BATCHED_TOKENS[device], min_budget)
    min_prompt_text = "block_size" if num_groups == 1 else "tensor_parallel_size * block_size"
    valid_budgets = f"at least max_num_seqs + {min_prompt_text} = {min_budget}"
    _require(token_budget >= min_budget, "max_num_batched_tokens", token_budget, valid_budgets)
    return max_num_seqs, token_budget


def _require(is_valid: bool, setting: str, value: object, valid_values: str) -> None:
    if not is_valid:
        raise ConfigError(f"{setting} is {value}, but must be {valid_values}")
