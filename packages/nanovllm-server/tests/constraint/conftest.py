"""Fixtures: random answers that a grammar allows, in the default model's tokens."""

import functools
import json
from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest

from nanovllm_core.grammar.compiler import Compiler, Grammar
from nanovllm_core.grammar.schema_enforcement import convert_grammar
from nanovllm_core.grammar_types import GrammarSpec
from nanovllm_models import default_model_path, load_tokenizer
from nanovllm_models.vocabulary import read_vocabulary
from nanovllm_server.constraint.answer_constraint import constrain
from nanovllm_server.parsing.detokenizing import Detokenizer, TextVocabulary
from nanovllm_server.parsing.events import CallArguments, CallBegun, ContentText, ReasoningText
from nanovllm_server.parsing.model_format import ModelFormat
from nanovllm_server.protocol.answer import parse_answer_rule
from nanovllm_server.protocol.field_reader import FieldReader
from nanovllm_server.protocol.tools import parse_tools

END_ID = 2
MAX_ANSWER_TOKENS = 400


@dataclass
class DrawnAnswer:
    text: str
    finished: bool
    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)

    def arguments(self):
        return [json.loads(arguments) for _, arguments in self.calls]


class Walker:
    """Draws random answers that a grammar allows."""

    def __init__(self, path):
        self.tokenizer = load_tokenizer(path)
        self.vocabulary = TextVocabulary(self.tokenizer.backend)
        tokens, _ = read_vocabulary(path, (END_ID,))
        self.vocab_size = len(tokens)
        compiler = Compiler(tokens, (END_ID,), self.vocab_size)
        self.compile = functools.cache(lambda spec: _compile(compiler, spec))
        self._closing_tokens = [
            self.tokenizer.encode(text, add_special_tokens=False).tolist()[0]
            for text in ('"', "}", "]", '",', '"}', "<", "\n")
        ]

    def draw(self, grammar: Grammar, random: Random, goals: tuple[str, ...] = ()) -> tuple[list[int], bool]:
        """goals: texts that the answer begins to spell at random steps."""
        matcher = grammar.start()
        masks = np.zeros((1, -(-self.vocab_size // 32)), np.int32)
        goal_tokens = [self.tokenizer.encode(goal, add_special_tokens=False).tolist() for goal in goals]
        tokens: list[int] = []
        pending_tokens: list[int] = []
        while len(tokens) < MAX_ANSWER_TOKENS:
            matcher.fill_mask(masks, 0)
            assert masks.any(), "nothing may come next"
            if not pending_tokens and goal_tokens and random.random() < 0.2:
                pending_tokens = list(random.choice(goal_tokens))
            token = self._choose(masks[0].view(np.uint8), random, pending_tokens)
            pending_tokens = pending_tokens[1:] if pending_tokens and pending_tokens[0] == token else []
            assert matcher.accept(token)
            if token == END_ID:
                return tokens, True
            tokens.append(token)
        return tokens, False

    def _choose(self, mask, random, pending_tokens):
        def allowed(token):
            return mask[token >> 3] >> (token & 7) & 1

        if pending_tokens and allowed(pending_tokens[0]):
            return pending_tokens[0]
        if allowed(END_ID) and random.random() < 0.5:
            return END_ID
        allowed_closing_tokens = list(filter(allowed, self._closing_tokens))
        if allowed_closing_tokens and random.random() < 0.5:
            return random.choice(allowed_closing_tokens)
        # Listing all allowed tokens is slow: draw a byte of the mask, then a bit of this byte.
        byte = int(random.choice(np.flatnonzero(mask)))
        return byte * 8 + random.choice([bit for bit in range(8) if mask[byte] >> bit & 1])


def _compile(compiler: Compiler, spec: GrammarSpec) -> Grammar:
    enforceable = convert_grammar(spec)
    return compiler.compile(enforceable.spec, enforceable.parameter_types)


@pytest.fixture(scope="session")
def walker() -> Walker:
    return Walker(default_model_path())


@pytest.fixture
def draw_answers(walker):
    def draw_answers(form, prompt="", *, count, seed=0, goals=(), **fields):
        model_format = ModelFormat(form, walker.vocabulary)
        body = FieldReader(fields)
        tools = parse_tools(body)
        answer_rule = parse_answer_rule(body)
        constraint = constrain(answer_rule, tools, model_format, model_format.reasoning_state(prompt))
        assert constraint is not None
        random = Random(seed)
        grammar = walker.compile(constraint.spec)
        for _ in range(count):
            tokens, finished = walker.draw(grammar, random, goals)
            schemas = None if tools is None else tools.type_schemas(grammar.parameter_types)
            parser = model_format.make_parser(
                model_format.reasoning_state(prompt),
                schemas,
                calls_only_at_start=constraint.calls_only_at_start,
                is_content_constrained=answer_rule is not None,
            )
            detokenizer = Detokenizer(walker.vocabulary, model_format.tag_ids(schemas))
            pieces = [*map(detokenizer.push, tokens), detokenizer.finish()]
            answer = DrawnAnswer("".join(pieces), finished)
            for event in [event for piece in pieces for event in parser.push(piece)] + parser.finish():
                match event:
                    case ReasoningText(text):
                        answer.reasoning += text
                    case ContentText(text):
                        answer.content += text
                    case CallBegun(_, name):
                        answer.calls.append((name, ""))
                    case CallArguments(index, text):
                        name, arguments_so_far = answer.calls[index]
                        answer.calls[index] = (name, arguments_so_far + text)
            assert not finished or not parser.in_call
            yield answer

    return draw_answers
