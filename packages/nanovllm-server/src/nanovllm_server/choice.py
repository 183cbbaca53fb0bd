"""One choice of an answer: engine outputs in, deltas out. Says when the choice has ended and why.

This room must not know the engine, HTTP or the other choices.
"""

from nanovllm_core.request import RequestOutput, SamplingParams, TokenLogprobs
from nanovllm_server.detokenize import Detokenizer, Vocabulary
from nanovllm_server.protocol.json import JSON
from nanovllm_server.protocol.response import Delta, Finish


class Choice:
    """The state of one choice. `num_tokens` counts what it has of the engine's tokens, up to a stop string."""

    def __init__(self, index: int, vocabulary: Vocabulary, sampling: SamplingParams, stops: tuple[str, ...]):
        self.index = index
        self.num_tokens = 0
        self.finish_reason: Finish | None = None
        self._vocabulary = vocabulary
        self._detokenizer = Detokenizer(vocabulary, stops, sampling.min_tokens)
        self._stop_token_ids = sampling.stop_token_ids
        self._top = sampling.logprobs
        # Of tokens whose text has not come out yet.
        self._entries: list[JSON] = []

    def take(self, output: RequestOutput) -> Delta | None:
        """What `output` decides; None when that is nothing. Not to be called after the end."""
        text = ""
        tokens = output.new_token_ids
        # A token that stops the model is no part of what it says.
        spoken = len(tokens) if output.stop_token is None else len(tokens) - 1
        for position, token in enumerate(tokens):
            self.num_tokens += 1
            if self._top is not None and output.logprobs is not None:
                self._entries.append(logprob_entry(self._vocabulary, token, output.logprobs[position], self._top))
            if position < spoken:
                text += self._detokenizer.push(token)
            if self._detokenizer.stopped is not None:
                return self._end(text, "stop", self._detokenizer.stopped)
        if output.finish_reason in ("stop", "length"):
            return self._finish(text, output, output.finish_reason)
        return self._delta(text) if text else None

    def _finish(self, text: str, output: RequestOutput, reason: Finish) -> Delta:
        text += self._detokenizer.finish()
        if self._detokenizer.stopped is not None:
            return self._end(text, "stop", self._detokenizer.stopped)
        return self._end(text, reason, output.stop_token if output.stop_token in self._stop_token_ids else None)

    def _end(self, text: str, reason: Finish, stop_reason: str | int | None) -> Delta:
        self.finish_reason = reason
        return self._delta(text, reason, stop_reason)

    def _delta(self, text: str, reason: Finish | None = None, stop_reason: str | int | None = None) -> Delta:
        logprobs = None if self._top is None else tuple(self._entries)
        self._entries = []
        return Delta(self.index, text, logprobs, reason, stop_reason)


def logprob_entry(vocabulary: Vocabulary, token: int, logprobs: TokenLogprobs, top: int) -> JSON:
    """OpenAI's object for one token: its text, its true bytes and its `top` likeliest alternatives."""
    entry = _one(vocabulary, token, logprobs.logprob)
    entry["top_logprobs"] = [_one(vocabulary, other, logprob) for other, logprob in logprobs.top[:top]]
    return entry


def _one(vocabulary: Vocabulary, token: int, logprob: float) -> dict[str, JSON]:
    piece = vocabulary.piece(token)
    return {
        "token": piece.decode(errors="replace"),
        # Impossible tokens have minus infinity, which JSON can't say.
        "logprob": max(logprob, LEAST_LOGPROB),
        "bytes": None if vocabulary.is_special(token) else list(piece),
    }


LEAST_LOGPROB = -9999.0
