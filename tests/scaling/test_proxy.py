"""HAProxy, where it is installed, in front of two servers, by the file in the docs."""

import contextlib
import re
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from openai import OpenAI
from servers import Running, started, until

pytestmark = [
    pytest.mark.once,
    pytest.mark.xdist_group("proxy"),
    pytest.mark.skipif(shutil.which("haproxy") is None, reason="HAProxy is not installed"),
]
PAGE = Path(__file__).parents[2] / "docs/scaling.md"
CONFIG = PAGE.parent / "scaling/haproxy.cfg"
ASKED = {"model": "m", "prompt": "a1b2", "max_tokens": 2, "temperature": 0}
LONG = {**ASKED, "max_tokens": 400, "ignore_eos": True}


@contextlib.contextmanager
def proxy(folder: Path, *servers: str) -> Iterator[str]:
    """The proxy's address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    text = CONFIG.read_text("utf-8").replace("bind :8080", f"bind 127.0.0.1:{port}").replace("inter 2s", "inter 100ms")
    text, count = re.subn(r"    server .*\n", "", text)
    assert count == 2
    text += "".join(f"    server s{i} {url.removeprefix('http://')}\n" for i, url in enumerate(servers))
    (folder / "haproxy.cfg").write_text(text)
    process = subprocess.Popen(["haproxy", "-f", str(folder / "haproxy.cfg")], stdout=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        until(lambda: answers(url), 30)
        yield url
    finally:
        process.kill()
        process.wait()


def answers(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/health").status_code == 200
    return False


def ask(url: str, key: str | None = None, **more) -> httpx.Response:
    headers = {} if key is None else {"X-Session-ID": key}
    return httpx.post(f"{url}/v1/completions", json={**ASKED, **more}, headers=headers, timeout=60)


def answered(url: str, key: str | None = None, **more) -> None:
    assert ask(url, key, **more).status_code == 200


def finished(*servers: Running) -> list[int]:
    return [one.llm.stats().finished for one in servers]


def which(servers, asked) -> int:
    """The number of the server that answers."""
    before = finished(*servers)
    asked()
    until(lambda: finished(*servers) != before, 10)
    (changed,) = [i for i, (old, new) in enumerate(zip(before, finished(*servers), strict=True)) if new > old]
    return changed


@pytest.fixture(scope="module")
def pair(model) -> Iterator[tuple[Running, Running]]:
    for one in started(model, model_name="m"):
        for two in started(model, model_name="m"):
            yield one, two


@pytest.fixture(scope="module")
def url(pair, tmp_path_factory) -> Iterator[str]:
    with proxy(tmp_path_factory.mktemp("proxy"), *(one.url for one in pair)) as found:
        yield found


def test_a_key_stays_with_its_server_and_keys_are_spread_over_both(pair, url):
    places = {key: which(pair, partial(answered, url, key)) for key in map(str, range(12))}
    assert set(places.values()) == {0, 1}
    again = {key: which(pair, partial(answered, url, key, prompt="c3")) for key in places}
    assert again == places


def test_the_key_may_be_openais_own_in_the_body(pair, url):
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    chosen = {}
    for key in ("a", "b", "c", "d", "e", "f", "a", "b", "c", "d", "e", "f"):
        body = {"prompt_cache_key": key}
        place = which(pair, lambda body=body: client.completions.create(**ASKED, extra_body=body))
        assert chosen.setdefault(key, place) == place
    assert set(chosen.values()) == {0, 1}


def test_requests_without_a_key_go_to_both(pair, url):
    before = finished(*pair)
    for _ in range(10):
        answered(url)
    until(lambda: sum(finished(*pair)) == sum(before) + 10, 10)
    assert all(new > old for old, new in zip(before, finished(*pair), strict=True))


def test_an_answer_is_streamed_while_it_is_made(pair, url):
    with httpx.stream("POST", f"{url}/v1/completions", json={**LONG, "stream": True}, timeout=60) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        assert sum(one.llm.stats().running for one in pair) == 1
        assert [line for line in lines if line][-1] == "data: [DONE]"


def test_a_client_that_goes_away_frees_its_row(pair, url):
    before = finished(*pair)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/completions", json={**LONG, "max_tokens": 900}, timeout=httpx.Timeout(60, read=0.2))
    until(lambda: sum(one.llm.stats().running for one in pair) == 0)
    assert sum(finished(*pair)) <= sum(before) + 1


def test_a_body_that_is_longer_than_the_buffer_passes(pair, url):
    answer = ask(url, "long", prompt="a1" * 1_000_000)
    assert answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.fixture
def leaving(model) -> Iterator[Running]:
    yield from started(model, model_name="m")


def test_a_server_that_drains_ends_its_answers_and_the_other_one_takes_its_keys(leaving, pair, tmp_path):
    servers = leaving, pair[0]
    with proxy(tmp_path, *(one.url for one in servers)) as url:
        key = next(key for key in map(str, range(100)) if which(servers, partial(answered, url, key)) == 0)
        body, headers = {**LONG, "stream": True}, {"X-Session-ID": key}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=headers, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            leaving.server.handle_exit(signal.SIGTERM, None)
            assert leaving.llm.stats().running == 1
            (before,) = finished(pair[0])
            for _ in range(3):
                answered(url, key)
            until(lambda: finished(pair[0]) == [before + 3], 10)
            assert [line for line in lines if line][-1] == "data: [DONE]"


class Refusing(BaseHTTPRequestHandler):
    """Is healthy, and refuses every request."""

    status, health, asked, checked = 503, 200, 0, 0

    def do_GET(self):
        type(self).checked += self.health != 200
        self.answer(self.health)

    def do_POST(self):
        type(self).asked += 1
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(self.status)

    def answer(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Retry-After", "7")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def refusing(status: int) -> Iterator[tuple[str, type[Refusing]]]:
    """The address of a server that does so with this status, and its handler, which counts."""
    handler = type("Handler", (Refusing,), {"status": status})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", handler
    finally:
        server.shutdown()


def test_another_server_is_asked_where_one_is_not_ready(pair, tmp_path):
    with refusing(503) as (other, handler), proxy(tmp_path, other, pair[0].url) as url:
        assert [ask(url, str(i)).status_code for i in range(8)] == [200] * 8
        assert handler.asked > 0


def test_a_full_server_tells_the_client_when_to_come_again(tmp_path):
    with refusing(429) as (other, _), proxy(tmp_path, other) as url:
        answer = ask(url)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")


def test_the_address_is_healthy_as_long_as_a_server_is(tmp_path):
    with refusing(503) as (one, first), refusing(503) as (two, second), proxy(tmp_path, one, two) as url:
        first.health = 503
        until(lambda: first.checked > 3)
        assert answers(url)
        second.health = 503
        until(lambda: not answers(url), 30)


def test_the_servers_may_be_those_of_a_name(tmp_path):
    (lines,) = re.findall(r"```haproxy\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    text = re.sub(r"    server .*\n", "", CONFIG.read_text("utf-8"))
    (tmp_path / "haproxy.cfg").write_text(text + lines)
    done = subprocess.run(["haproxy", "-c", "-f", str(tmp_path / "haproxy.cfg")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
