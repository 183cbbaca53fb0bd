"""Waits for a number of sequences in a server."""

import asyncio
import json
import urllib.request


async def wait_for_load(url: str, num_sequences: int) -> None:
    """Waits until the server has `num_sequences`, in all its workers."""

    def read_load() -> int:
        with urllib.request.urlopen(f"{url}/load") as response:
            return json.load(response)["server_load"]

    async with asyncio.timeout(60):
        while await asyncio.to_thread(read_load) != num_sequences:
            await asyncio.sleep(0.01)
