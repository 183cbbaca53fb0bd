"""Parses streams of server-sent events."""

import json

DONE_BLOCK = "data: [DONE]"


def parse_events(data: bytes) -> list[dict]:
    """Returns the JSON bodies of a complete stream, of chunks and errors. Skips comments, which slow streams have."""
    *blocks, remainder = data.decode().split("\n\n")
    blocks = [block for block in blocks if not block.startswith(":")]
    assert remainder == ""
    assert blocks.pop() == DONE_BLOCK
    return [json.loads(block.removeprefix("event: error\n").removeprefix("data: ")) for block in blocks]
