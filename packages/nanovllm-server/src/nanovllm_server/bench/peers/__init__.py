"""Runs other engines (peers) on the same requests, each in its own process, which may use another interpreter.

`ask` starts `run.py` by its path with a job as JSON on stdin. `run.py` writes lines of JSON to stdout: first the peer's
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

from nanovllm_server.bench.engine import Timing
from nanovllm_server.bench.report import BenchError
from nanovllm_server.bench.workload import Work

RUNNER = Path(__file__).with_name("run.py")
SHOWN_LINES = 40
# Peers must neither download files nor send statistics.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
# Time limit for the processes that a peer started to end after it.
END_S = 10.0


@dataclass(frozen=True, slots=True)
class GGUF:
    """The weights for llama.cpp.

    source: GGUF file of the model.
    weights: file type to which llama.cpp's quantiser converts it.
    directory: cache of the converted files.
    """

    source: str
    weights: str
    directory: str


@dataclass(frozen=True, slots=True)
class Peer:
    """The engine to compare to: `python` runs the module `peer_<name>.py`, with `environment` in addition to ours.

    gguf: None except for llama.cpp.
    """

    name: str
    python: Path
    environment: dict[str, str]
    gguf: GGUF | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerJob:
    """The job of a peer, with the fields of its JSON. A limit that is None is the peer's own choice.

    threads: number of torch's threads in our engine.
    gguf: None except for llama.cpp.
    state_dtype: dtype of recurrent states.
    needs_first: measure the time of first tokens, possibly with an extra run.
    warm_up_tokens: tokens per request that are generated before the measured runs.
    """

    model: str
    load_format: str
    device: str
    dtype: str
    threads: int
    gguf: GGUF | None
    max_model_len: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    gpu_memory_utilization: float
    prefix_caching: bool
    state_dtype: str
    temperature: float
    repeat: int
    needs_first: bool
    warm_up_tokens: int
    cases: list[list[Work]]


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    """A peer's result: the timings of each case."""

    name: str
    version: str
    timings: list[list[Timing]]


def ask(peer: Peer, job: PeerJob) -> PeerAnswer:
    """Runs a job on a peer. Raises BenchError, which shows the end of the peer's stderr, if it fails."""
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stderr:
        stdin.write(orjson.dumps(job))
        stdin.seek(0)
        try:
            process = subprocess.Popen(  # noqa: S603 (the user names the interpreter)
                [peer.python, RUNNER, peer.name],
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, **ENVIRONMENT, **_hide_gpus(job), **peer.environment},
                # A new process group, so that the processes that the peer starts can be killed too.
                start_new_session=True,
            )
        except OSError as error:
            raise BenchError(f"can't start the peer with {peer.python}: {error.strerror}") from error
        # In a thread, because reading lasts until every process that the peer started has closed the pipe.
        end = threading.Thread(target=_end, args=(process,))
        with process:
            end.start()
            try:
                lines = _read(peer, job, process.stdout or ())
            except BaseException:
                process.kill()
                raise
            finally:
                end.join()
        status = process.returncode
        if status != 0 or len(lines) != 1 + len(job.cases) * job.repeat:
            raise BenchError(f"{peer.name} failed (status {status}); the end of its stderr:\n{_tail(stderr)}")
    runs = [Timing(line["num_tokens"], line["last"], line["first"]) for line in lines[1:]]
    timings = [runs[start : start + job.repeat] for start in range(0, len(runs), job.repeat)]
    return PeerAnswer(peer.name, lines[0]["version"], timings)


def _read(peer: Peer, job: PeerJob, stdout: Iterable[bytes]) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    total = len(job.cases) * job.repeat
    with tqdm(total=total, desc=f"{peer.name}, loading", unit="run", disable=not sys.stderr.isatty()) as bar:
        for line in stdout:
            lines.append(orjson.loads(line))
            bar.set_description(peer.name)
            bar.update(len(lines) > 1)
    return lines


def _hide_gpus(job: PeerJob) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ""} if job.device == "cpu" else {}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Waits for a peer, then kills the rest of its process group: our engine needs the GPU's memory next."""
    process.wait()
    deadline = time.monotonic() + END_S
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(process.pid, signal.SIGKILL)
            time.sleep(0.05)


def _tail(stderr: IO[bytes]) -> str:
    stderr.seek(0)
    return "\n".join(stderr.read().decode(errors="replace").splitlines()[-SHOWN_LINES:])
