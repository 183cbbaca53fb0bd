"""The order in which requests are served. Lower scores are served first."""

from nanovllm_core.request import Request

Score = tuple[int, int, float]

# A step with prompts takes at most so many times a decode step, unless its limit allows more.
DECODE_STEPS = 4
# The prompt that has waited longest gets at least this share of the prompts' time, over a few steps.
OLDEST_SHARE = 0.25
# So many requests may be admitted before one for which there were too few free blocks.
MAX_BYPASSES = 32


def request_class(request: Request) -> tuple[int, int]:
    """Preempted requests before new ones, then by priority. A lower class is served before a higher one."""
    return (0 if request.num_preemptions else 1, request.priority)


def waiting_score(request: Request) -> Score:
    """Among requests without a row: by class, then by arrival."""
    return (*request_class(request), request.arrival_time)


def urgency(request: Request) -> tuple[int, float]:
    """Among running requests: by priority, then by arrival."""
    return (request.priority, request.arrival_time)


def victim_score(request: Request, *, prefilling: bool) -> Score:
    """Whose blocks to take when memory runs out: the highest. Unfinished prefills first, then the least urgent."""
    return (int(prefilling), *urgency(request))
