"""A request, and a way to hold the steps of an engine's loop."""

import threading

from nanovllm_core import Request, SamplingParams

PROMPT = [5, 6, 7]
NUM_OUTPUTS = 6


def make_request() -> Request:
    return Request("r", list(PROMPT), SamplingParams(temperature=0, max_tokens=NUM_OUTPUTS, ignore_eos=True))


def hold_launches(runner, monkeypatch) -> tuple[threading.Event, threading.Event]:
    """Returns an event that the first launch sets, and an event for which launches wait before they compute."""
    launch, has_launched, may_compute = runner.launch, threading.Event(), threading.Event()

    def wait_and_launch(plan):
        has_launched.set()
        may_compute.wait()
        return launch(plan)

    monkeypatch.setattr(runner, "launch", wait_and_launch)
    return has_launched, may_compute
