"""Who goes first. Lower scores are served first.

Running decodes come before everything, by the order of the scheduler's passes; these scores order requests within a
pass. This room must not know about blocks, budgets or steps.
"""

from nanovllm_core.request import Request

Score = tuple[int, int, float]

# Most tokens of a step where more requests decode than wait for their prompts: their next tokens wait for all of them.
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


def favours_prompts(num_decodes: int, num_prompts: int, *, in_burst: bool) -> bool:
    """Whether a step is to compute as much of prompts as it may. That delays the next token of everyone who decodes and
    hastens the first one of everyone whose prompt is not through and has a row, or finds one: the majority decides.

    in_burst: whether the step before favoured prompts, and was full. Then they are favoured until twice as many decode:
    else the second half of a burst would begin in many small steps, beside the first half's answers.
    """
    return num_prompts * (2 if in_burst else 1) > num_decodes
