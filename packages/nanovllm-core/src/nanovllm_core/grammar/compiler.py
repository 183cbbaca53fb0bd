"""Compiles grammars and matches outputs with xgrammar (Dong et al. 2024, https://arxiv.org/abs/2411.15100).

Compiling can't be interrupted and may take long, so `grammar/vetting.py` first compiles each grammar in a child process
with limits of time and memory. xgrammar is imported on first use, because xgrammar imports transformers.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from nanovllm_core.errors import GrammarError
from nanovllm_core.grammar.bounded_strings import BoundedStrings, write_common_string_rules
from nanovllm_core.grammar.compile_cost import check_compile_cost
from nanovllm_core.grammar.json_termination import JsonTerminator, JsonTokenClasses
from nanovllm_core.grammar.value_lookaheads import shorten_value_lookaheads
from nanovllm_core.grammar.whitespace_rules import merge_whitespace_rules
from nanovllm_core.grammar_types import GrammarMatcher, GrammarSpec, ParameterTypes

if TYPE_CHECKING:
    import xgrammar

# Maximum number of consecutive whitespace characters in a JSON text. A limit of nine makes grammars six times larger,
# but does not change the length of small models' outputs.
MAX_WHITESPACE = 1
# Size of xgrammar's cache of compiled rules, which grammars share. A rule of a bounded string or of undeclared
# properties takes 7 ms to compile.
RULE_CACHE_BYTES = 48 << 20
# A grammar with a longer rule (in characters) does not use this cache. Cache searches take longer for long rules.
MAX_CACHED_RULE_LENGTH = 20_000
# Longer error messages of xgrammar are cut: they may quote the whole grammar.
_MAX_REASON_LENGTH = 500
# A structural tag is a tree of formats. These fields of a format contain its child formats.
_INNER_FORMAT_FIELDS = ("content", "elements", "tags")
# The prefix of error messages of xgrammar, such as "[12:00:00] /project/cpp/grammar_parser.cc:83: ". A failed check in
# C++ may follow: "Check failed: (CONDITION) is false: ".
_SOURCE_LOCATION = re.compile(r"^\[[\d:]+\] \S+:\d+: (?:Check failed: \(.*?\) is false: (?=\S))?")


@dataclass(frozen=True, slots=True, eq=False)
class Matcher:
    """The state of an output in its grammar.

    usable_token_mask: int32 [num_words], one bit per token. Allows the tokens that have text or end an answer.
        xgrammar's masks may also allow other tokens, which `accept` rejects.
    end_ids: token ids that end an answer.
    terminator: ends overlong strings, numbers and nesting in JSON; None for grammars without JSON.
    """

    inner: "xgrammar.GrammarMatcher"
    usable_token_mask: NDArray[np.int32]
    end_ids: frozenset[int]
    terminator: JsonTerminator | None

    def accept(self, token: int) -> bool:
        """Advance by one token. Returns False, and does not advance, if the grammar does not allow the token next."""
        accepted = self.inner.accept_token(token)
        if accepted and self.terminator is not None:
            self.terminator.accept(token)
        return accepted

    def fill_mask(self, masks: NDArray[np.int32], index: int) -> None:
        """Write the mask of allowed next tokens to the row `index` of `masks`, int32 [>= index + 1, num_words]."""
        self.inner.fill_next_token_bitmask(masks, index)
        masks[index] &= self.usable_token_mask
        if self.terminator is not None:
            self.terminator.narrow(masks[index])

    @staticmethod
    def accept_all(matchers: Sequence[GrammarMatcher], tokens: Sequence[int]) -> list[bool]:
        """Call `accept` of each matcher."""
        import xgrammar

        typed_matchers = cast("Sequence[Matcher]", matchers)
        accepted = xgrammar.BatchGrammarMatcher.batch_accept_token(
            [matcher.inner for matcher in typed_matchers], list(tokens)
        )
        for matcher, token, is_accepted in zip(typed_matchers, tokens, accepted, strict=True):
            if is_accepted and matcher.terminator is not None:
                matcher.terminator.accept(token)
        return accepted

    @staticmethod
    def fill_masks(matchers: Sequence[GrammarMatcher], masks: NDArray[np.int32]) -> None:
        """Call `fill_mask` of each matcher. All matchers belong to one engine and share `usable_token_mask`."""
        import xgrammar

        typed_matchers = cast("Sequence[Matcher]", matchers)
        # Use one thread, because the effect of an error in another thread is unknown.
        xgrammar.BatchGrammarMatcher(max_threads=1).batch_fill_next_token_bitmask(
            [matcher.inner for matcher in typed_matchers], masks
        )
        masks[: len(typed_matchers)] &= typed_matchers[0].usable_token_mask
        for index, matcher in enumerate(typed_matchers):
            if matcher.terminator is not None:
                matcher.terminator.narrow(masks[index])

    def fork(self) -> "Matcher":
        """An independent matcher in the same state."""
        terminator = None if self.terminator is None else self.terminator.fork()
        return replace(self, inner=self.inner.fork(), terminator=terminator)


@dataclass(frozen=True, slots=True, eq=False)
class Grammar:
    """A compiled grammar, which starts a `Matcher` for each output.

    token_classes: tokens by their effect in a JSON text; None for grammars without JSON.
    parameter_types: types of the values in XML parameters. Only parsers of the output use these types.
    """

    inner: "xgrammar.CompiledGrammar"
    usable_token_mask: NDArray[np.int32]
    end_ids: frozenset[int]
    token_classes: JsonTokenClasses | None
    parameter_types: ParameterTypes

    @property
    def num_bytes(self) -> int:
        """Approximate memory of the grammar."""
        return self.inner.memory_size_bytes

    def start(self) -> Matcher:
        """A matcher in the initial state."""
        import xgrammar

        terminator = None if self.token_classes is None else JsonTerminator(self.token_classes)
        return Matcher(xgrammar.GrammarMatcher(self.inner), self.usable_token_mask, self.end_ids, terminator)


class Compiler:
    """Compiles grammars for one vocabulary. tokens: bytes by token id. Other ids up to `vocab_size` have no text."""

    def __init__(self, tokens: Sequence[bytes], end_ids: Sequence[int], vocab_size: int):
        self._tokens = tokens
        self._end_ids = frozenset(end_ids)
        self._vocab_size = vocab_size

    @cached_property
    def _tokenizer_info(self) -> "xgrammar.TokenizerInfo":
        import xgrammar

        # RAW: the tokens are given as the bytes of their text, without escapes.
        return xgrammar.TokenizerInfo(
            list(self._tokens),
            xgrammar.VocabType.RAW,
            vocab_size=self._vocab_size,
            stop_token_ids=list(self._end_ids),
        )

    @cached_property
    def _xgrammar_compiler(self) -> "xgrammar.GrammarCompiler":
        import xgrammar

        # Use one thread, because other grammars compile in parallel. `Grammars` has a cache, so disable xgrammar's.
        return xgrammar.GrammarCompiler(self._tokenizer_info, max_threads=1, cache_enabled=False)

    @cached_property
    def _rule_caching_compiler(self) -> "xgrammar.GrammarCompiler":
        import xgrammar

        return xgrammar.GrammarCompiler(self._tokenizer_info, max_threads=1, cache_limit_bytes=RULE_CACHE_BYTES)

    @cached_property
    def _usable_token_mask(self) -> NDArray[np.int32]:
        bits = np.zeros(-(-self._vocab_size // 32) * 32, np.bool_)
        bits[: len(self._tokens)] = [token != b"" for token in self._tokens]
        bits[list(self._end_ids)] = True
        return np.packbits(bits, bitorder="little").view(np.int32)

    @cached_property
    def _token_classes(self) -> JsonTokenClasses:
        return JsonTokenClasses(self._tokens, len(self._usable_token_mask))

    def warm_up(self) -> None:
        """Import xgrammar and compile the rules that grammars share. This takes seconds."""
        _ = self._xgrammar_compiler, self._usable_token_mask, self._token_classes
        self._rule_caching_compiler.compile_grammar(write_common_string_rules())

    def compile(
        self, spec: GrammarSpec, parameter_types: ParameterTypes | None = None, rules: str | None = None
    ) -> Grammar:
        """Compile a grammar whose JSON schemas were converted by `convert_grammar`. Raises GrammarError.

        rules: the result of `write_rules` for this grammar. If None, this method writes the rules.
        """
        compiler = self._xgrammar_compiler
        try:
            match spec.kind:
                case "json_schema" | "structural_tag":
                    compiled = self._compile_json(spec, rules)
                case "regex":
                    compiled = compiler.compile_regex(spec.source)
                case "ebnf":
                    compiled = compiler.compile_grammar(spec.source)
            token_classes = self._token_classes if spec.kind in ("json_schema", "structural_tag") else None
            grammar = Grammar(compiled, self._usable_token_mask, self._end_ids, token_classes, parameter_types or {})
            first_mask = np.zeros((1, len(self._usable_token_mask)), np.int32)
            grammar.start().fill_mask(first_mask, 0)
        # C++ exceptions arrive as these types.
        except (RuntimeError, ValueError, TypeError) as error:
            raise GrammarError(f"this {_NAME_BY_KIND[spec.kind]} can't be compiled: {_short_message(error)}") from error
        if not first_mask.any():
            raise GrammarError(
                f"this {_NAME_BY_KIND[spec.kind]} can't be met: no token of the model can begin an answer"
            )
        return grammar

    def _compile_json(self, spec: GrammarSpec, rules: str | None) -> "xgrammar.CompiledGrammar":
        rules = write_json_rules(spec) if rules is None else rules
        if rules is None:
            return self._xgrammar_compiler.compile_structural_tag(prepare_source(spec)[0])
        has_long_rule = max(map(len, rules.split("\n"))) > MAX_CACHED_RULE_LENGTH
        return (self._xgrammar_compiler if has_long_rule else self._rule_caching_compiler).compile_grammar(rules)


_NAME_BY_KIND = {
    "json_schema": "JSON schema",
    "regex": "regular expression",
    "ebnf": "EBNF grammar",
    "structural_tag": "structural tag",
}


def _short_message(error: Exception) -> str:
    text = " ".join(_SOURCE_LOCATION.sub("", str(error)).split()) or type(error).__name__
    return text if len(text) <= _MAX_REASON_LENGTH else text[:_MAX_REASON_LENGTH] + "..."


def write_rules(spec: GrammarSpec) -> str | None:
    """The rules of a grammar whose JSON schemas were converted by `convert_grammar`, in xgrammar's syntax.

    Returns None for regular expressions, for EBNF, and for a structural tag that names tokens by their text.
    Raises GrammarError, also if compiling the rules would cost too much.
    """
    if spec.kind not in ("json_schema", "structural_tag"):
        return None
    try:
        return write_json_rules(spec)
    except (RuntimeError, ValueError, TypeError) as error:
        raise GrammarError(f"this {_NAME_BY_KIND[spec.kind]} can't be compiled: {_short_message(error)}") from error


def write_json_rules(spec: GrammarSpec) -> str | None:
    """Like `write_rules`, but lets ValueError, RuntimeError and TypeError pass to the caller."""
    import xgrammar

    text, bounded_strings = prepare_source(spec)
    if spec.kind == "json_schema":
        grammar = xgrammar.Grammar.from_json_schema(text, max_whitespace_cnt=MAX_WHITESPACE)
    else:
        try:
            grammar = xgrammar.Grammar.from_structural_tag(text)
        except RuntimeError:
            if bounded_strings:
                raise
            # A tag may name tokens by their text. Only the compiler has the vocabulary that resolves such names.
            return None
    grammar_text = str(grammar)
    rules = shorten_value_lookaheads(
        merge_whitespace_rules(bounded_strings.insert_rules(grammar_text) if bounded_strings else grammar_text)
    )
    check_compile_cost(rules)
    return rules


def prepare_source(spec: GrammarSpec) -> tuple[str, BoundedStrings]:
    """Prepare a JSON schema or a structural tag for xgrammar.

    Returns (source, bounded strings). In the source, a placeholder pattern (a mark) replaces each bounded string.
    Raises ValueError for invalid JSON, and for a structural tag that is not an object.
    """
    # Parsing here gives a short error message; xgrammar's message quotes the whole source.
    source: Any = json.loads(spec.source)
    bounded_strings = BoundedStrings(spec.source)
    if spec.kind == "json_schema":
        marked = bounded_strings.mark_patterns(source)
        return (json.dumps(marked) if bounded_strings else spec.source), bounded_strings
    if not isinstance(source, dict):
        raise ValueError("a structural tag must be a JSON object")
    for json_format in _json_formats(cast("dict[str, Any]", source).get("format")):
        # In styles other than JSON, xgrammar splits patterns into letters, so `insert_rules` would not find the marks.
        if json_format.get("style", "json") == "json":
            json_format["json_schema"] = bounded_strings.mark_patterns(json_format.get("json_schema"))
        if json_format.get("max_whitespace_cnt") is None:
            json_format["max_whitespace_cnt"] = MAX_WHITESPACE
    return json.dumps(source), bounded_strings


def _json_formats(part: Any) -> Iterator[dict[str, Any]]:
    """Yield all formats of type "json_schema" inside `part`. Ignores invalid formats, which xgrammar reports."""
    if isinstance(part, list):
        for item in cast("list[Any]", part):
            yield from _json_formats(item)
    if not isinstance(part, dict):
        return
    part = cast("dict[str, Any]", part)
    if part.get("type") == "json_schema":
        yield part
    for name in _INNER_FORMAT_FIELDS:
        yield from _json_formats(part.get(name))
    rules: Any = part.get("rules")
    if isinstance(rules, list):
        for rule in cast("list[Any]", rules):
            if isinstance(rule, list):
                yield from _json_formats(cast("list[Any]", rule)[-1:])
