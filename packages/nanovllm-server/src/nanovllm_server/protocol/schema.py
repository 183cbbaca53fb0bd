"""TEMP"""

from nanovllm_server.protocol.json import JSON


def check_schema(schema: JSON, path: str) -> JSON:
    """TEMP."""
    return schema
