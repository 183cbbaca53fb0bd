"""Runs another engine (a peer) on the same requests, in a process that may use another Python interpreter.

The process runs `peers/run.py`, reads a job as JSON from stdin, and writes lines of JSON to stdout: first the peer's
version, then one line per run.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from tqdm import tqdm

from nanovllm_server.bench.offline.engine_runs import RunTiming
from nanovllm_server.bench.report import BenchError
from nanovllm_server.bench.workload import TokenRequest

PEER_SCRIPT = Path(__file__).parent / "peers" / "run.py"
# The error message of a failed peer shows this many lines of the peer's stderr.
MAX_STDERR_LINES = 40
# Peers must neither download files nor send statistics.
PEER_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
KILL_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class GGUFWeights:
    """Weights for llama.cpp, which converts the GGUF file `source` to `file_type` and keeps it in `cache_directory`."""

    source: str
    file_type: str
    cache_directory: str


@dataclass(frozen=True, slots=True)
class Peer:
    """The engine to compare to.

    name: `peers/peer_<name>.py` runs the peer.
    python: interpreter of the environment in which the peer is installed.
    environment: variables in addition to this process's environment.
    gguf: None except for llama.cpp.
    """

    name: str
    python: Path
    environment: dict[str, str]
    gguf: GGUFWeights | None = None


@dataclass(frozen=True, slots=True)
class PeerDraftHeads:
    """How a peer uses the model's heads for multi-token prediction (MTP).

    num_drafts: drafts per step.
    acceptance_length: mean tokens per step with drafts, which the peer simulates. None: the peer verifies drafts.
    """

    num_drafts: int
    acceptance_length: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerJob:
    """The input of `peers/run.py`.

    max_model_len, max_num_seqs, max_num_batched_tokens: None for the peer's defaults.
    threads: number of threads that our engine uses in torch.
    draft_heads: None for no speculation.
    warm_up_tokens: maximum number of output tokens per request in the warm-up.
    cases: requests of each case. Each case is measured in `repeat` runs.
    """

    model: str
    load_format: str
    device: str
    dtype: str
    threads: int
    gguf: GGUFWeights | None
    max_model_len: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    gpu_memory_utilization: float
    prefix_caching: bool
    state_dtype: str
    tensor_parallel_size: int
    expert_parallel: bool
    draft_heads: PeerDraftHeads | None
    temperature: float
    repeat: int
    needs_time_to_all_first_tokens: bool
    warm_up_tokens: int
    cases: list[list[TokenRequest]]


@dataclass(frozen=True, slots=True)
class PeerResult:
    """The timings of a peer. timings: for each case, one timing per run."""

    name: str
    version: str
    timings: list[list[RunTiming]]


def run_peer(peer: Peer, job: PeerJob) -> PeerResult:
    """Runs a job on a peer. Raises BenchError with the end of the peer's stderr if the peer fails."""
    gpu_environment = {"CUDA_VISIBLE_DEVICES": ""} if job.device == "cpu" else {}
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stderr:
        stdin.write(orjson.dumps(job))
        stdin.seek(0)
        try:
            process = subprocess.Popen(  # noqa: S603 (the user names the interpreter)
                [peer.python, PEER_SCRIPT, peer.name],
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, **PEER_ENVIRONMENT, **gpu_environment, **peer.environment},
                # The peer and its child processes form a group, which can be killed as a whole.
                start_new_session=True,
            )
        except OSError as error:
            raise BenchError(f"can't start the peer with {peer.python}: {error.strerror}") from error
        # stdout ends only when all processes of the peer have closed it: after the peer exits, a thread kills the rest.
        killer_thread = threading.Thread(target=_kill_group_after_exit, args=(process,))
        with process:
            killer_thread.start()
            try:
                lines = _read_lines(peer, job, process.stdout or ())
            except BaseException:
                process.kill()
                raise
            finally:
                killer_thread.join()
        status = process.returncode
        if status != 0 or len(lines) != 1 + len(job.cases) * job.repeat:
            stderr.seek(0)
            last_lines = "\n".join(stderr.read().decode(errors="replace").splitlines()[-MAX_STDERR_LINES:])
            raise BenchError(
                f"{peer.name} failed with status {status} in {peer.python}, which --peer-python can replace. "
                f"The end of its stderr:\n{last_lines}"
            )
    runs = [RunTiming(**line) for line in lines[1:]]
    timings = [runs[start : start + job.repeat] for start in range(0, len(runs), job.repeat)]
    return PeerResult(peer.name, lines[0]["version"], timings)


def _read_lines(peer: Peer, job: PeerJob, stdout: Iterable[bytes]) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    num_runs = len(job.cases) * job.repeat
    with tqdm(total=num_runs, desc=f"{peer.name}, loading", unit="run", disable=not sys.stderr.isatty()) as bar:
        for line in stdout:
            lines.append(orjson.loads(line))
            bar.set_description(peer.name)
            bar.update(len(lines) > 1)  # The first line is the version.
    return lines


def _kill_group_after_exit(process: subprocess.Popen[bytes]) -> None:
    """Waits for a peer to exit, then kills its process group, which frees the GPU's memory."""
    process.wait()
    deadline = time.monotonic() + KILL_TIMEOUT_S
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(process.pid, signal.SIGKILL)
            time.sleep(0.05)
