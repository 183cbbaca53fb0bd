"""Turns the engine's outputs into the deltas of one choice, and decides when and why the choice ends."""

import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

import orjson

from nanovllm_core.outputs import RequestOutput, TokenLogprobs
from nanovllm_core.sampling_params import SamplingParams
from nanovllm_server.chat.stop_strings import StopMatcher
from nanovllm_server.parsing.detokenizing import Detokenizer, TextVocabulary
from nanovllm_server.parsing.events import CallArguments, CallBegun, CallEnded, ContentText, Event, ReasoningText
from nanovllm_server.parsing.parser import Parser
from nanovllm_server.protocol.bodies import ChoiceFinishReason, TokenLogprob, TopLogprob
from nanovllm_server.protocol.response import CallDelta, Delta

# Impossible tokens have a log-probability of minus infinity, which JSON can't express: send this number instead.
MIN_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceOptions:
    """Options that apply to every choice of a request.

    include_stop: the text includes the stop string or stop token.
    tag_ids: ids of special tokens that the parser must see as text.
    allows_parallel_calls: if False, the choice ends after its first call.
    writes_token_ids: in log-probabilities, a token is written "token_id:ID" instead of as text.
    is_call_required: the answer must consist of calls. The assembler drops content, which can only be markup of calls.
    is_function_named: `tool_choice` names a function; finish_reason is then "stop", not "tool_calls" (as OpenAI does).
    """

    stop_strings: tuple[str, ...] = ()
    include_stop: bool = False
    tag_ids: frozenset[int] = frozenset()
    include_reasoning: bool = True
    allows_parallel_calls: bool = True
    include_token_ids: bool = False
    writes_token_ids: bool = False
    is_call_required: bool = False
    is_function_named: bool = False


class OutputAssembler:
    """Detokenizes and parses the outputs of one choice, and finds stop strings.

    num_tokens: number of tokens so far. Tokens after a stop string do not count.
    finish_reason: None until the choice has ended.
    """

    def __init__(
        self, index: int, vocabulary: TextVocabulary, sampling: SamplingParams, parser: Parser, options: ChoiceOptions
    ):
        self.index = index
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.finish_reason: ChoiceFinishReason | None = None
        self._vocabulary = vocabulary
        self._detokenizer = Detokenizer(vocabulary, options.tag_ids)
        self._parser = parser
        self._stop_matcher = StopMatcher(options.stop_strings) if options.stop_strings else None
        self._sampling = sampling
        self._options = options
        self._has_reasoning_ended = False
        # Whether a stop string was found or the only allowed call has ended.
        self._is_stopped = False
        self._logprobs: list[orjson.Fragment] = []
        self._token_ids: list[int] | None = [] if options.include_token_ids else None
        self._reasoning_pieces: list[str] = []
        self._text_pieces: list[str] = []
        self._calls: list[CallDelta] = []

    def process_output(self, output: RequestOutput) -> Delta | None:
        """Adds an output of an unfinished choice. Returns the new delta; None if there is no new text, call or end."""
        token_ids = output.new_token_ids
        # A stop token is the last token of its output. It becomes text only if `include_stop` is set.
        num_text_tokens = len(token_ids) - (output.stop_token is not None and not self._options.include_stop)
        for position, token_id in enumerate(token_ids):
            self.num_tokens += 1
            if self._token_ids is not None:
                self._token_ids.append(token_id)
            if self._sampling.logprobs is not None and output.logprobs is not None:
                logprobs = output.logprobs[position]
                token_logprob = _serialize_token_logprob(
                    self._vocabulary,
                    token_id,
                    logprobs,
                    self._sampling.logprobs,
                    names_by_id=self._options.writes_token_ids,
                )
                self._logprobs.append(token_logprob)
            if position < num_text_tokens and (text := self._detokenizer.push(token_id)):
                self._apply_events(self._parser.push(text))
            self._update_reasoning_tokens()
            if self._is_stopped:
                return self._end("stop")
        if output.finish_reason in ("stop", "length"):
            return self._finish_parsing(output, output.finish_reason)
        return self._take_delta() if self._reasoning_pieces or self._text_pieces or self._calls else None

    def _finish_parsing(self, output: RequestOutput, reason: ChoiceFinishReason) -> Delta:
        self._apply_events(self._parser.push(self._detokenizer.finish()))
        if not self._is_stopped:
            self._apply_events(self._parser.finish())
        self._update_reasoning_tokens()
        if self._stop_matcher is not None and self._stop_matcher.matched_stop is not None:
            return self._end("stop")
        self._flush_stop_matcher()
        return self._end(reason, output.stop_token if output.stop_token in self._sampling.stop_token_ids else None)

    def _apply_events(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case ContentText(text):
                    if not self._options.is_call_required:
                        self._add_text(text)
                case ReasoningText(text):
                    if self._options.include_reasoning:
                        self._reasoning_pieces.append(text)
                case CallBegun(index, name):
                    # A stop string can't extend across a call.
                    self._flush_stop_matcher()
                    self._calls.append(CallDelta(index, "", f"call_{uuid.uuid4().hex[:24]}", name))
                case CallArguments(index, text):
                    self._calls.append(CallDelta(index, text))
                case CallEnded():
                    self._is_stopped = not self._options.allows_parallel_calls
            if self._is_stopped:
                return

    def _add_text(self, text: str) -> None:
        if self._stop_matcher is not None and self.num_tokens > self._sampling.min_tokens:
            text = self._stop_matcher.push(text)
            self._is_stopped = self._stop_matcher.matched_stop is not None
            if self._options.include_stop:
                text += self._stop_matcher.matched_stop or ""
        if text:
            self._text_pieces.append(text)

    def _flush_stop_matcher(self) -> None:
        if self._stop_matcher is not None and (text := self._stop_matcher.flush()):
            self._text_pieces.append(text)

    def _update_reasoning_tokens(self) -> None:
        if self._parser.has_reasoning and not self._has_reasoning_ended:
            self.num_reasoning_tokens = self.num_tokens
            self._has_reasoning_ended = not self._parser.in_reasoning

    def _end(self, reason: ChoiceFinishReason, stop_reason: str | int | None = None) -> Delta:
        if self._stop_matcher is not None and self._stop_matcher.matched_stop is not None:
            stop_reason = self._stop_matcher.matched_stop
        # "length" tells the client that the arguments of the last call are incomplete.
        if self._parser.in_call:
            reason = "length"
        elif self._parser.num_calls and reason == "stop" and not self._options.is_function_named:
            reason = "tool_calls"
        self.finish_reason = reason
        return self._take_delta(stop_reason)

    def _take_delta(self, stop_reason: str | int | None = None) -> Delta:
        delta = Delta(
            self.index,
            "".join(self._text_pieces),
            reasoning="".join(self._reasoning_pieces),
            calls=tuple(_join_arguments(self._calls)) if self._calls else (),
            logprobs=None if self._sampling.logprobs is None else tuple(self._logprobs),
            finish_reason=self.finish_reason,
            stop_reason=stop_reason,
            has_null_content=self._options.is_call_required
            or (self.finish_reason is not None and self._parser.in_reasoning),
            token_ids=None if self._token_ids is None else tuple(self._token_ids),
        )
        if self._token_ids:
            self._token_ids = []
        self._logprobs, self._reasoning_pieces, self._text_pieces, self._calls = [], [], [], []
        return delta


def _join_arguments(calls: list[CallDelta]) -> Iterator[CallDelta]:
    """Joins consecutive pieces of one call's arguments."""
    for (index, name), pieces in groupby(calls, lambda call: (call.index, call.name)):
        if name is None:
            yield CallDelta(index, "".join(call.arguments for call in pieces))
        else:
            yield from pieces


def _serialize_token_logprob(
    vocabulary: TextVocabulary, token_id: int, logprobs: TokenLogprobs, num_top: int, *, names_by_id: bool
) -> orjson.Fragment:
    """Returns OpenAI's log-probability object of a token as JSON, with the `num_top` likeliest tokens at its position.

    names_by_id: write a token as "token_id:ID" instead of as text.
    """
    top_logprobs = [
        _make_logprob(vocabulary, top_id, logprob, names_by_id=names_by_id)
        for top_id, logprob in logprobs.top[:num_top]
    ]
    own_logprob = _make_logprob(vocabulary, token_id, logprobs.logprob, names_by_id=names_by_id)
    token_logprob: TokenLogprob = {**own_logprob, "top_logprobs": top_logprobs}
    # One call of orjson per token, because one call for a long answer would block the event loop.
    return orjson.Fragment(orjson.dumps(token_logprob))


def _make_logprob(vocabulary: TextVocabulary, token_id: int, logprob: float, *, names_by_id: bool) -> TopLogprob:
    token_bytes = vocabulary.token_bytes(token_id)
    return {
        "token": f"token_id:{token_id}" if names_by_id else token_bytes.decode(errors="replace"),
        "logprob": max(logprob, MIN_LOGPROB),
        "bytes": None if vocabulary.is_special(token_id) else list(token_bytes),
    }
