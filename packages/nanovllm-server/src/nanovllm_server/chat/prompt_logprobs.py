"""Serialises the log-probabilities of a prompt's tokens for a response."""

from collections.abc import Iterator, Sequence

import orjson

from nanovllm_core.outputs import PromptLogprobs
from nanovllm_server.chat.output_assembler import MIN_LOGPROB
from nanovllm_server.parsing.detokenizing import TextVocabulary
from nanovllm_server.protocol.bodies import PromptLogprob


def serialize_prompt_logprobs(
    vocabulary: TextVocabulary, token_ids: Sequence[int], prompt_logprobs: PromptLogprobs
) -> orjson.Fragment:
    """The field `prompt_logprobs` of a response, as JSON.

    prompt_logprobs: log-probabilities of all tokens but the first.

    Call this function in a thread: 32,000 tokens with 20 alternatives each are 50 MB and take a second. Tokens are
    serialised one at a time, which keeps memory small and pauses of the event loop short.
    """
    entries = (orjson.dumps(entry) for entry in iterate_entries(vocabulary, token_ids, prompt_logprobs))
    return orjson.Fragment(b"[" + b",".join(entries) + b"]")


def iterate_entries(
    vocabulary: TextVocabulary, token_ids: Sequence[int], prompt_logprobs: PromptLogprobs
) -> Iterator[dict[str, PromptLogprob] | None]:
    """Yields, for each prompt token, entries of the token and of the likeliest tokens at its position, by token id.

    Yields None for the first token, which has no probability.
    """

    def make_entry(token_id: int, logprob: float, rank: int) -> PromptLogprob:
        text = vocabulary.token_bytes(token_id).decode(errors="replace")
        return {"logprob": max(logprob, MIN_LOGPROB), "rank": rank, "decoded_token": text}

    yield None
    for token_id, logprobs in zip(token_ids[1:], prompt_logprobs, strict=True):
        entries = {str(token_id): make_entry(token_id, logprobs.logprob, logprobs.rank)}
        # Equally likely tokens get different ranks: their positions in the list.
        for rank, (top_id, logprob) in enumerate(logprobs.top, 1):
            entries[str(top_id)] = make_entry(top_id, logprob, rank)
        yield entries
