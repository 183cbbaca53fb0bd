"""Assembles the deltas of one choice from engine outputs, and decides when and why the choice ends."""

import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from nanovllm_core.outputs import RequestOutput, TokenLogprobs
from nanovllm_core.sampling_params import SamplingParams
from nanovllm_server.chat.stop_strings import StopMatcher
from nanovllm_server.parsing.detokenizing import Detokenizer, TextVocabulary
from nanovllm_server.parsing.events import CallArguments, CallBegun, CallEnded, ContentText, Event, ReasoningText
from nanovllm_server.parsing.parser import Parser
from nanovllm_server.protocol.bodies import Finish, TokenLogprob, TopLogprob
from nanovllm_server.protocol.response import CallDelta, Delta

# Stands for minus infinity, the log-probability of impossible tokens, which JSON does not have.
MIN_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceOptions:
    """Options that apply to every choice of a request.

    include_stop: the text includes the stop string or stop token that ended it.
    tag_ids: special tokens whose names are part of the text, because the parser reads them.
    include_reasoning: deltas include reasoning.
    allows_parallel_calls: the model may make several calls; otherwise the choice ends with its first call.
    include_token_ids: deltas include token ids.
    is_function_named: `tool_choice` names a function; finish_reason is then "stop", not "tool_calls" (as OpenAI does).
    """

    stop_strings: tuple[str, ...] = ()
    include_stop: bool = False
    tag_ids: frozenset[int] = frozenset()
    include_reasoning: bool = True
    allows_parallel_calls: bool = True
    include_token_ids: bool = False
    is_function_named: bool = False


class OutputAssembler:
    """Assembles the deltas of one choice from the engine's outputs: detokenizes, parses, and finds stop strings.

    num_tokens: number of the choice's tokens so far, up to a stop string.
    finish_reason: None until the choice has ended.
    """

    def __init__(
        self, index: int, vocabulary: TextVocabulary, sampling: SamplingParams, parser: Parser, options: ChoiceOptions
    ):
        self.index = index
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.finish_reason: Finish | None = None
        self._vocabulary = vocabulary
        self._detokenizer = Detokenizer(vocabulary, options.tag_ids)
        self._parser = parser
        self._stop_matcher = StopMatcher(options.stop_strings) if options.stop_strings else None
        # Stop strings have no effect before this number of tokens, like the end-of-sequence token.
        self._min_tokens = sampling.min_tokens
        self._stop_token_ids = sampling.stop_token_ids
        self._include_reasoning = options.include_reasoning
        self._allows_parallel_calls = options.allows_parallel_calls
        self._include_stop = options.include_stop
        self._is_function_named = options.is_function_named
        self._num_top_logprobs = sampling.logprobs
        self._reasoning_ended = False
        # The choice has ended with a stop string, or with its only allowed call.
        self._is_stopped = False
        # Contents of the next delta. `_token_ids` is None if the request does not ask for token ids.
        self._logprobs: list[TokenLogprob] = []
        self._token_ids: list[int] | None = [] if options.include_token_ids else None
        self._reasoning_pieces: list[str] = []
        self._text_pieces: list[str] = []
        self._calls: list[CallDelta] = []

    def process_output(self, output: RequestOutput) -> Delta | None:
        """Adds an output; returns the delta, or None if the output adds nothing. Must not be called after the end."""
        token_ids = output.new_token_ids
        # A stop token is part of the text only if the request includes it.
        num_text_tokens = len(token_ids) if output.stop_token is None or self._include_stop else len(token_ids) - 1
        for position, token_id in enumerate(token_ids):
            self.num_tokens += 1
            if self._token_ids is not None:
                self._token_ids.append(token_id)
            if self._num_top_logprobs is not None and output.logprobs is not None:
                logprobs = output.logprobs[position]
                self._logprobs.append(make_logprob_entry(self._vocabulary, token_id, logprobs, self._num_top_logprobs))
            if position < num_text_tokens and (text := self._detokenizer.push(token_id)):
                self._apply_events(self._parser.push(text))
            self._update_reasoning_tokens()
            if self._is_stopped:
                return self._end("stop")
        if output.finish_reason in ("stop", "length"):
            return self._finish_parsing(output, output.finish_reason)
        return self._take_delta() if self._reasoning_pieces or self._text_pieces or self._calls else None

    def _finish_parsing(self, output: RequestOutput, reason: Finish) -> Delta:
        self._apply_events(self._parser.push(self._detokenizer.finish()))
        if not self._is_stopped:
            self._apply_events(self._parser.finish())
        self._update_reasoning_tokens()
        if self._is_stopped:
            return self._end("stop")
        self._flush_stop_matcher()
        return self._end(reason, output.stop_token if output.stop_token in self._stop_token_ids else None)

    def _apply_events(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case ContentText(text):
                    self._add_text(text)
                case ReasoningText(text):
                    if self._include_reasoning:
                        self._reasoning_pieces.append(text)
                case CallBegun(index, name):
                    # A stop string can't continue after a call.
                    self._flush_stop_matcher()
                    self._calls.append(CallDelta(index, "", f"call_{uuid.uuid4().hex[:24]}", name))
                case CallArguments(index, text):
                    self._calls.append(CallDelta(index, text))
                case CallEnded():
                    self._is_stopped = not self._allows_parallel_calls
            if self._is_stopped:
                return

    def _add_text(self, text: str) -> None:
        if self._stop_matcher is not None and self.num_tokens > self._min_tokens:
            text = self._stop_matcher.push(text)
            self._is_stopped = self._stop_matcher.matched_stop is not None
            if self._include_stop:
                text += self._stop_matcher.matched_stop or ""
        if text:
            self._text_pieces.append(text)

    def _flush_stop_matcher(self) -> None:
        if self._stop_matcher is not None and (text := self._stop_matcher.flush()):
            self._text_pieces.append(text)

    def _update_reasoning_tokens(self) -> None:
        if self._parser.has_reasoning and not self._reasoning_ended:
            self.num_reasoning_tokens = self.num_tokens
            self._reasoning_ended = not self._parser.in_reasoning

    def _end(self, reason: Finish, stop_reason: str | int | None = None) -> Delta:
        if self._stop_matcher is not None and self._stop_matcher.matched_stop is not None:
            stop_reason = self._stop_matcher.matched_stop
        # "length" tells the client that a call's arguments are incomplete, whatever cut them off.
        if self._parser.in_call:
            reason = "length"
        elif self._parser.num_calls and reason == "stop" and not self._is_function_named:
            reason = "tool_calls"
        self.finish_reason = reason
        return self._take_delta(stop_reason)

    def _take_delta(self, stop_reason: str | int | None = None) -> Delta:
        delta = Delta(
            self.index,
            "".join(self._text_pieces),
            reasoning="".join(self._reasoning_pieces),
            calls=tuple(_join_arguments(self._calls)) if self._calls else (),
            logprobs=None if self._num_top_logprobs is None else tuple(self._logprobs),
            finish_reason=self.finish_reason,
            stop_reason=stop_reason,
            in_reasoning=self.finish_reason is not None and self._parser.in_reasoning,
            token_ids=None if self._token_ids is None else tuple(self._token_ids),
        )
        if self._token_ids:
            self._token_ids = []
        self._logprobs, self._reasoning_pieces, self._text_pieces, self._calls = [], [], [], []
        return delta


def _join_arguments(calls: list[CallDelta]) -> Iterator[CallDelta]:
    """Joins consecutive arguments of the same call."""
    for (index, name), group in groupby(calls, lambda call: (call.index, call.name)):
        if name is None:
            yield CallDelta(index, "".join(call.arguments for call in group))
        else:
            yield from group


def make_logprob_entry(
    vocabulary: TextVocabulary, token_id: int, logprobs: TokenLogprobs, num_top: int
) -> TokenLogprob:
    """OpenAI's object for one token: its text, its bytes and the `num_top` likeliest tokens at its position."""
    top_logprobs = [_top_logprob(vocabulary, top_id, logprob) for top_id, logprob in logprobs.top[:num_top]]
    return {**_top_logprob(vocabulary, token_id, logprobs.logprob), "top_logprobs": top_logprobs}


def _top_logprob(vocabulary: TextVocabulary, token_id: int, logprob: float) -> TopLogprob:
    token_bytes = vocabulary.token_bytes(token_id)
    return {
        "token": token_bytes.decode(errors="replace"),
        "logprob": max(logprob, MIN_LOGPROB),
        "bytes": None if vocabulary.is_special(token_id) else list(token_bytes),
    }
