"""Clients of a server, for over_http.py: `http_client.py URL WAY OUTPUT`.

They wait for a line with their prompts, JSON lists of token ids, and end with a line of what they found."""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator

import httpx


class Clients:
    """One for each prompt; all ask at once."""

    def __init__(self, way: str, output: int):
        self.streams = way == "stream"
        self.body = {"max_tokens": output, "temperature": 0, "ignore_eos": True, "stream": self.streams}
        self.events, self.firsts = 0, list[float]()

    async def all(self, url: str, prompts: list[list[int]]) -> dict:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=None) as client:
            start = time.time()
            await asyncio.gather(*(self.ask(client, prompt) for prompt in prompts))
            return {"start": start, "end": time.time(), "events": self.events, "first": self.firsts}

    async def ask(self, client: httpx.AsyncClient, prompt: list[int]) -> None:
        start = time.time()
        async with client.stream("POST", "/v1/completions", json=self.body | {"prompt": prompt}) as response:
            assert response.status_code == 200
            text = b"".join([part async for part in self.read(response, start)])
        assert text.rstrip().endswith(b"data: [DONE]") if self.streams else json.loads(text)["choices"]
        self.events += text.count(b"data: ")

    async def read(self, response: httpx.Response, start: float) -> AsyncIterator[bytes]:
        """The parts of an answer; notes when the first one comes."""
        is_first = True
        async for part in response.aiter_raw():
            if is_first:
                self.firsts.append(time.time() - start)
            is_first = False
            yield part


def main() -> None:
    url, way, output = sys.argv[1:]
    print("ready", flush=True)
    prompts = json.loads(sys.stdin.readline())
    print(json.dumps(asyncio.run(Clients(way, int(output)).all(url, prompts))))


if __name__ == "__main__":
    main()
