"""Defines the user's settings (`EngineConfig`), and the final settings for the device and model (`ResolvedConfig`)."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

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
TransferCarrier = Literal["auto", "shm", "nixl", "tcp"]

BLOCK_SIZES: tuple[BlockSize, ...] = (16, 32, 64, 128)
GIB = 1 << 30
MAX_RANKS = 16  # ranks of one engine
# Maximum number of drafts per request and step. A decode and its drafts then have at most as many tokens as the
# smallest block, so they need at most one new block.
MAX_DRAFTS = BLOCK_SIZES[0] - 1
# A step with drafts may have this many tokens even if `max_num_seqs` is smaller, see `max_draft_step_tokens`.
MIN_DRAFT_STEP_LIMIT = 64
DEFAULT_MAX_NUM_SEQS: dict[Device, int] = {"cpu": 64, "cuda": 256}
# The default is larger if `max_num_seqs` needs more.
DEFAULT_MAX_BATCHED_TOKENS: dict[Device, int] = {"cpu": 1024, "cuda": 8192}
# Default time limit of a step without decodes. A shorter limit reduces the throughput of prompts. A longer limit delays
# new requests, which may wait for two steps in flight.
PROMPT_STEP_LIMIT_S: dict[Device, float] = {"cpu": 0.5, "cuda": 0.16}
# Default time limit of a step with prompts and decodes.
MIXED_STEP_LIMIT_S: dict[Device, float] = {"cpu": 0.25, "cuda": 0.05}


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSettings:
    """Settings that `EngineConfig` and `ResolvedConfig` share. Resolving changes only `prefix_hash`.

    None means the default in the help text. If the help text states no default, None turns the feature off.

    The server makes a flag from each field of this class and of `EngineConfig`. A field's annotation is the help text.
    """

    target_step_ms: Annotated[
        float | None,
        "time limit of a step with prompts and decodes, in ms; a shorter limit makes streams smoother and prompts "
        "slower; by default 50 on a GPU and 250 on a CPU, or the time of four decode steps if that is longer",
    ] = None
    kv_cache_dtype: Annotated[
        KVCacheDtype,
        "auto: dtype of the activations; fp8: e4m3 with a scale per head and token, which halves the size of the cache",
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
        "evicted, if that is faster than computing them; 0: none",
    ] = 0.0
    kv_offload_dir: Annotated[
        Path | None,
        "directory for files of cached blocks, which outlive the engine; engines of one user and host may share it; "
        "needs kv_offload_gib",
    ] = None
    kv_offload_disk_gib: Annotated[float, "maximum size of all files in kv_offload_dir, in GiB"] = 100.0
    transfer_listen: Annotated[
        str | None,
        "address at which other engines fetch cached blocks from this engine's host memory, as HOST:PORT or "
        "ipc:///PATH; port 0: any free port; needs kv_offload_gib and transfer_secret_file",
    ] = None
    transfer_peers: Annotated[
        tuple[str, ...],
        "addresses of the engines from which requests may fetch the blocks of their prompts; needs kv_offload_gib and "
        "transfer_secret_file",
    ] = ()
    prefill_peer: Annotated[
        str | None, "address, among transfer_peers, of the engine that computes long prompts for this engine"
    ] = None
    transfer_secret_file: Annotated[
        Path | None,
        "file with a secret of at least 32 bytes that all engines share; only this user may have access to the file",
    ] = None
    transfer_carrier: Annotated[
        TransferCarrier,
        "how blocks are fetched; shm: from the peer's memory, on one host; nixl: by NIXL, which uses RDMA; tcp: over "
        "the connection to the peer; auto: the first of these that works",
    ] = "auto"
    watermark: Annotated[
        float, "share of all blocks that must stay free for running requests when a request starts"
    ] = 0.01
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
        "answer; ngram: find an earlier occurrence of the last tokens, and propose the tokens after it; draft: propose "
        "the tokens of a smaller model; mtp: propose the tokens of the model's heads for multi-token prediction",
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

    @property
    def uses_transfer(self) -> bool:
        """Whether blocks travel between this engine and other engines."""
        return self.transfer_listen is not None or bool(self.transfer_peers)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(SharedSettings):
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
    max_num_seqs: Annotated[
        int | None,
        f"maximum number of requests that run at once; by default {DEFAULT_MAX_NUM_SEQS['cuda']} on a GPU and "
        f"{DEFAULT_MAX_NUM_SEQS['cpu']} on a CPU",
    ] = None
    max_num_batched_tokens: Annotated[
        int | None,
        f"maximum number of tokens that a step computes; by default {DEFAULT_MAX_BATCHED_TOKENS['cuda']} on a GPU and "
        f"{DEFAULT_MAX_BATCHED_TOKENS['cpu']} on a CPU, or more if max_num_seqs needs more",
    ] = None
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
        "all steps, with attention launched between graphs; full: all steps, with one graph per step; by default full "
        "on a GPU and none on a CPU",
    ] = None
    compile: Annotated[bool | None, "use torch.compile between attention operators on a GPU"] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig(SharedSettings):
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
        """The number of groups of requests: one group per rank with `dp_attention`, else one group for all ranks."""
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


def _torch_dtype(name: str) -> "torch.dtype":
    # A process that only forwards a configuration should not load torch.
    import torch

    return getattr(torch, name)
