import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import toy_model
from grammars import EBNF, JSON, OBJECT, REGEX, SLOW

from nanovllm_core import GrammarError, GrammarSpec, Vocabulary
from nanovllm_core.grammar import vetting
from nanovllm_core.grammar.vetting import Vetter


def make_vetter() -> Vetter:
    return Vetter(toy_model.toy_vocabulary, toy_model.VOCAB)


@pytest.fixture(scope="module")
def strict_vetter():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vetting, "MAX_SECONDS", 2.0)
        vetter = make_vetter()
    vetter.vet(JSON)
    yield vetter
    vetter.close()


def test_slow_grammar_is_refused_without_delaying_others(strict_vetter):
    # If a busy machine stops this process, the slow grammars may be refused first.
    assert any(are_quick_grammars_first(strict_vetter) for _ in range(3))


def are_quick_grammars_first(vetter: Vetter) -> bool:
    outcomes: list[str] = []

    def refuse() -> None:
        with pytest.raises(GrammarError) as caught:
            vetter.vet(SLOW)
        outcomes.append(str(caught.value))

    slow_threads = [threading.Thread(target=refuse) for _ in range(3)]
    for thread in slow_threads:
        thread.start()
    for _ in range(3):
        vetter.vet(REGEX)
        outcomes.append("quick")
    for thread in slow_threads:
        thread.join()
    refusals = [outcome for outcome in outcomes if outcome != "quick"]
    assert all(
        message.startswith("this grammar takes more than 2 s to compile: make it smaller") for message in refusals
    )
    assert (len(refusals), len(outcomes)) == (3, 6)
    return outcomes[:3] == ["quick"] * 3


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
def test_time_in_which_a_grammar_gets_no_cpu_does_not_count(strict_vetter):
    properties = {f"name {index}": {"type": "integer"} for index in range(700)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    thread = threading.Thread(
        target=lambda: outcomes.append(strict_vetter.vet(GrammarSpec("json_schema", json.dumps(schema))))
    )
    outcomes = []
    thread.start()
    while not (trial_pids := child_pids(strict_vetter.pid)):
        assert thread.is_alive()
    os.kill(trial_pids[0], signal.SIGSTOP)
    # This time is longer than the limit of `strict_vetter`.
    time.sleep(2.5)
    assert outcomes == []
    os.kill(trial_pids[0], signal.SIGCONT)
    thread.join()
    assert outcomes[0].rules


def test_killed_process_is_replaced_and_memory_is_limited_and_unexpected_errors_are_reported(strict_vetter):
    old_pid = strict_vetter.pid
    strict_vetter._max_bytes = 24 << 20
    os.kill(old_pid, signal.SIGKILL)
    strict_vetter.vet(REGEX)
    assert strict_vetter.pid != old_pid
    with pytest.raises(GrammarError, match=r"it has a \( without \)"):
        strict_vetter.vet(GrammarSpec("regex", "(("))
    with pytest.raises(GrammarError, match="this grammar takes more than 24 MiB to compile"):
        strict_vetter.vet(SLOW)
    strict_vetter.vet(REGEX)
    with pytest.raises(RuntimeError, match="ValidationError: Invalid enum value 'unknown'") as caught:
        strict_vetter.vet(GrammarSpec("unknown", "x"))
    assert "in _compile_and_exit" in caught.value.__notes__[0]
    strict_vetter.close()
    with pytest.raises(GrammarError, match="the engine was stopped"):
        strict_vetter.vet(REGEX)


def test_process_that_hangs_is_replaced(monkeypatch):
    vetter, read_all = make_vetter(), vetting._read_all

    def read_briefly(descriptor: int, _deadline: float) -> bytes:
        monkeypatch.undo()
        return read_all(descriptor, time.monotonic() + 1)

    try:
        vetter.vet(REGEX)
        os.kill(vetter.pid, signal.SIGSTOP)
        # The process never replies.
        monkeypatch.setattr(vetting, "_read_all", read_briefly)
        vetter.vet(REGEX)
        process, connection = vetter._running
        assert connection.gettimeout() == vetting._START_TIMEOUT_S
        connection.settimeout(1)
        os.kill(process.pid, signal.SIGSTOP)
        # This grammar is too long for the connection's buffers, so sending it waits for the process.
        with pytest.raises(GrammarError, match="it has 900000 characters"):
            vetter.vet(GrammarSpec("regex", "a" * 900_000))
        assert vetter.pid != process.pid
    finally:
        vetter.close()


PARENT = """
import threading
from grammars import REGEX, SLOW
from test_vetting import make_vetter

vetter = make_vetter()
vetter.vet(REGEX)
threading.Thread(target=vetter.vet, args=(SLOW,), daemon=True).start()
print(vetter.pid, flush=True)
threading.Event().wait()
"""


def child_pids(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
def test_vetting_process_and_its_children_end_with_the_parent():
    here = Path(__file__).parent
    path = os.pathsep.join(map(str, (here, here.parent / "support")))
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path}) as parent:
        pid = int(parent.stdout.readline())
        deadline = time.monotonic() + 60
        while not child_pids(pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        trial_pids = child_pids(pid)
        assert trial_pids
        for trial_pid in trial_pids:
            # A stopped process does not end by itself.
            os.kill(trial_pid, signal.SIGSTOP)
        parent.kill()
    deadline = time.monotonic() + 60
    while (running_pids := [*filter(is_running, (pid, *trial_pids))]) and time.monotonic() < deadline:
        time.sleep(0.01)
    for running_pid in running_pids:
        os.kill(running_pid, signal.SIGKILL)
    assert not running_pids


def letter_vocabulary() -> Vocabulary:
    rng = random.Random(0)
    words = {bytes(rng.choices(b"abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 8))) for _ in range(20_000)}
    texts = sorted({*(bytes([byte]) for byte in range(256)), *words, *(b" " + word for word in words)})
    return Vocabulary([*texts, b""], (len(texts),))


SLOW_PATTERN = "([a-z]{1,20} ?){1,40}"
SLOW_STRING = {"type": "string", "pattern": f"^{SLOW_PATTERN}$"}
AFTER_STRINGS = {f"name{index}": {"type": "string", "maxLength": 40} for index in range(20)} | {"last": SLOW_STRING}
HTTP_URL = {"type": "string", "format": "uri", "minLength": 1, "maxLength": 2083}


def after_reasoning(content) -> str:
    reasoning = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": "</think>"}
    return json.dumps({"type": "structural_tag", "format": {"type": "sequence", "elements": [reasoning, content]}})


@pytest.mark.slow
@pytest.mark.background
def test_grammar_with_slow_masks_is_refused():
    vocabulary = letter_vocabulary()
    vetter = Vetter(lambda: vocabulary, len(vocabulary.tokens))
    try:
        for spec in (
            GrammarSpec("regex", SLOW_PATTERN),
            GrammarSpec("json_schema", json.dumps({"type": "object", "properties": AFTER_STRINGS})),
            GrammarSpec("structural_tag", after_reasoning({"type": "regex", "pattern": SLOW_PATTERN})),
        ):
            with pytest.raises(GrammarError, match="the model's allowed tokens take too long to find under"):
                vetter.vet(spec)
        for spec in (
            *(GrammarSpec("regex", pattern) for pattern in (r"(\w+ ){1,5}\w+", ".*", ".{1,200}", "(- [^\n]{1,50}\n)+")),
            *(GrammarSpec("json_schema", json.dumps(schema)) for schema in ({}, HTTP_URL, OBJECT)),
            GrammarSpec("structural_tag", after_reasoning({"type": "regex", "pattern": "(yes|no), [a-z]{3,8}"})),
            EBNF,
        ):
            vetter.vet(spec)
    finally:
        vetter.close()
