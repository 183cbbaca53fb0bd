"""Types that describe copies of cache entries between the tiers. An entry is a block or a checkpoint."""

from dataclasses import dataclass
from typing import NamedTuple

from nanovllm_core.cache.file_tier import FileRead
from nanovllm_core.cache.host_memory import EntryKind
from nanovllm_core.request_state import BlockHash, RequestState


class EntryCopy(NamedTuple):
    """A copy of one entry. entry: index in the cache of the request group `group`. slot: index in the host memory.

    has_draft_entries: whether the block also has a draft model's entries for all its tokens.
    """

    group: int
    kind: EntryKind
    block_hash: BlockHash
    entry: int
    slot: int
    has_draft_entries: bool


class Target(NamedTuple):
    """An entry that a request lacks. entry: the request's block or state slot, into which the entry is loaded.

    found: index of the entry in the cache; None if the cache lacks the entry.
    slot: index of the entry in the host memory; None if the host memory lacks the entry.
    """

    kind: EntryKind
    block_hash: BlockHash
    entry: int
    found: int | None
    slot: int | None


@dataclass(slots=True, eq=False)
class PrefixLoad:
    """Copies of a prefix to the blocks and the state slot of a request, which waits for the copies.

    held: entries of the prefix that are in the cache already, as pairs (kind, entry). The load holds them.
    reads: reads of files into the host memory, which precede the copies.
    num_tokens: number of tokens by which the load makes the cached prefix longer.
    num_file_tokens: number of these tokens whose blocks are read from files.
    epoch: number of calls of `HostTier.forget` before the load was started.
    begin_s: time of `time.perf_counter` at which the load was started.
    is_ended: whether all writes to the request's blocks have ended.
    is_usable: whether the copies of all entries have succeeded, so that the entries may be found by hash.
    may_retry: whether the request may load again, because this load failed to read a file.
    """

    request: RequestState
    group: int
    copies: list[EntryCopy]
    held: list[tuple[EntryKind, int]]
    reads: list[FileRead]
    num_tokens: int
    num_file_tokens: int
    epoch: int
    begin_s: float
    is_ended: bool = False
    is_usable: bool = False
    may_retry: bool = False


@dataclass(slots=True, eq=False)
class BatchInFlight:
    """A launched batch, which is unusable if `HostTier.epoch` or `HostMemory.num_failures` changes before it ends."""

    copies: list[EntryCopy]
    loads: list[PrefixLoad]
    num_bytes: int
    begin_s: float
    epoch: int
    num_failures: int
