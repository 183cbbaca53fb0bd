"""Log-probabilities of a prompt's tokens as an answer has them.

This room must not know the engine or HTTP.
"""

from collections.abc import Iterator, Sequence

import orjson

from nanovllm_core.request import PromptLogprobs
from nanovllm_server.chat.detokenizing import TextVocabulary
from nanovllm_server.chat.output_assembler import LEAST_LOGPROB
from nanovllm_server.protocol.bodies import PromptLogprob


def write_prompt_logprobs(
    vocabulary: TextVocabulary, token_ids: Sequence[int], found: PromptLogprobs
) -> orjson.Fragment:
    """The field `prompt_logprobs` of an answer, as JSON. found: of the prompt `token_ids`, but for its first.

    For a thread of its own: of 32,000 tokens with 20 others each it is 50 MB, and takes a second. Written one token at
    a time, so that neither the event loop's thread waits for long nor all of it is there as objects.
    """
    entries = (orjson.dumps(entry) for entry in prompt_entries(vocabulary, token_ids, found))
    return orjson.Fragment(b"[" + b",".join(entries) + b"]")


def prompt_entries(
    vocabulary: TextVocabulary, token_ids: Sequence[int], found: PromptLogprobs
) -> Iterator[dict[str, PromptLogprob] | None]:
    """Of each token of a prompt what is known of it, and of the likeliest in its place, by token id.

    None for the first, which nothing leads to.
    """

    def one(token: int, logprob: float, rank: int) -> PromptLogprob:
        text = vocabulary.piece(token).decode(errors="replace")
        # Impossible tokens have minus infinity, which JSON can't say.
        return {"logprob": max(logprob, LEAST_LOGPROB), "rank": rank, "decoded_token": text}

    yield None
    for token, own in zip(token_ids[1:], found, strict=True):
        entry = {str(token): one(token, own.logprob, own.rank)}
        # Of equals among the likeliest, each has the place that it was given.
        entry.update({str(other): one(other, logprob, rank) for rank, (other, logprob) in enumerate(own.top, 1)})
        yield entry
