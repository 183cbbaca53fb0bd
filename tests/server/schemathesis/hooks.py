"""Makes generated requests cheap enough for a CPU. Invalid values stay."""

import os
from typing import Any

import schemathesis

MAX_TOKENS, MAX_CHOICES = 4, 2
MIN_TIMEOUT_S = 60


@schemathesis.hook
def before_call(context: Any, case: Any, **kwargs: Any) -> None:
    """Limits the answer's length, because some phases of Schemathesis skip `map_body`."""
    if isinstance(case.body, dict) and case.body.keys().isdisjoint(("max_tokens", "max_completion_tokens")):
        case.body["max_tokens"] = MAX_TOKENS


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    if not isinstance(body, dict):
        return body
    if isinstance(body.get("model"), str):
        body["model"] = os.environ["NANOVLLM_MODEL"]
    for name, maximum in (("max_tokens", MAX_TOKENS), ("max_completion_tokens", MAX_TOKENS), ("n", MAX_CHOICES)):
        if type(body.get(name)) is int and body[name] > maximum:
            body[name] = 1 + body[name] % maximum
    if isinstance(body.get("timeout"), int | float) and 0 < body["timeout"] < MIN_TIMEOUT_S:
        # A shorter timeout would correctly give a 504.
        body["timeout"] = MIN_TIMEOUT_S
    if type(body.get("min_tokens")) is int and body["min_tokens"] > 0:
        body["min_tokens"] = 1
    if body.get("max_tokens") is None and body.get("max_completion_tokens") is None:
        body["max_tokens"] = MAX_TOKENS
    return body
