"""Hostile inputs of a server, and the answers that are allowed."""

import json
import random
import secrets
from dataclasses import dataclass

VALID_BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
REFUSED = frozenset(range(400, 500))
# Allowed statuses of cases that a later release may accept.
ANY = REFUSED | {200}
# `Case.make_data` replaces this text with a new value, so that no grammar is cached.
UNIQUE = "unique-value"
# ADDED_GAP_LIMIT_S: maximum time that a case adds between two chunks of a stream.
ANSWER_LIMIT_S = 1.0
ADDED_GAP_LIMIT_S = 0.1


@dataclass(frozen=True)
class Case:
    """may_close: whether the server may close the connection without an answer.

    leave: how the client disconnects: "close", "half" (only the sending side) or "reset". The answer is not checked.
    """

    name: str
    data: bytes
    statuses: frozenset[int] = REFUSED
    may_close: bool = False
    leave: str | None = None

    @property
    def is_refused(self) -> bool:
        return 200 not in self.statuses

    def make_data(self) -> bytes:
        return self.data.replace(UNIQUE.encode(), secrets.token_hex(len(UNIQUE) // 2).encode())


def head(*lines: str | bytes, start: str = "POST /v1/chat/completions HTTP/1.1") -> bytes:
    encoded = [line if isinstance(line, bytes) else line.encode("latin-1") for line in (start, *lines)]
    return b"\r\n".join([*encoded, b"", b""])


def post(body: bytes, *lines: str | bytes, content_type: str = "application/json") -> bytes:
    return (
        head("Host: x", "Connection: close", f"Content-Type: {content_type}", f"Content-Length: {len(body)}", *lines)
        + body
    )


def chat_request(**fields) -> bytes:
    return post(json.dumps({**VALID_BODY, **fields}).encode())


def chunked(*parts: bytes) -> bytes:
    return head("Host: x", "Content-Type: application/json", "Transfer-Encoding: chunked") + b"".join(parts)


def nested(depth: int, inner="x"):
    value = inner
    for _ in range(depth):
        value = [value]
    return value


def nested_schema(depth: int) -> dict:
    schema: dict = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def message(content, **fields) -> dict:
    return {"messages": [{"role": "user", "content": content, **fields}]}


def tool(parameters, name="f") -> dict:
    return {"tools": [{"type": "function", "function": {"name": name, "parameters": parameters}}]}


def make_wire_cases() -> list[Case]:
    """Cases below JSON: input that is not HTTP, and unusual HTTP."""
    body = json.dumps(VALID_BODY).encode()
    chunk = b"%x\r\n%b\r\n" % (len(body), body)
    noise = random.Random(0)
    tls_hello = bytes.fromhex("16030100c8010000c40303") + noise.randbytes(193)
    bad_hosts = ["[::1", "a b", "\xff\xfe", "", "x" * 5000, "@", "..", "a:99999", "a:b", "<script>", "a/b", "a\tb"]
    lengths = ["-1", "+5", "0x10", "1e3", "", "9" * 30, "5, 6", "\u00b2", "1 2", "1_0"]
    cases = [
        Case("nothing at all", b"", leave="close"),
        Case("noise", noise.randbytes(4096), may_close=True),
        Case("zeros", bytes(4096), may_close=True),
        Case("TLS", tls_hello, may_close=True),
        Case("a line of 1 MB", b"A" * (1 << 20), may_close=True),
        Case("one word", b"GET\r\n\r\n", may_close=True),
        Case("HTTP/0.9", b"GET /\r\n\r\n", may_close=True),
        Case("HTTP/9.9", head("Host: x", "Connection: close", start="GET / HTTP/9.9"), ANY, may_close=True),
        Case("HTTP/1.0", b"POST /v1/chat/completions HTTP/1.0\r\n\r\n"),
        Case("HTTP/2 and then noise", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + noise.randbytes(2000), may_close=True),
        Case("h2c and then noise", head("Host: x", "Upgrade: h2c", "Connection: Upgrade", start="GET / HTTP/1.1")
             + noise.randbytes(2000), ANY, may_close=True),
        Case("a method of 20 kB", head("Host: x", start="A" * 20_000 + " / HTTP/1.1"), may_close=True),
        Case("a method of no letters", head("Host: x", start="()<> / HTTP/1.1"), may_close=True),
        Case("a path of 20 kB", head("Host: x", start=f"GET /{'a' * 20_000} HTTP/1.1"), may_close=True),
        Case("a path of 8 kB", head("Host: x", "Connection: close", start=f"GET /{'a' * 8000} HTTP/1.1")),
        Case("NUL in a path", head("Host: x", start="GET /\x00 HTTP/1.1"), may_close=True),
        Case("bytes in a path", head("Host: x", start="GET /\xff\xfe HTTP/1.1"), may_close=True),
        Case("escaped bytes in a path", head("Host: x", "Connection: close", start="GET /%ff%ed%a0%80%00 HTTP/1.1")),
        Case("a new line in a path", head("Host: x", "Connection: close", start="GET /a%0d%0aX:%20y HTTP/1.1")),
        Case("dots in a path", head("Host: x", "Connection: close", start="GET /../../etc/passwd HTTP/1.1")),
        Case("another server's path", head("Host: x", "Connection: close", start="GET http://else/x HTTP/1.1")),
        Case("a proxy", head("Host: x", "Connection: close", start="CONNECT else:443 HTTP/1.1")),
        Case("a star", head("Host: x", "Connection: close", start="OPTIONS * HTTP/1.1"), may_close=True),
        Case("a model's name of 8 kB",
             head("Host: x", "Connection: close", start=f"GET /v1/models/{'a%2F' * 2000} HTTP/1.1")),
        Case("TRACE", head("Host: x", "Connection: close", start="TRACE / HTTP/1.1")),
        Case("DELETE", head("Host: x", "Connection: close", start="DELETE /v1/chat/completions HTTP/1.1")),
        Case("a made-up method", head("Host: x", "Connection: close", start="BREW /v1/chat/completions HTTP/1.1")),
        Case("no host", head("Content-Length: 0"), may_close=True),
        Case("two hosts", head("Host: x", "Host: y"), may_close=True),
        Case("a header without a colon", head("Host: x", "nothing"), may_close=True),
        Case("a header without a name", head("Host: x", ": y"), may_close=True),
        Case("a space before the colon", head("Host: x", "Content-Length : 5"), may_close=True),
        Case("NUL in a header", head("Host: x", "X: a\x00b"), may_close=True),
        Case("a folded header", head("Host: x", "X: a", " b", "Connection: close")),
        Case("10,000 headers", head("Host: x", *(f"X-{i}: y" for i in range(10_000))), may_close=True),
        Case("10,000 of one header", head("Host: x", *["X: y"] * 10_000), may_close=True),
        Case("500 headers", head("Host: x", "Connection: close", *(f"X-{i}: y" for i in range(500)))),
        Case("a header of 100 kB", head("Host: x", f"X: {'y' * 100_000}"), may_close=True),
        Case("a name of 100 kB", head("Host: x", f"{'X' * 100_000}: y"), may_close=True),
        Case("headers without an end", b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 200_000, may_close=True),
        Case("bare new lines", b"GET /nothing HTTP/1.1\nHost: x\nConnection: close\n\n"),
        Case("bare returns", b"GET /nothing HTTP/1.1\rHost: x\r\r", leave="close"),
        Case("two lengths", head("Host: x", "Content-Length: 5", "Content-Length: 6") + b"hello!", may_close=True),
        Case("a length and chunks", head("Host: x", "Connection: close", "Content-Length: 5",
             "Transfer-Encoding: chunked") + b"0\r\n\r\nGET /smuggled HTTP/1.1\r\n\r\n", may_close=True),
        Case("gzip as a transfer", head("Host: x", "Transfer-Encoding: gzip"), frozenset({*REFUSED, 501}),
             may_close=True),
        Case("chunked twice", head("Host: x", "Transfer-Encoding: chunked, chunked"), frozenset({*REFUSED, 501}),
             may_close=True),
        Case("nearly chunked", head("Host: x", "Transfer-Encoding: xchunked"), frozenset({*REFUSED, 501}),
             may_close=True),
        Case("a chunk without a number", chunked(b"zz\r\n"), may_close=True),
        Case("a negative chunk", chunked(b"-1\r\n"), may_close=True),
        Case("an enormous chunk", chunked(b"f" * 15 + b"\r\nx"), leave="close"),
        Case("a chunk's number of 1 MB", chunked(b"0" * (1 << 20) + b"1\r\nx\r\n"), may_close=True),
        Case("an extension of 1 MB", chunked(b"1;" + b"a" * (1 << 20) + b"\r\nx\r\n0\r\n\r\n"), may_close=True),
        Case("a chunk without its end", chunked(b"1\r\nxx\r\n"), may_close=True),
        Case("chunks of one byte", chunked(*(b"1\r\n%c\r\n" % byte for byte in b"{" * 5000), b"0\r\n\r\n")),
        Case("trailers without an end", chunked(chunk, b"0\r\n" + b"X: y\r\n" * 100_000), ANY, may_close=True),
        Case("100 MB in chunks", chunked(*[b"100000\r\n" + b" " * (1 << 20) + b"\r\n"] * 100, b"0\r\n\r\n")),
        Case("100 MB announced", head("Host: x", "Connection: close", "Content-Type: application/json",
             "Content-Length: 104857600"), leave="close"),
        Case("more than was announced", post(body) + b"x" * 100_000, ANY, may_close=True),
        Case("less than was announced", head("Host: x", "Content-Type: application/json", "Content-Length: 500") + body,
             leave="close"),
        Case("continue, and nothing more", head("Host: x", "Expect: 100-continue", "Content-Length: 10"),
             leave="close"),
        Case("another expectation", post(body, "Expect: the-spanish-inquisition"), ANY, may_close=True),
        Case("a websocket", head("Host: x", "Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13",
             "Sec-WebSocket-Key: x3JJHMbDL1EzLkh9GBhXDw==", start="GET /v1/chat/completions HTTP/1.1")),
        Case("half a websocket", head("Host: x", "Upgrade: websocket", "Connection: Upgrade",
             start="GET /v1/chat/completions HTTP/1.1")),
        Case("20 at once", head("Host: x", start="GET /nothing HTTP/1.1") * 19
             + head("Host: x", "Connection: close", start="GET /nothing HTTP/1.1")),
        Case("noise after a request", head("Host: x", start="GET /nothing HTTP/1.1") + noise.randbytes(500)),
        Case("one and a half", chat_request() + head("Host: x")[:20], ANY, leave="close"),
        Case("closed for writing", chat_request(max_tokens=50), leave="half"),
        Case("reset in the body", chat_request()[:-10], leave="reset"),
        Case("reset in the head", head("Host: x")[:30], leave="reset"),
        Case("reset in the answer", chat_request(max_tokens=50, stream=True), leave="reset"),
    ]  # fmt: skip
    cases += [
        Case(f"host {host[:10]!r}", head(f"Host: {host}", "Connection: close"), may_close=True) for host in bad_hosts
    ]
    cases += [
        Case(f"length {length[:10]!r}", head("Host: x", f"Content-Length: {length}".encode()) + body, may_close=True)
        for length in lengths
    ]
    return cases


def make_body_cases() -> list[Case]:
    text = json.dumps(VALID_BODY)
    wrong_content_types = ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data",
                           "application/json\x00", "application/json; charset=utf-16",
                           "application/json; charset=" + "x" * 4000, "*/*", "json"]  # fmt: skip
    raw: dict[str, bytes] = {
        "nothing": b"", "a brace": b"{", "null": b"null", "a text": b'"x"', "a number": b"1", "a list": b"[]",
        "a BOM": b"\xef\xbb\xbf" + text.encode(), "UTF-16": text.encode("utf-16"), "UTF-32": text.encode("utf-32"),
        "Latin-1": text.replace("hi", "\xe9").encode("latin-1"), "NUL": text.replace("hi", "\0").encode(),
        "zeros": bytes(10_000), "bad UTF-8": text.encode().replace(b"hi", b"\xc0\xaf\xf5\xff"),
        "half a surrogate pair": text.encode().replace(b"hi", b"\\ud800"),
        "the other half": text.encode().replace(b"hi", b"\\udc00\\ud800"),
        "an encoded surrogate": text.encode().replace(b"hi", b"\xed\xa0\x80"),
        "a bad escape": text.encode().replace(b"hi", b"\\x41"),
        "half an escape": text.encode().replace(b"hi", b"\\u00"),
        "NaN": b'{"temperature": NaN}', "Infinity": b'{"temperature": -Infinity}', "1e999": b'{"temperature": 1e999}',
        "two values": text.encode() + text.encode(), "a comment": b"/* */" + text.encode(),
        "single quotes": text.replace('"', "'").encode(), "a trailing comma": text[:-1].encode() + b",}",
        "100,000 lists": b"[" * 100_000, "100,000 whole lists": b"[" * 100_000 + b"]" * 100_000,
        "5,000 objects": b'{"a":' * 5000 + b"1" + b"}" * 5000, "500,000 keys": b"{" + b",".join(
            b'"%d":1' % key for key in range(500_000)) + b"}",
        "16 MB of lists": b"[" + b"[]," * 5_500_000 + b"[]]", "16 MB of spaces": b" " * 16_700_000,
        "17 MB": b" " * (17 << 20), "a key of 1 MB": b'{"' + b"k" * (1 << 20) + b'": 1}',
        "an integer of 100,000 digits": b'{"seed": ' + b"9" * 100_000 + b"}",
        "a fraction of 100,000 digits": text[:-1].encode() + b', "top_p": 1.' + b"9" * 100_000 + b"}",
        "gzip": bytes.fromhex("1f8b0800000000000003") + b"x" * 50,
    }  # fmt: skip
    cases = [Case(f"body: {name}", post(data)) for name, data in raw.items() if name != "NUL"]
    cases += [Case("body: NUL", post(raw["NUL"]), REFUSED | {200})]
    cases += [
        Case(f"kind: {kind[:30]!r}", post(text.encode(), content_type=kind), may_close=True)
        for kind in wrong_content_types
    ]
    encodings = ("gzip", "br", "identity, gzip", "x" * 4000)
    cases += [
        Case(f"encoding: {coding[:10]}", post(text.encode(), f"Content-Encoding: {coding}")) for coding in encodings
    ]
    return cases


def make_field_cases() -> list[Case]:
    refused_fields: dict[str, dict] = {
        "n": {"n": 10**6}, "n below": {"n": -1}, "n as a float": {"n": 1.5}, "n as a text": {"n": "1"},
        "max_tokens": {"max_tokens": 2**63}, "max_tokens, larger": {"max_tokens": 10**40},
        "max_tokens -0.0": {"max_tokens": -0.0}, "temperature": {"temperature": 1e308},
        "temperature as lists": {"temperature": nested(300)},
        "temperature as an object": {"temperature": {"a": nested(900)}},
        "seed": {"seed": 2**64}, "top_p": {"top_p": -1e-320}, "top_k": {"top_k": 1e300},
        "priority": {"priority": 2**40},
        "model": {"model": "x" * 10**6}, "model with NUL": {"model": "\0"},
        "model as a path": {"model": "../../etc/passwd"},
        "messages": {"messages": []}, "100,000 messages": {"messages": [{"role": "user", "content": ""}] * 100_000},
        "lists as messages": {"messages": nested(500)}, "a null message": {"messages": [None]},
        "a role": {"messages": [{"role": "x" * 10**6, "content": "a"}]}, "an image": message([{"type": "image_url"}]),
        "a deep part": message(nested(500)), "100,000 bad parts": message([{"type": "x"}] * 100_000),
        "deep text": message([{"type": "text", "text": nested(500)}]), "a name": message("a", name=nested(10)),
        "far too long": message("word " * 200_000), "a million letters": message("a" * 10**6),
        "a million spaces": message(" " * 10**6), "a million accents": message("e" + "\u0301" * 10**6),
        "a million faces": message("\U0001f600" * 10**6), "a million lines": message("\n" * 10**6),
        "only marks": message("<|im_start|>" * 20_000), "stop": {"stop": ["x"] * 10_000},
        "an empty stop": {"stop": [""]},
        "a stop of 1 MB": {"stop": "x" * 10**6}, "stop as lists": {"stop": nested(400)},
        "logit_bias": {"logit_bias": {str(key): 1 for key in range(49_000)}},
        "logit_bias by names": {"logit_bias": {"1" * 10_000: 1}},
        "logit_bias of lists": {"logit_bias": {"1": nested(300)}},
        "stop_token_ids": {"stop_token_ids": [1] * 10**5}, "bad_words": {"bad_words": ["x"] * 10**5},
        "a long bad word": {"bad_words": ["x" * 10**5]}, "documents": {"documents": nested(400)},
        "100,000 documents, and a number": {"documents": [{"text": "x"}] * 100_000 + [1]},
        "metadata": {"metadata": nested(400)}, "user": {"user": nested(400)}, "stream": {"stream": "true"},
        "stream_options": {"stream": True, "stream_options": nested(300)},
        "top_logprobs": {"logprobs": True, "top_logprobs": 10**9},
        "tools": {"tools": [{}] * 100_000}, "tools as lists": {"tools": nested(400)}, "a tool's name": tool({},
        "x" * 10**6),
        "a tool's name with NUL": tool({}, "\0"), "tool_choice": {"tool_choice": nested(400)},
        "a choice of no tool": {"tool_choice": {"type": "function", "function": {"name": "x"}}},
        "arguments": {"messages": [{"role": "assistant", "content": "", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": nested(300)}}]}]},
        "template values": {"chat_template_kwargs": {"tokenize": True}},
        "template values, reserved": {"chat_template_kwargs": {"chat_template": "{{ 1 }}", "messages": []}},
        "template values, a list": {"chat_template_kwargs": nested(400)}, "timeout": {"timeout": 1e308},
        "truncate": {"truncate_prompt_tokens": -5},
        "both ends": {"add_generation_prompt": True, "continue_final_message": True},
        "a template": {"chat_template": "{% for a in range(10**9) %}{% endfor %}"},
        "old constraints": {"guided_regex": "(a+)+$"},
        "response_format": {"response_format": nested(400)},
        "response_format of no kind": {"response_format": {"type": "x"}},
        "request_id": {"request_id": "a\r\nSet-Cookie: x"}, "cache_salt": {"cache_salt": "x" * 10**6},
        "allowed_token_ids": {"allowed_token_ids": [1] * 10**5}, "allowed lists": {"allowed_token_ids": nested(400)},
        "allowed ids beyond the vocabulary": {"allowed_token_ids": [2**31]}, "reasoning": {"reasoning": nested(300)},
        "reasoning of lists": {"reasoning": {"effort": nested(300)}}, "xargs": {"vllm_xargs": {"a": nested(400)}},
        "reasoning_effort": {"reasoning_effort": nested(300)}, "prompt_logprobs": {"prompt_logprobs": 10**9},
    }  # fmt: skip
    recursive = {"$ref": "#"}
    mutual = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    catastrophe = {"type": "string", "pattern": "^((a+)+|(b?){9999})*$"}
    wide = {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(20_000)}}
    tolerated_fields: dict[str, dict] = {
        "an unknown field of 1 MB": {"x" * 10**6: 1}, "100,000 unknown fields": {f"x{i}": i for i in range(100_000)},
        "a field with a new line": {"a\nERROR injected": 1}, "a deep unknown field": {"x": nested(900)},
        "10,000 parts": message([{"type": "text", "text": ""}] * 10_000), "NUL": message("\0" * 100),
        "marks of direction": message("\u202e\u2066\ufeff" * 100), "non-characters": message("\uffff\U0010ffff" * 100),
        "deep template values": {"chat_template_kwargs": {"a": nested(900)}}, "a deep tool": tool(nested_schema(400)),
        "-0 as a temperature": {"temperature": -0.0}, "a small temperature": {"temperature": 5e-324},
    }  # fmt: skip
    for name, schema in {
        "recursive": recursive, "mutual": mutual, "catastrophic": catastrophe, "deep": nested_schema(400), "wide": wide,
    }.items():  # fmt: skip
        schema = {"title": UNIQUE, **schema}
        json_schema = {"name": "x", "schema": schema, "strict": True}
        tolerated_fields[f"{name} schema"] = {"response_format": {"type": "json_schema", "json_schema": json_schema}}
        tolerated_fields[f"{name} structured output"] = {"structured_outputs": {"json": schema}}
        tolerated_fields[f"{name} tool"] = tool(schema)
    for name, pattern in {
        "nested": "(a*)*b",
        "counted": "(a{1,1000}){1,1000}",
        "back": "(a)\\1",
        "deep": "(" * 500,
    }.items():
        tolerated_fields[f"{name} regex"] = {"structured_outputs": {"regex": f"{UNIQUE}|{pattern}"}}
    return [Case(name, chat_request(**refused_fields[name])) for name in refused_fields] + [
        Case(name, chat_request(**tolerated_fields[name]), ANY) for name in tolerated_fields
    ]


# The first grammar starts the process that compiles grammars, which takes seconds.
WARM_UP = Case("first grammar", chat_request(structured_outputs={"regex": "a"}), frozenset({200}))
