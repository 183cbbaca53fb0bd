"""Scores that order requests. Requests with lower scores are served first."""

from nanovllm_core.request_state import RequestState

Score = tuple[int, int, float]

# Without a target time, a step with prompts and decodes may take this many usual decode steps (see `StepLimits`).
DECODE_STEPS = 4
# Over a few steps, the oldest prompt gets at least this share of the time spent on prompts.
OLDEST_SHARE = 0.25
# This many other requests may be admitted before a request that lacked free blocks.
MAX_BYPASSES = 32


def request_class(request: RequestState) -> tuple[int, int]:
    """The class of a request: preempted before new, then by priority. Lower classes are served first."""
    return (0 if request.num_preemptions else 1, request.client_request.priority)


def waiting_score(request: RequestState) -> Score:
    """Score of a request without a row: by class, then by arrival."""
    return (*request_class(request), request.client_request.arrival_time)


def urgency(request: RequestState) -> tuple[int, float]:
    """Score of a running request: by priority, then by arrival."""
    return (request.client_request.priority, request.client_request.arrival_time)


def victim_score(request: RequestState, *, prefilling: bool) -> Score:
    """Score for preemption: the highest is preempted first. Unfinished prefills, then the least urgent requests."""
    return (int(prefilling), *urgency(request))
