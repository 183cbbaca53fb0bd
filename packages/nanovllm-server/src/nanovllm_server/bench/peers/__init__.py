"""Other engines that do the same work, each by a module of its own that is run in a process of its own.

That process may have another interpreter and other packages than ours, and none of nanovllm's: `run.py` is started by
its path, with a job as JSON on stdin, and answers on stdout in lines of JSON: first the peer's version, then each run
as it is done. `ask` is our end of it.
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
# A model is a directory, and what isn't in it is an error: nothing is fetched, and nothing sent.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
# How long what a peer started may take to die after it.
END_S = 10.0


@dataclass(frozen=True, slots=True)
class GGUF:
    """The weights that llama.cpp computes with.

    source: a file of the same model. weights: the file type that llama.cpp's quantiser makes of it. directory: where
    the files that it makes are kept.
    """

    source: str
    weights: str
    directory: str


@dataclass(frozen=True, slots=True)
class Peer:
    """Which engine to compare to: the module `peer_<name>.py`, run by `python` with `environment` added to ours.

    gguf: for llama.cpp alone.
    """

    name: str
    python: Path
    environment: dict[str, str]
    gguf: GGUF | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerJob:
    """What a peer is told, field by field as in its JSON. A limit that is None is left to the peer.

    threads: of torch in our engine. gguf: for llama.cpp alone. state_dtype: of the states of recurrent layers.
    needs_first: whether it matters when every request has its first token, which may take a run more to find out.
    warm_up_tokens: how many tokens to make of each case's requests before the runs that count.
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
    """What a peer did: the timings of each case."""

    name: str
    version: str
    timings: list[list[Timing]]


def ask(peer: Peer, job: PeerJob) -> PeerAnswer:
    """Have a peer do a job. Raises BenchError, with the end of what the peer wrote to stderr, when it can't."""
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stderr:
        stdin.write(orjson.dumps(job))
        stdin.seek(0)
        try:
            process = subprocess.Popen(  # noqa: S603 (whoever calls says which interpreter)
                [peer.python, RUNNER, peer.name],
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, **ENVIRONMENT, **_hide_gpus(job), **peer.environment},
                # A group of its own, so that the processes it starts can be ended with it.
                start_new_session=True,
            )
        except OSError as error:
            raise BenchError(f"can't start the peer with {peer.python}: {error.strerror}") from error
        # Beside the reading, which lasts as long as anything that the peer started holds the other end.
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
    """Wait for a peer, and end what is left of its group: its memory on the GPU is needed next."""
    process.wait()
    deadline = time.monotonic() + END_S
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(process.pid, signal.SIGKILL)
            time.sleep(0.05)


def _tail(stderr: IO[bytes]) -> str:
    stderr.seek(0)
    return "\n".join(stderr.read().decode(errors="replace").splitlines()[-SHOWN_LINES:])
