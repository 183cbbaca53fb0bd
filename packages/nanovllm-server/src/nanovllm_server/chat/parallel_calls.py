"""Splits parallel calls into single calls, for models whose chat template allows one call per message."""

from collections import defaultdict, deque
from collections.abc import Sequence
from itertools import chain, takewhile

from nanovllm_server.chat.tool_prompt import TemplateMessage


def split_parallel_calls(messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    """Replaces each message with several calls by one message per call. The result of a call follows its message."""
    split: list[TemplateMessage] = []
    index = 0
    while index < len(messages):
        message = messages[index]
        index += 1
        if len(message.get("tool_calls", ())) < 2:
            split.append(message)
            continue
        results = list(takewhile(lambda later: later["role"] == "tool", messages[index:]))
        index += len(results)
        split.extend(_alternate(message, results))
    return split


def _alternate(message: TemplateMessage, results: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    calls = message["tool_calls"]
    call_ids = {call["id"] for call in calls}
    # Results that name no call of the message have the key None. Calls without a result take these in order.
    results_by_id: defaultdict[str | None, deque[TemplateMessage]] = defaultdict(deque)
    for result in results:
        call_id = result.get("tool_call_id")
        results_by_id[call_id if call_id in call_ids else None].append(result)
    split: list[TemplateMessage] = []
    for index, call in enumerate(calls):
        # Content and reasoning precede the first call.
        other_fields = {"role": message["role"], "content": ""} if index else message
        split.append({**other_fields, "tool_calls": [call]})
        if unused_results := results_by_id[call["id"]] or results_by_id[None]:
            split.append(unused_results.popleft())
    return [*split, *chain.from_iterable(results_by_id.values())]
