"""Asks a running server for answers that follow a schema, and judges the answers."""

import http.client
import json
import re
import time
import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal
from urllib.parse import urlsplit

import jsonschema
import orjson
from refusals import names_keyword
from tails import Tail, find_tail

# A schema is the format of the answer, or the parameters of a function. "required": any function must be called.
Way = Literal["answer", "required", "named"]
WAYS: tuple[Way, ...] = ("answer", "required", "named")
# refused: a 400 that names a keyword of the schema.
# no object: a 400, because arguments must be an object and the schema allows none.
# limit: a 400, because the conversation is too long or the grammar takes too long to compile.
# cut: max_tokens ended the answer.
# run away: max_tokens ended the answer inside a part of JSON that looks endless.
Verdict = Literal["valid", "refused", "no object", "limit", "cut", "run away", "invalid", "broken"]
VERDICTS: tuple[Verdict, ...] = ("valid", "refused", "no object", "limit", "cut", "run away", "invalid", "broken")
FAILURES: frozenset[Verdict] = frozenset({"run away", "invalid", "broken"})
MAX_SHOWN_CHARACTERS = 500
TIMEOUT_S = 1800
NUM_TOP_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class NamedSchema:
    corpus: str
    name: str
    schema: Any


@dataclass(frozen=True, slots=True)
class Question:
    """schemas: the schema of the answer, or the schema of the parameters of each function."""

    way: Way
    schemas: tuple[NamedSchema, ...]

    @property
    def corpus(self) -> str:
        return self.schemas[0].corpus


@dataclass(frozen=True, slots=True)
class Outcome:
    """detail: the error, the reason of a refusal, or where the answer was cut."""

    question: Question
    verdict: Verdict
    detail: str
    text: str
    tokens: int
    seconds: float
    token_ids: tuple[int, ...] = ()
    accepted_drafts: int = 0
    rejected_drafts: int = 0


@dataclass(frozen=True)
class Client:
    url: str
    max_tokens: int
    temperature: float

    @cached_property
    def model(self) -> str:
        status, body = self._exchange("GET", "/v1/models", None)
        if status != 200:
            raise RuntimeError(f"{self.url}/v1/models: status {status}")
        return body["data"][0]["id"]

    def ask(self, question: Question, seed: int) -> Outcome:
        begin = time.perf_counter()
        try:
            status, body = self._exchange("POST", "/v1/chat/completions", self._request(question, seed))
        except (OSError, http.client.HTTPException, ValueError) as error:
            return Outcome(question, "broken", f"{type(error).__name__}: {error}", "", 0, time.perf_counter() - begin)
        seconds = time.perf_counter() - begin
        verdict, detail, text = judge(question, status, body)
        if status != 200:
            return Outcome(question, verdict, detail, text, 0, seconds)
        usage, details = body["usage"], body["usage"]["completion_tokens_details"]
        return Outcome(
            question,
            verdict,
            detail,
            text,
            usage["completion_tokens"],
            seconds,
            tuple(body["choices"][0]["token_ids"]),
            details["accepted_prediction_tokens"],
            details["rejected_prediction_tokens"],
        )

    def likeliest_tokens(self, question: Question, seed: int) -> list[dict[int, float]]:
        """Asks again. Returns log-probabilities before grammar and temperature, one dict per token of the answer."""
        options = {"logprobs": True, "top_logprobs": NUM_TOP_LOGPROBS, "return_tokens_as_token_ids": True}
        status, body = self._exchange("POST", "/v1/chat/completions", {**self._request(question, seed), **options})
        if status != 200:
            raise RuntimeError(f"{self.url}: status {status} for a question that the server has answered before")
        return [
            {int(top["token"].removeprefix("token_id:")): top["logprob"] for top in entry["top_logprobs"]}
            for entry in body["choices"][0]["logprobs"]["content"]
        ]

    def _request(self, question: Question, seed: int) -> dict[str, Any]:
        settings = {
            "model": self.model,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": seed,
            "return_token_ids": True,
        }
        first = question.schemas[0]
        if question.way == "answer":
            shown = json.dumps(first.schema)[:MAX_SHOWN_CHARACTERS]
            messages = [_user(f"Give an example of {first.name}: JSON of this schema: {shown}")]
            json_schema = {"name": "answer", "strict": True, "schema": first.schema}
            return {
                **settings,
                "messages": messages,
                "response_format": {"type": "json_schema", "json_schema": json_schema},
            }
        tools = [
            {"type": "function", "function": {"name": function_name(each, index), "parameters": each.schema}}
            for index, each in enumerate(question.schemas)
        ]
        choice = {"type": "function", "function": {"name": tools[0]["function"]["name"]}}
        return {
            **settings,
            "messages": [_user(f"Call a function for an example of {first.name}.")],
            "tools": tools,
            "tool_choice": choice if question.way == "named" else "required",
        }

    def _exchange(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        parts = urlsplit(self.url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=TIMEOUT_S)
        try:
            # orjson cannot write integers beyond 64 bits, and the official suite has such integers.
            payload = None if body is None else json.dumps(body)
            connection.request(method, path, payload, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, orjson.loads(response.read())
        finally:
            connection.close()


def function_name(named: NamedSchema, index: int) -> str:
    return f"{re.sub('[^A-Za-z0-9_]+', '_', named.name)[:40]}_{index}"


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def judge(question: Question, status: int, body: Any) -> tuple[Verdict, str, str]:
    """Returns the verdict, its reason, and the judged text."""
    if status != 200:
        return _judge_refusal(status, body)
    (choice,) = body["choices"]
    message, reason = choice["message"], choice["finish_reason"]
    if question.way == "answer":
        answers = [(question.schemas[0], message["content"] or "")]
    else:
        by_name = {function_name(each, index): each for index, each in enumerate(question.schemas)}
        calls = [call["function"] for call in message["tool_calls"] or []]
        if message["content"] and reason != "length":
            return "invalid", "text beside calls", message["content"]
        if unknown_names := [call["name"] for call in calls if call["name"] not in by_name]:
            return "invalid", f"no such function: {unknown_names[0]}", ""
        answers = [(by_name[call["name"]], call["arguments"]) for call in calls]
    text = "\n".join(text for _, text in answers) or message["content"] or ""
    if reason == "length":
        tail = find_tail(answers[-1][1] if answers else text, choice["token_ids"])
        # Only the last call can be incomplete.
        problem = next((found for found in map(_find_problem, answers[:-1]) if found), None)
        return ("invalid", problem, text) if problem else (*_judge_cut(tail), text)
    if reason != _expected_finish_reason(question.way):
        return "invalid", f"finish_reason {reason}", text
    if not answers:
        return "invalid", "nothing was called", text
    problem = next((found for found in map(_find_problem, answers) if found), None)
    return ("invalid", problem, text) if problem else ("valid", "", text)


def _expected_finish_reason(way: Way) -> str:
    return "tool_calls" if way == "required" else "stop"


def _judge_cut(tail: Tail) -> tuple[Verdict, str]:
    return ("run away" if tail.endless else "cut"), tail.part


def _judge_refusal(status: int, body: Any) -> tuple[Verdict, str, str]:
    error = body["error"]
    message, code, param = error["message"], error["code"], error["param"] or ""
    detail = f"{status} {code} {param[:80]}: {message[:300]}"
    if status != 400 or not param:
        return "broken", detail, ""
    if code in ("context_length_exceeded", "invalid_grammar"):
        return "limit", detail, ""
    if code == "invalid_value" and "must be a schema that allows an object" in message:
        return "no object", detail, ""
    if code in ("unsupported_schema", "invalid_value") and names_keyword(message):
        return "refused", detail, ""
    return "broken", detail, ""


def _find_problem(answer: tuple[NamedSchema, str]) -> str | None:
    schema = answer[0].schema
    try:
        value = json.loads(answer[1])
        orjson.loads(answer[1])
    except (ValueError, RecursionError) as error:
        return f"not JSON: {error}"
    validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)(schema)
    with warnings.catch_warnings(action="ignore"):  # re warns about patterns whose meaning will change.
        problem = next(validator.iter_errors(value), None)
    return None if problem is None else f"{problem.json_path}: {problem.message[:300]}"
