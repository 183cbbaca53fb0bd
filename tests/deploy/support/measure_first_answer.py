"""Measures the time from `git clone` to the first answer: `python measure_first_answer.py [--limit-s S] [-- FLAG ...]`.

The clone's packages come only from uv's cache, which `uv sync` in this checkout fills. The cache of nanovllm is empty,
so the time includes the conversion of the default model and the compilation of kernels. Uncommitted changes are not
measured. The exit status is 1 if the time exceeds the limit.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[3]
LIMIT_S = 40.0
TIMEOUT_S = 600.0
BODY = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 16, "temperature": 0}
# These variables would lead uv or the server to this checkout's environment.
OWN_VARIABLES = {"VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT", "PYTHONPATH", "PYTHONHOME"}


def make_environment(cache: Path) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in OWN_VARIABLES}
    return inherited | {"UV_OFFLINE": "1", "NANOVLLM_CACHE": str(cache)}


@contextmanager
def start_server(clone: Path, environment: Mapping[str, str], flags: list[str]):
    command = ["uv", "run", "nanovllm-server", "--port", "0", *flags]
    with subprocess.Popen(command, cwd=clone, env=environment, stdout=subprocess.PIPE, text=True) as process:
        watchdog = threading.Timer(TIMEOUT_S, process.kill)
        watchdog.start()
        try:
            urls = (found[0] for line in process.stdout if (found := re.findall(r"http://\S+:\d+", line)))
            url = next(urls, None)
            if url is None:
                raise RuntimeError(
                    f"{' '.join(command)} ended with status {process.wait()} before the server was ready"
                )
            yield url
        finally:
            watchdog.cancel()
            process.terminate()


def ask(url: str) -> str:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(BODY).encode(), headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
        return json.load(response)["choices"][0]["message"]["content"]


def measure(flags: list[str]) -> float:
    with tempfile.TemporaryDirectory(prefix="nanovllm-first-answer-") as folder:
        clone, environment = Path(folder) / "clone", make_environment(Path(folder) / "cache")
        begin_s = last_s = time.monotonic()

        def report(phase: str) -> None:
            nonlocal last_s
            now_s = time.monotonic()
            print(f"{phase:40} {now_s - last_s:6.1f} s", flush=True)
            last_s = now_s

        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True, timeout=TIMEOUT_S)
        report("git clone")
        with start_server(clone, environment, flags) as url:
            report("uv run nanovllm-server, until ready")
            content = ask(url)
            report("first answer")
        print(f"{'sum':40} {last_s - begin_s:6.1f} s\nthe answer: {content!r}")
        return last_s - begin_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help=f"limit in seconds (default: {LIMIT_S:g})")
    parser.add_argument("flags", nargs="*", metavar="FLAG", help="arguments of nanovllm-server, after --")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, load of the last minute before the run {load:.1f}")
    total_s = measure(arguments.flags)
    if total_s > arguments.limit_s:
        print(f"the first answer took longer than {arguments.limit_s:g} s", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
