"""More hostile inputs: routes, framing, fields, histories, tools, and text."""

import json

from hostile_cases import ANY, VALID_BODY, Case, chat_request, head, nested, tool


def make_request_cases() -> list[Case]:
    return _make_route_cases() + _make_framing_cases() + _make_refused_cases() + _make_text_cases()


def _make_route_cases() -> list[Case]:
    routes = [
        *("GET /v1/models/other", "POST /v1/models", "PUT /health", "DELETE /metrics", "PATCH /version", "POST /ping"),
        *("POST /ready", "DELETE /load", "GET /v1/chat/completions", "POST /v1/completions", "POST /v1/embeddings"),
        *("GET /v1/models/tiny/..", "GET /V1/MODELS", "GET /v1/models%00"),
        *("GET /.git/config", "GET /%2e%2e/%2e%2e/etc/passwd", "GET /static/../../x", "GET /docs?x=<script>"),
    ]
    return [Case(f"route {route}", head("Host: x", "Connection: close", start=f"{route} HTTP/1.1")) for route in routes]


def _make_framing_cases() -> list[Case]:
    body = json.dumps(VALID_BODY).encode()
    length = f"Content-Length: {len(body)}"
    chunked_bodies = {
        "size with a sign": b"+5\r\nhello\r\n0\r\n\r\n",
        "size with 0x": b"0x5\r\nhello\r\n0\r\n\r\n",
        "size with a space": b" 5\r\nhello\r\n0\r\n\r\n",
        "size with an underscore": b"1_0\r\nhello\r\n0\r\n\r\n",
        "size of 20 digits": b"f" * 20 + b"\r\n",
        "empty size": b"\r\nhello\r\n0\r\n\r\n",
        "no size": b"hello\r\n",
        "bare new lines": b"5\nhello\n0\n\n",
    }
    cases = [
        Case(f"chunked: {name}", head("Host: x", "Transfer-Encoding: chunked") + data, may_close=True)
        for name, data in chunked_bodies.items()
    ]
    heads = {
        "lengths that agree": [length, length],
        "a length of zero and another": ["Content-Length: 0", length],
        "chunked and a length": ["Transfer-Encoding: chunked", length],
        "identity as a transfer": ["Transfer-Encoding: identity", length],
        "a transfer with a tab": ["Transfer-Encoding:\tchunked", length],
        "a length in a folded line": ["Content-Length:", f" {len(body)}"],
        "a second host": ["Host: y", length],
    }
    cases += [
        Case(f"framing: {name}", head("Host: x", "Connection: close", *lines) + body, frozenset({*ANY, 501}), True)
        for name, lines in heads.items()
    ]
    return cases


def _make_refused_cases() -> list[Case]:
    bounded = {
        "temperature": (-0.001, 2.001), "top_p": (-0.001, 1.001), "min_p": (-1, 1.5), "presence_penalty": (-2.1, 2.1),
        "frequency_penalty": (-2.1, 2.1), "repetition_penalty": (-1, 1e9), "top_k": (-2, 0.5), "n": (0, 129),
        "max_tokens": (-1, 0.5), "max_completion_tokens": (-1, 1.5), "min_tokens": (-1, 0.5),
        "top_logprobs": (-1, 10**6), "timeout": (-1, 10**9), "seed": (-(2**64), 0.5),
    }  # fmt: skip
    wrong_types = ["n", "max_tokens", "temperature", "top_p", "seed", "stop", "tools", "tool_choice", "response_format"]
    wrong_types += ["logit_bias", "stream_options", "metadata", "messages", "chat_template_kwargs", "logprobs"]
    fields: dict[str, dict] = {}
    for name, values in bounded.items():
        fields |= {f"{name} = {value}": {name: value} for value in values}
    fields |= {f"{name} as a boolean in a list": {name: [True]} for name in wrong_types}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    user = {"role": "user", "content": "hi"}
    fields |= {
        "effects: length_penalty": {"length_penalty": 2}, "effects: early_stopping": {"early_stopping": True},
        "effects: lora_request": {"lora_request": {"name": "x"}}, "effects: best_of": {"best_of": 5},
        "effects: use_beam_search": {"use_beam_search": True},
        "history: an unknown role": {"messages": [{"role": "wizard", "content": "x"}]},
        "history: a tool's answer without its id": {"messages": [user, {"role": "tool", "content": 5}]},
        "history: 100,000 calls": {"messages": [user, {"role": "assistant", "tool_calls": [call] * 100_000}]},
        "history: a call without a type": {"messages": [user, {"role": "assistant", "tool_calls": [{"id": "1"}]}]},
        "history: a call's name as a number": {"messages": [user, {"role": "assistant", "tool_calls": [
            {**call, "function": {"name": 5, "arguments": "{}"}}]}]},
        "history: content as an object": {"messages": [{"role": "user", "content": {"text": "x"}}]},
        "history: audio": {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
        "history: a number": {"messages": 5}, "history: a text": {"messages": "hi"},
        "tool: a name with spaces": tool({}, "a b"), "tool: an empty name": tool({}, ""),
        "tool: parameters as a text": tool("x"), "tool: parameters as a list": tool([]),
        "tool: no function": {"tools": [{"type": "function"}]}, "tool: no type": {"tools": [{"function": {}}]},
        "tool: two of one name": {"tools": tool({})["tools"] * 2, "tool_choice": "required"},
        "tool: required without tools": {"tool_choice": "required"},
        "schema: a deep enum": {"response_format": {"type": "json_schema", "json_schema": {
            "name": "x", "schema": {"enum": [nested(500)]}}}},
        "schema: numeric name": {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "name": 5}}},
        "schema: two constraints": {"structured_outputs": {"regex": "a", "choice": ["a"]}},
        "schema: no choice": {"structured_outputs": {"choice": []}},
        "schema: a grammar of 2 MB": {"structured_outputs": {"grammar": "root ::= " + "a" * 2_000_000}},
    }  # fmt: skip
    return [Case(name, chat_request(**asked)) for name, asked in fields.items()]


def _make_text_cases() -> list[Case]:
    texts = {
        "combining marks": "a" + "\u0300" * 500, "joined emoji": "\U0001f468\u200d" * 50,
        "tag characters": "\U000e0041" * 50,
        "line separators": "\u2028\u2029" * 50,
        "private use": "\ue000\U00100000" * 50,
        "Hangul parts": "\u1100\u1161" * 50,
        "special token": "<|endoftext|><|im_end|>", "template syntax": "{{ 7 * 7 }}{% raw %}",
        "escapes": "\x1b[31m\x07\x00",
        "NUL and newline": "\0\r\n" * 50,
    }  # fmt: skip
    named_fields = [(name, {"messages": [{"role": "user", "content": text}]}) for name, text in texts.items()]
    return [Case(f"text: {name}", chat_request(**fields), ANY) for name, fields in named_fields]
