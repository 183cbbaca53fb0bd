"""Reads the memory of other processes and hosts with NIXL. Source: https://github.com/ai-dynamo/nixl"""

import importlib
import logging
import secrets
import time
from types import ModuleType
from typing import Any

from nanovllm_core.errors import ConfigError

# Packages for CUDA 13 and CUDA 12, which have the same interface.
_PACKAGES = ("nixl_cu13", "nixl_cu12")
_MIN_POLL_S, _MAX_POLL_S = 1e-5, 1e-3
# The agent gives up a copy that takes longer. The copy's targets are never used again.
MAX_READ_S = 60.0
_log = logging.getLogger(__name__)


class CopyInProgressError(Exception):
    """A copy may still write to its targets, which must never be used again."""


class NixlAgent:
    """A NIXL agent that has registered `num_bytes` bytes of memory at `address`. Threads may share an agent."""

    def __init__(self, api: ModuleType, address: int, num_bytes: int):
        # In this mode, several threads may use the agent. NIXL's progress thread is off: it would always occupy a core.
        sync_mode = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        config = api.nixl_agent_config(enable_prog_thread=False, sync_mode=sync_mode)
        self._agent: Any = api.nixl_agent(f"nanovllm-{secrets.token_hex(8)}", config)
        self._agent.register_memory([(address, num_bytes, 0, "")], "DRAM")
        self.metadata: bytes = self._agent.get_agent_metadata()

    def add_peer(self, metadata: bytes) -> str:
        """Register a peer by its `NixlAgent.metadata`. Returns the peer's name for `read`."""
        name = self._agent.add_remote_agent(metadata)
        return name.decode() if isinstance(name, bytes) else name

    def serve_reads(self) -> None:
        """Let peers read the memory. Call repeatedly while peers may read, because some networks need these calls."""
        self._agent.get_new_notifs()

    def read(self, peer: str, sources: list[tuple[int, int, int]], targets: list[tuple[int, int, int]]) -> bool:
        """Copy the peer's memory. Returns whether all copies succeeded. After a return, no copy is in progress.

        sources, targets: (address, bytes, 0) of each copy.
        Raises CopyInProgressError if a failed copy can't be stopped, or if a copy takes longer than MAX_READ_S.
        """
        agent, handle, deadline_s = self._agent, None, time.monotonic() + MAX_READ_S
        try:
            descriptors = agent.get_xfer_descs(targets, "DRAM"), agent.get_xfer_descs(sources, "DRAM")
            handle = agent.initialize_xfer("READ", *descriptors, peer)
            state, poll_s = agent.transfer(handle), _MIN_POLL_S
            # If the peer ends, the state changes to an error.
            while state == "PROC" and time.monotonic() < deadline_s:
                time.sleep(poll_s)
                poll_s = min(2 * poll_s, _MAX_POLL_S)
                state = agent.check_xfer_state(handle)
        except Exception as error:  # noqa: BLE001 (NIXL has exceptions of its own)
            _log.warning("NIXL could not read the memory of a peer: %s", error)
            state = "ERR"
        if handle is not None:
            try:
                agent.release_xfer_handle(handle)
            except Exception as error:
                raise CopyInProgressError(f"NIXL can't stop a copy: {error}") from error
        # The network may still write to the targets, although the handle is released: NIXL's UCX backend requests that
        # the copy is cancelled, and does not wait for the end (`nixlUcxBackendReqH::release`).
        if state == "PROC":
            raise CopyInProgressError(f"the peer did not complete a copy with NIXL in {MAX_READ_S:g} s")
        return state == "DONE"


def start_nixl(address: int, num_bytes: int, *, is_required: bool) -> NixlAgent | None:
    """An agent for a memory; None if NIXL can't be used. Raises ConfigError instead if `is_required`."""
    for package in _PACKAGES:
        try:
            api = importlib.import_module(f"{package}._api")
        except ImportError:
            continue
        # NIXL writes its log to the standard output. Pass warnings and errors to the handlers of this process.
        logger = logging.getLogger("nixl")
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.WARNING)
        try:
            return NixlAgent(api, address, num_bytes)
        except Exception as error:  # (NIXL has exceptions of its own)
            if is_required:
                raise ConfigError(f"transfer_carrier is 'nixl', but NIXL can't start: {error}") from error
            _log.warning("NIXL can't start, so blocks are fetched without it: %s", error)
            return None
    if is_required:
        raise ConfigError(
            "transfer_carrier is 'nixl', which needs NIXL: install nanovllm-core[nixl-cu13] or nanovllm-core[nixl-cu12]"
        )
    return None
