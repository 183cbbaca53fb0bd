import asyncio
from collections.abc import Callable
from urllib.parse import urlsplit

from nanovllm_server.chat.service import Service


async def connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    parts = urlsplit(url)
    return await asyncio.open_connection(parts.hostname, parts.port)


async def until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


async def expire_after_first_token(service: Service) -> None:
    """Let the only running request reach its timeout as soon as it has its first token."""
    await until(lambda: [generation for generation in service.running if generation.first_token_s is not None])
    (generation,) = service.running
    generation._expire(30)
