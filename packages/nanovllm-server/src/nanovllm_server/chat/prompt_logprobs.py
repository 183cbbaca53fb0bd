"""Writes the log-probabilities of a prompt's tokens in the form of a response."""

from collections.abc import Iterator, Sequence

import orjson

from nanovllm_core.request import PromptLogprobs
from nanovllm_server.chat.output_assembler import LEAST_LOGPROB
from nanovllm_server.parsing.detokenizing import TextVocabulary
from nanovllm_server.protocol.bodies import PromptLogprob


def write_prompt_logprobs(
    vocabulary: TextVocabulary, token_ids: Sequence[int], found: PromptLogprobs
) -> orjson.Fragment:
    """The field `prompt_logprobs` of a response, as JSON. found: log-probabilities of all tokens but the first.

    Call it in a thread: 32,000 tokens with 20 alternatives each are 50 MB and take a second. It serialises one token
    at a time, which keeps pauses of the event loop's thread short and memory small.
    """
    entries = (orjson.dumps(entry) for entry in prompt_entries(vocabulary, token_ids, found))
    return orjson.Fragment(b"[" + b",".join(entries) + b"]")


def prompt_entries(
    vocabulary: TextVocabulary, token_ids: Sequence[int], found: PromptLogprobs
) -> Iterator[dict[str, PromptLogprob] | None]:
    """Yields for each prompt token the entries of itself and of the likeliest tokens at its position, by token id.

    Yields None for the first token, which has no probability.
    """

    def one(token: int, logprob: float, rank: int) -> PromptLogprob:
        text = vocabulary.piece(token).decode(errors="replace")
        # JSON has no minus infinity, the log-probability of impossible tokens.
        return {"logprob": max(logprob, LEAST_LOGPROB), "rank": rank, "decoded_token": text}

    yield None
    for token, own in zip(token_ids[1:], found, strict=True):
        entry = {str(token): one(token, own.logprob, own.rank)}
        # Equally likely tokens get different ranks: their positions in the list.
        entry.update({str(other): one(other, logprob, rank) for rank, (other, logprob) in enumerate(own.top, 1)})
        yield entry
