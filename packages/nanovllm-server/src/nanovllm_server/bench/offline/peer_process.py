"""Runs another engine (a peer) on the same requests, in its own process, which may use another interpreter.

`run_peer` starts `peers/run.py` with a job as JSON on stdin. `run.py` writes lines of JSON to stdout: first the peer's
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
from typing import IO, Any

import orjson
from tqdm import tqdm

from nanovllm_server.bench.offline.engine_runs import RunTiming
from nanovllm_server.bench.report import BenchError
from nanovllm_server.bench.workload import TokenRequest

PEER_SCRIPT = Path(__file__).parent / "peers" / "run.py"
# Number of lines of a failed peer's stderr in the error message.
MAX_STDERR_LINES = 40
# Peers must neither download files nor send statistics.
PEER_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
# Time limit for ending the processes that a peer has started.
KILL_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class GGUFWeights:
    """The weights for llama.cpp.

    source: path of the model's GGUF file.
    file_type: type of the weights to which llama.cpp converts the file.
    cache_directory: where converted files are kept.
    """

    source: str
    file_type: str
    cache_directory: str


@dataclass(frozen=True, slots=True)
class Peer:
    """The engine to compare to.

    name: the peer's module is `peers/peer_<name>.py`.
    python: interpreter that has the peer.
    environment: variables in addition to those of this process.
    gguf: None except for llama.cpp.
    """

    name: str
    python: Path
    environment: dict[str, str]
    gguf: GGUFWeights | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerJob:
    """What a peer runs, with the fields of its JSON. The peer chooses each limit that is None.

    threads: number of torch's threads in our engine.
    gguf: None except for llama.cpp.
    state_dtype: dtype of recurrent states.
    times_first_tokens: measure the time of first tokens, possibly with an extra run.
    warm_up_tokens: tokens per request that are generated before the measured runs.
    cases: requests of each case.
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
    temperature: float
    repeat: int
    times_first_tokens: bool
    warm_up_tokens: int
    cases: list[list[TokenRequest]]


@dataclass(frozen=True, slots=True)
class PeerResult:
    """The timings of each case on a peer."""

    name: str
    version: str
    timings: list[list[RunTiming]]


def run_peer(peer: Peer, job: PeerJob) -> PeerResult:
    """Runs a job on a peer. Raises BenchError if the peer fails; the message shows the end of its stderr."""
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stderr:
        stdin.write(orjson.dumps(job))
        stdin.seek(0)
        try:
            process = subprocess.Popen(  # noqa: S603 (the user names the interpreter)
                [peer.python, PEER_SCRIPT, peer.name],
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, **PEER_ENVIRONMENT, **_gpu_environment(job), **peer.environment},
                # A new process group, so that the processes that the peer starts can be killed too.
                start_new_session=True,
            )
        except OSError as error:
            raise BenchError(f"can't start the peer with {peer.python}: {error.strerror}") from error
        # In a thread, because reading lasts until every process that the peer started has closed the pipe.
        killer = threading.Thread(target=_kill_group_after_exit, args=(process,))
        with process:
            killer.start()
            try:
                lines = _read_lines(peer, job, process.stdout or ())
            except BaseException:
                process.kill()
                raise
            finally:
                killer.join()
        status = process.returncode
        if status != 0 or len(lines) != 1 + len(job.cases) * job.repeat:
            raise BenchError(f"{peer.name} failed (status {status}); the end of its stderr:\n{_last_lines(stderr)}")
    runs = [RunTiming(**line) for line in lines[1:]]
    timings = [runs[start : start + job.repeat] for start in range(0, len(runs), job.repeat)]
    return PeerResult(peer.name, lines[0]["version"], timings)


def _read_lines(peer: Peer, job: PeerJob, stdout: Iterable[bytes]) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    total = len(job.cases) * job.repeat
    with tqdm(total=total, desc=f"{peer.name}, loading", unit="run", disable=not sys.stderr.isatty()) as bar:
        for line in stdout:
            lines.append(orjson.loads(line))
            bar.set_description(peer.name)
            bar.update(len(lines) > 1)
    return lines


def _gpu_environment(job: PeerJob) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ""} if job.device == "cpu" else {}


def _kill_group_after_exit(process: subprocess.Popen[bytes]) -> None:
    """Waits for a peer to exit, then kills its process group: our engine needs the GPU's memory next."""
    process.wait()
    deadline = time.monotonic() + KILL_TIMEOUT_S
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(process.pid, signal.SIGKILL)
            time.sleep(0.05)


def _last_lines(stderr: IO[bytes]) -> str:
    stderr.seek(0)
    return "\n".join(stderr.read().decode(errors="replace").splitlines()[-MAX_STDERR_LINES:])
