"""Assembles the deltas of one choice from engine outputs, and decides when and why the choice ends."""

import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from nanovllm_core.request import RequestOutput, SamplingParams, TokenLogprobs
from nanovllm_server.chat.stop_strings import StopMatcher
from nanovllm_server.parsing.detokenizing import Detokenizer, TextVocabulary
from nanovllm_server.parsing.events import CallArguments, CallBegun, CallEnded, ContentText, Event, ReasoningText
from nanovllm_server.parsing.parser import Parser
from nanovllm_server.protocol.bodies import Finish, TokenLogprob, TopLogprob
from nanovllm_server.protocol.response import CallDelta, Delta


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceOptions:
    """Options that apply to every choice of a request.

    stops: stop strings.
    include_stop: the text includes the stop string or stop token that ended it.
    tags: special tokens that are part of the text, for the parser to see.
    include_reasoning: deltas include reasoning.
    parallel_calls: the model may make several calls; otherwise the choice ends with its first call.
    token_ids: deltas include token ids.
    named: `tool_choice` names a function; finish_reason is then "stop" instead of "tool_calls" (as OpenAI does).
    """

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    tags: frozenset[int] = frozenset()
    include_reasoning: bool = True
    parallel_calls: bool = True
    token_ids: bool = False
    named: bool = False


class OutputAssembler:
    """Assembles the deltas of one choice from the engine's outputs: detokenizes, parses, and finds stop strings.

    num_tokens: the choice's tokens so far, up to a stop string.
    """

    def __init__(
        self, index: int, vocabulary: TextVocabulary, sampling: SamplingParams, parser: Parser, options: ChoiceOptions
    ):
        self.index = index
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.finish_reason: Finish | None = None
        self._vocabulary = vocabulary
        self._detokenizer = Detokenizer(vocabulary, options.tags)
        self._parser = parser
        self._stops = StopMatcher(options.stops) if options.stops else None
        # Like the end-of-sequence token, stop strings have no effect before so many tokens.
        self._min_tokens = sampling.min_tokens
        self._stop_token_ids = sampling.stop_token_ids
        self._include_reasoning = options.include_reasoning
        self._parallel_calls = options.parallel_calls
        self._include_stop = options.include_stop
        self._named = options.named
        self._top = sampling.logprobs
        self._reasoning_ended = False
        # The choice ended by a stop string, or by its only allowed call.
        self._over = False
        # Log-probabilities of tokens since the last delta.
        self._entries: list[TokenLogprob] = []
        self._token_ids: list[int] | None = [] if options.token_ids else None
        self._reasoning: list[str] = []
        self._text: list[str] = []
        self._calls: list[CallDelta] = []

    def take(self, output: RequestOutput) -> Delta | None:
        """Adds an output; returns the delta, or None if there is nothing new. Must not be called after the end."""
        tokens = output.new_token_ids
        # A stop token is part of the text only if the request includes it.
        num_text_tokens = len(tokens) if output.stop_token is None or self._include_stop else len(tokens) - 1
        for position, token in enumerate(tokens):
            self.num_tokens += 1
            if self._token_ids is not None:
                self._token_ids.append(token)
            if self._top is not None and output.logprobs is not None:
                self._entries.append(logprob_entry(self._vocabulary, token, output.logprobs[position], self._top))
            if position < num_text_tokens and (text := self._detokenizer.push(token)):
                self._read(self._parser.push(text))
            self._count_reasoning()
            if self._over:
                return self._end("stop")
        if output.finish_reason in ("stop", "length"):
            return self._finish(output, output.finish_reason)
        return self._delta() if self._reasoning or self._text or self._calls else None

    def _finish(self, output: RequestOutput, reason: Finish) -> Delta:
        self._read(self._parser.push(self._detokenizer.finish()))
        if not self._over:
            self._read(self._parser.finish())
        self._count_reasoning()
        if self._over:
            return self._end("stop")
        self._flush_stops()
        return self._end(reason, output.stop_token if output.stop_token in self._stop_token_ids else None)

    def _read(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case ContentText(text):
                    self._add_text(text)
                case ReasoningText(text):
                    if self._include_reasoning:
                        self._reasoning.append(text)
                case CallBegun(index, name):
                    # A stop string can't continue after a call.
                    self._flush_stops()
                    self._calls.append(CallDelta(index, "", f"call_{uuid.uuid4().hex[:24]}", name))
                case CallArguments(index, text):
                    self._calls.append(CallDelta(index, text))
                case CallEnded():
                    self._over = not self._parallel_calls
            if self._over:
                return

    def _add_text(self, text: str) -> None:
        if self._stops is not None and self.num_tokens > self._min_tokens:
            text = self._stops.push(text)
            self._over = self._stops.found is not None
            if self._include_stop:
                text += self._stops.found or ""
        if text:
            self._text.append(text)

    def _flush_stops(self) -> None:
        if self._stops is not None and (text := self._stops.flush()):
            self._text.append(text)

    def _count_reasoning(self) -> None:
        if self._parser.reasoned and not self._reasoning_ended:
            self.num_reasoning_tokens = self.num_tokens
            self._reasoning_ended = not self._parser.in_reasoning

    def _end(self, reason: Finish, stop_reason: str | int | None = None) -> Delta:
        if self._stops is not None and self._stops.found is not None:
            stop_reason = self._stops.found
        # "length" tells the client that a call's arguments are incomplete, whatever cut them off.
        if self._parser.in_call:
            reason = "length"
        elif self._parser.num_calls and reason == "stop" and not self._named:
            reason = "tool_calls"
        self.finish_reason = reason
        return self._delta(stop_reason)

    def _delta(self, stop_reason: str | int | None = None) -> Delta:
        delta = Delta(
            self.index,
            "".join(self._text),
            reasoning="".join(self._reasoning),
            calls=tuple(_joined(self._calls)) if self._calls else (),
            logprobs=None if self._top is None else tuple(self._entries),
            finish_reason=self.finish_reason,
            stop_reason=stop_reason,
            in_reasoning=self.finish_reason is not None and self._parser.in_reasoning,
            token_ids=None if self._token_ids is None else tuple(self._token_ids),
        )
        if self._token_ids:
            self._token_ids = []
        self._entries, self._reasoning, self._text, self._calls = [], [], [], []
        return delta


def _joined(calls: list[CallDelta]) -> Iterator[CallDelta]:
    """Joins consecutive arguments of the same call."""
    for (index, name), group in groupby(calls, lambda call: (call.index, call.name)):
        if name is None:
            yield CallDelta(index, "".join(call.arguments for call in group))
        else:
            yield from group


def logprob_entry(vocabulary: TextVocabulary, token: int, logprobs: TokenLogprobs, top: int) -> TokenLogprob:
    """OpenAI's object for one token: its text, its bytes and the `top` likeliest alternatives."""
    others = [_one(vocabulary, other, logprob) for other, logprob in logprobs.top[:top]]
    return {**_one(vocabulary, token, logprobs.logprob), "top_logprobs": others}


def _one(vocabulary: TextVocabulary, token: int, logprob: float) -> TopLogprob:
    piece = vocabulary.piece(token)
    return {
        "token": piece.decode(errors="replace"),
        # JSON has no minus infinity, the log-probability of impossible tokens.
        "logprob": max(logprob, LEAST_LOGPROB),
        "bytes": None if vocabulary.is_special(token) else list(piece),
    }


LEAST_LOGPROB = -9999.0
