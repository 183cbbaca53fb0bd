"""Answers of the default model match their grammars, and do not change free answers in the same batch."""

import asyncio
import json
import re

import pytest

from nanovllm_core import AsyncEngine, EngineConfig, GrammarSpec, Request, RequestOutput, SamplingParams
from nanovllm_models import load, load_tokenizer

FREE = ["Why is the sky blue?", "Write a haiku about the sea.", "Who wrote Hamlet?", "Suggest a name for a cat."]
CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "population": {"type": "integer", "minimum": 0, "maximum": 10**8},
        "rivers": {"type": "array", "items": {"enum": ["Thames", "Seine", "Tiber"]}, "maxItems": 2},
    },
    "required": ["city", "population", "rivers"],
    "additionalProperties": False,
}
HELD = [
    ("Describe Paris as JSON.", GrammarSpec("json_schema", json.dumps(CITY))),
    ("Describe London as JSON, with line breaks.", GrammarSpec("json_schema", json.dumps(CITY))),
    ("What is the capital of France?", GrammarSpec("regex", "The capital of France is (Paris|London|Rome)\\.")),
    ("What is 17 + 25?", GrammarSpec("ebnf", 'root ::= "The answer is " [0-9]{1,3} "."')),
]
OUTPUT = 48

pytestmark = pytest.mark.slow


def is_city(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == ["city", "population", "rivers"]
        and len(value["city"]) <= 20
        and 0 <= value["population"] <= 10**8
        and set(value["rivers"]) <= {"Thames", "Seine", "Tiber"}
    )


async def test_free_answers_beside_constrained_ones_do_not_change(default_model, device):
    tokenizer = load_tokenizer(default_model)
    settings = {"device": device, "dtype": "float32", "max_model_len": 512, "cpu_cache_gib": 0.5}
    engine = await AsyncEngine.start(load(default_model), EngineConfig(**settings, forbid_sync=device == "cuda"))

    async def ask(name: str, question: str, grammar: GrammarSpec | None) -> list[RequestOutput]:
        text = tokenizer.render_chat([{"role": "user", "content": question}])
        prompt = tokenizer.encode(text, add_special_tokens=False).tolist()
        sampling = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True, grammar=grammar)
        return [output async for output in engine.generate(Request(name, prompt, sampling))]

    def tokens(outputs: list[RequestOutput]) -> list[int]:
        return [token for output in outputs for token in output.new_token_ids]

    try:
        alone = await asyncio.gather(*(ask(f"a{i}", question, None) for i, question in enumerate(FREE)))
        for _, grammar in HELD:
            await engine.compile(grammar)
        held = (ask(f"h{i}", *question) for i, question in enumerate(HELD))
        beside = (ask(f"b{i}", question, None) for i, question in enumerate(FREE))
        *answers, france, sum_ = await asyncio.gather(*beside, *held)
    finally:
        await engine.stop()
    assert [tokens(each) for each in answers[: len(FREE)]] == [tokens(each) for each in alone]
    for outputs in answers[len(FREE) :]:
        assert outputs[-1].finish_reason == "stop"
        assert is_city(tokenizer.decode(tokens(outputs)))
    assert tokenizer.decode(tokens(france)) == "The capital of France is Paris."
    assert re.fullmatch(r"The answer is \d{1,3}\.", tokenizer.decode(tokens(sum_)))
