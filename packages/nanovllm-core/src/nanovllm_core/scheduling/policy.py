"""Who goes first. Lower scores are served first.

Running decodes come before everything, by the order of the scheduler's passes; these scores order requests within a
pass. This room must not know about blocks, budgets or steps.
"""

from nanovllm_core.request import Request

Score = tuple[int, int, float]

# Most tokens of a step in which somebody decodes, whose next token waits until all of them are computed.
MIXED_TOKENS = 2048


def waiting_score(request: Request) -> Score:
    """Resumed requests before new ones, then by priority, then by arrival."""
    return (0 if request.num_preemptions else 1, request.priority, request.arrival_time)


def urgency(request: Request) -> tuple[int, float]:
    """Among running requests: by priority, then by arrival."""
    return (request.priority, request.arrival_time)


def victim_score(request: Request, *, prefilling: bool) -> Score:
    """Whose blocks to take when memory runs out: the highest. Unfinished prefills first, then the least urgent."""
    return (int(prefilling), *urgency(request))
