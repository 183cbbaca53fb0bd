"""Serialises the log-probabilities of prompt tokens."""

from collections.abc import Iterator, Sequence

import orjson

from nanovllm_core.outputs import PromptLogprobs
from nanovllm_server.chat.output_assembler import MIN_LOGPROB
from nanovllm_server.parsing.detokenizing import TextVocabulary
from nanovllm_server.protocol.bodies import PromptLogprob


def serialize_prompt_logprobs(
    vocabulary: TextVocabulary, token_ids: Sequence[int], prompt_logprobs: PromptLogprobs
) -> orjson.Fragment:
    """Returns the field `prompt_logprobs` as JSON. Run this in a thread: a long prompt takes a second.

    prompt_logprobs: one element for each prompt token except the first.
    """
    # orjson holds the GIL during a call: one call per token keeps the event loop's pauses short, and takes less memory.
    dictionaries = (orjson.dumps(entries) for entries in iterate_entries(vocabulary, token_ids, prompt_logprobs))
    return orjson.Fragment(b"[" + b",".join(dictionaries) + b"]")


def iterate_entries(
    vocabulary: TextVocabulary, token_ids: Sequence[int], prompt_logprobs: PromptLogprobs
) -> Iterator[dict[str, PromptLogprob] | None]:
    """Yields None for the first prompt token, then a dictionary per further token.

    A dictionary maps token ids to log-probabilities of the prompt token and of the likeliest tokens at its position.
    """

    def make_logprob(token_id: int, logprob: float, rank: int) -> PromptLogprob:
        text = vocabulary.token_bytes(token_id).decode(errors="replace")
        return {"logprob": max(logprob, MIN_LOGPROB), "rank": rank, "decoded_token": text}

    yield None
    for token_id, logprobs in zip(token_ids[1:], prompt_logprobs, strict=True):
        entries = {str(token_id): make_logprob(token_id, logprobs.logprob, logprobs.rank)}
        # If `top` also has the prompt token, the rank in `top` wins: equally likely tokens must have different ranks.
        for rank, (top_id, logprob) in enumerate(logprobs.top, 1):
            entries[str(top_id)] = make_logprob(top_id, logprob, rank)
        yield entries
