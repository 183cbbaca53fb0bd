import asyncio
import json
import re

import pytest

from nanovllm_core import AsyncEngine, EngineConfig, GrammarSpec, Request, RequestOutput, SamplingParams
from nanovllm_models import load, load_tokenizer

UNCONSTRAINED_QUESTIONS = [
    "Why is the sky blue?",
    "Write a haiku about the sea.",
    "Who wrote Hamlet?",
    "Suggest a name for a cat.",
]
CITY_SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "population": {"type": "integer", "minimum": 0, "maximum": 10**8},
        "rivers": {"type": "array", "items": {"enum": ["Thames", "Seine", "Tiber"]}, "maxItems": 2},
    },
    "required": ["city", "population", "rivers"],
    "additionalProperties": False,
}
CONSTRAINED_QUESTIONS = [
    ("Describe Paris as JSON.", GrammarSpec("json_schema", json.dumps(CITY_SCHEMA))),
    ("Describe London as JSON, with line breaks.", GrammarSpec("json_schema", json.dumps(CITY_SCHEMA))),
    ("What is the capital of France?", GrammarSpec("regex", "The capital of France is (Paris|London|Rome)\\.")),
    ("What is 17 + 25?", GrammarSpec("ebnf", 'root ::= "The answer is " [0-9]{1,3} "."')),
]
MAX_CONSTRAINED_LEN, UNCONSTRAINED_LEN = 48, 24

pytestmark = pytest.mark.slow


def is_city(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == ["city", "population", "rivers"]
        and len(value["city"]) <= 20
        and 0 <= value["population"] <= 10**8
        and set(value["rivers"]) <= {"Thames", "Seine", "Tiber"}
    )


async def test_constrained_answers_do_not_change_unconstrained_answers(default_model, device):
    tokenizer = load_tokenizer(default_model)
    settings = {"device": device, "dtype": "float32", "max_model_len": 512, "cpu_cache_gib": 0.5}
    engine = await AsyncEngine.start(load(default_model), EngineConfig(**settings, forbid_sync=device == "cuda"))

    async def generate(name: str, question: str, grammar: GrammarSpec | None) -> list[RequestOutput]:
        text = tokenizer.render_chat([{"role": "user", "content": question}])
        prompt = tokenizer.encode(text, add_special_tokens=False).tolist()
        max_tokens = UNCONSTRAINED_LEN if grammar is None else MAX_CONSTRAINED_LEN
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, grammar=grammar)
        return [output async for output in engine.generate(Request(name, prompt, sampling))]

    def read_tokens(outputs: list[RequestOutput]) -> list[int]:
        return [token for output in outputs for token in output.new_token_ids]

    try:
        alone = await asyncio.gather(
            *(generate(f"a{i}", question, None) for i, question in enumerate(UNCONSTRAINED_QUESTIONS))
        )
        for _, grammar in CONSTRAINED_QUESTIONS:
            await engine.compile_grammar(grammar)
        constrained = (generate(f"h{i}", *question) for i, question in enumerate(CONSTRAINED_QUESTIONS))
        beside = (generate(f"b{i}", question, None) for i, question in enumerate(UNCONSTRAINED_QUESTIONS))
        *answers, france, sum_ = await asyncio.gather(*beside, *constrained)
    finally:
        await engine.stop()
    assert [*map(read_tokens, answers[: len(UNCONSTRAINED_QUESTIONS)])] == [*map(read_tokens, alone)]
    for outputs in answers[len(UNCONSTRAINED_QUESTIONS) :]:
        assert outputs[-1].finish_reason == "stop"
        assert is_city(tokenizer.decode(read_tokens(outputs)))
    assert tokenizer.decode(read_tokens(france)) == "The capital of France is Paris."
    assert re.fullmatch(r"The answer is \d{1,3}\.", tokenizer.decode(read_tokens(sum_)))
