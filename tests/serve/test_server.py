"""The server as OpenAI's client and plain HTTP see it. What it answers is what the library answers."""

import json
import re
import socket
import threading
import time

import httpx
import numpy as np
import openai
import pytest
from servers import started, until

from mla_jax import SamplingParams

pytestmark = [pytest.mark.once, pytest.mark.xdist_group("serve")]

GREEDY = {"model": "tiny", "temperature": 0, "max_tokens": 12}
JSON = {"Content-Type": "application/json"}
SAID = [{"role": "user", "content": "a1b2c3"}]


def greedy(running, prompt, **more):
    given = {"temperature": 0.0, "max_tokens": 12} | more
    return running.llm.generate([prompt], SamplingParams(**given))[0]


def stream_lines(running, path: str, body: dict) -> list[str]:
    with httpx.stream("POST", running.url + path, json={**body, "stream": True}, timeout=120) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        return [line for line in response.iter_lines() if line]


def events(lines: list[str]) -> list[dict]:
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1] if not line.startswith(":")]


def error_of(response: httpx.Response, status: int) -> dict:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_a_completion_is_the_librarys_answer(running):
    found = running.client.completions.create(prompt="a1b2", **GREEDY)
    expected = greedy(running, "a1b2")
    assert found.choices[0].text == expected.text
    assert found.choices[0].finish_reason == "length"
    assert found.model == "tiny"
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (len(expected.prompt_token_ids), 12)


def test_a_completion_without_a_number_has_16_tokens_and_a_chat_as_many_as_the_context_allows(running):
    found = running.client.completions.create(model="tiny", prompt="a1", extra_body={"ignore_eos": True})
    assert found.usage is not None
    assert found.usage.completion_tokens == 16
    found = running.client.chat.completions.create(model="tiny", messages=SAID, extra_body={"ignore_eos": True})
    assert found.usage is not None
    assert found.usage.total_tokens == running.llm.context


@pytest.mark.parametrize("n", [1, 2])
def test_prompts_may_be_texts_or_token_ids_alone_or_several(running, n):
    ids = [running.llm.tokenizer.encode(text) for text in ("a1", "b2c3")]
    expected = [greedy(running, prompt).text for prompt in ids for _ in range(n)]
    for prompt in (["a1", "b2c3"], ids):
        found = running.client.completions.create(prompt=prompt, n=n, **GREEDY)
        assert [choice.index for choice in found.choices] == list(range(2 * n))
        assert [choice.text for choice in found.choices] == expected
    assert running.client.completions.create(prompt=ids[1], **GREEDY).choices[0].text == expected[-1]


@pytest.mark.deep
@pytest.mark.parametrize("kind", ["completions", "chat/completions"])
def test_the_pieces_of_a_stream_are_the_whole_answer_and_its_end_comes_alone(running, kind):
    body = {**GREEDY, "n": 2, "temperature": 0.9, "seed": 5, "max_tokens": 40, "ignore_eos": True}
    body |= {"prompt": "a1"} if kind == "completions" else {"messages": SAID}
    whole = running.post(f"/v1/{kind}", body).json()
    pieces = events(stream_lines(running, f"/v1/{kind}", {**body, "stream_options": {"include_usage": True}}))
    texts, ends = {0: "", 1: ""}, {}
    for piece in pieces[:-1]:
        assert piece["usage"] is None
        (choice,) = piece["choices"]
        text = choice["text"] if kind == "completions" else choice["delta"].get("content", "")
        assert choice["index"] not in ends, "nothing follows the end"
        if choice["finish_reason"]:
            assert not text
            ends[choice["index"]] = choice["finish_reason"]
        texts[choice["index"]] += text
    said = [c["text"] if kind == "completions" else c["message"]["content"] for c in whole["choices"]]
    assert [texts[0], texts[1]] == said
    assert said[0] != said[1]
    assert ends == {0: "length", 1: "length"}
    assert pieces[-1]["choices"] == []
    assert {**pieces[-1]["usage"], "prompt_tokens_details": 0} == {**whole["usage"], "prompt_tokens_details": 0}
    assert len({piece["id"] for piece in pieces}) == 1


def test_figures_come_in_a_stream_only_if_they_are_asked_for(running):
    body = {**GREEDY, "prompt": "a1"}
    assert all("usage" not in piece for piece in events(stream_lines(running, "/v1/completions", body)))
    cumulative = {"include_usage": True, "continuous_usage_stats": True}
    pieces = events(stream_lines(running, "/v1/completions", {**body, "stream_options": cumulative}))
    counts = [piece["usage"]["completion_tokens"] for piece in pieces]
    assert counts == sorted(counts)
    assert counts[-1] == 12
    error = error_of(running.post("/v1/completions", {**body, "stream_options": cumulative}), 400)
    assert "stream" in error["message"]


def test_a_chat_streams_a_role_first_and_the_client_reads_it(running):
    stream = running.client.chat.completions.create(messages=SAID, stream=True, **GREEDY)
    deltas = [chunk.choices[0].delta for chunk in stream]
    assert (deltas[0].role, deltas[0].content) == ("assistant", "")
    assert deltas[-1].content is None
    expected = running.llm.chat(SAID, SamplingParams(temperature=0, max_tokens=12)).text
    assert "".join(delta.content or "" for delta in deltas) == expected


@pytest.mark.deep
def test_echo_with_log_probabilities_scores_every_token_of_a_prompt(running):
    """As evaluation harnesses ask: by token ids, with one token of output, or none."""
    prompt = running.llm.tokenizer.encode("a1b2c3d4e5")
    logits = running.llm.logits([prompt])[0].astype(np.float64)
    logprobs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    for most in (0, 1):
        body = {
            "model": "tiny",
            "prompt": [prompt],
            "temperature": 0,
            "max_tokens": most,
            "logprobs": 1,
            "echo": True,
            "seed": 1234,
        }
        for _ in range(2):  # the second finds the prompt in the cache
            (choice,) = running.post("/v1/completions", body).json()["choices"]
            found = choice["logprobs"]
            assert {len(values) for values in found.values()} == {len(prompt) + most}
            assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
            own = [logprobs[i, token] for i, token in enumerate(prompt[1:])]
            np.testing.assert_allclose(found["token_logprobs"][1 : len(prompt)], own, atol=1e-4)
            best = [max(entry.values()) for entry in found["top_logprobs"][1 : len(prompt)]]
            np.testing.assert_allclose(best, logprobs[:-1].max(-1), atol=1e-4)
            assert choice["text"].startswith(running.llm.tokenizer.decode(prompt))


def test_echo_puts_the_prompt_in_front_in_streams_too(running):
    body = {**GREEDY, "prompt": ["a1b2", "c3"], "echo": True, "logprobs": 2}
    whole = running.post("/v1/completions", body).json()["choices"]
    assert [choice["text"][:4] for choice in whole] == ["a1b2", "c3" + whole[1]["text"][2:4]]
    found = {0: ["", [], []], 1: ["", [], []]}
    for piece in events(stream_lines(running, "/v1/completions", body)):
        (choice,) = piece["choices"]
        found[choice["index"]][0] += choice["text"]
        if choice["logprobs"]:
            found[choice["index"]][1] += choice["logprobs"]["tokens"]
            found[choice["index"]][2] += choice["logprobs"]["text_offset"]
    expected = [[c["text"], c["logprobs"]["tokens"], c["logprobs"]["text_offset"]] for c in whole]
    assert [found[0], found[1]] == expected


def test_log_probabilities_of_a_chat_have_bytes_and_alternatives(running):
    found = running.client.chat.completions.create(messages=SAID, logprobs=True, top_logprobs=3, **GREEDY)
    assert found.choices[0].logprobs is not None
    content = found.choices[0].logprobs.content
    assert content is not None
    assert len(content) == 12
    assert b"".join(bytes(entry.bytes or []) for entry in content).decode() == found.choices[0].message.content
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == entry.logprob, "greedy"
    plain = running.client.chat.completions.create(messages=SAID, logprobs=True, **GREEDY)
    assert plain.choices[0].logprobs is not None
    assert all(entry.top_logprobs == [] for entry in plain.choices[0].logprobs.content or [])


def test_null_is_absent_for_every_key_and_unknown_keys_are_let_through(running):
    keys = (
        "stop top_p n seed logit_bias logprobs stream stream_options user tools tool_choice response_format presence_penalty "
        "stop_token_ids min_tokens ignore_eos top_k store metadata reasoning_effort prompt_logprobs echo timeout"
    )
    nulls = dict.fromkeys(keys.split())
    for path, body in (("completions", {"prompt": "a1"}), ("chat/completions", {"messages": SAID})):
        plain = running.post(f"/v1/{path}", {**GREEDY, **body})
        given = running.post(f"/v1/{path}", {**GREEDY, **body, **nulls, "of_another_server": {"deep": [1]}, "store": True})
        assert given.status_code == 200, given.text
        hidden = {"id": 0, "created": 0, "usage": 0}
        assert {**given.json(), **hidden} == {**plain.json(), **hidden}


def test_further_keys_of_vllm_are_served(running):
    expected = greedy(running, "a1", ignore_eos=True)
    body = {**GREEDY, "prompt": "a1", "ignore_eos": True, "min_tokens": 12, "return_token_ids": True, "top_k": -1}
    (choice,) = running.post("/v1/completions", body).json()["choices"]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == (expected.token_ids, expected.prompt_token_ids)
    assert running.post("/v1/completions", {**body, "min_tokens": 13}).status_code == 400
    third = expected.token_ids[2]
    (choice,) = running.post("/v1/completions", {**body, "min_tokens": 0, "stop_token_ids": [third]}).json()["choices"]
    at = expected.token_ids.index(third) + 1
    assert (choice["finish_reason"], choice["stop_reason"], len(choice["token_ids"])) == ("stop", third, at)
    (choice,) = running.post("/v1/completions", {**body, "prompt_logprobs": 2}).json()["choices"]
    assert choice["prompt_logprobs"][0] is None
    assert all(len(entry) >= 2 for entry in choice["prompt_logprobs"][1:])


def test_a_stop_text_ends_an_answer(running):
    text = greedy(running, "a1", max_tokens=30, ignore_eos=True).text
    stop = text[6:8]
    found = running.client.completions.create(
        model="tiny", prompt="a1", temperature=0, max_tokens=30, stop=[stop], extra_body={"ignore_eos": True}
    )
    assert found.choices[0].text == text[: text.index(stop)]
    body = {"prompt": "a1", "temperature": 0, "max_tokens": 30, "stop": [stop], "ignore_eos": True}
    (kept,) = running.post("/v1/completions", {**body, "include_stop_str_in_output": True}).json()["choices"]
    assert (kept["text"], kept["finish_reason"]) == (text[: text.index(stop) + len(stop)], "stop")
    (later,) = running.post("/v1/completions", {**body, "min_tokens": 29}).json()["choices"]
    assert later["text"].startswith(text[: text.index(stop) + len(stop)])
    assert found.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/v1/completions", {"prompt": "a", "temperature": -1}, "temperature", "expected a number"),
        ("/v1/completions", {"prompt": "a", "temperature": float("nan")}, "temperature", ""),
        ("/v1/completions", {"prompt": "a", "n": 0}, "n", "whole number"),
        ("/v1/completions", {"prompt": "a", "n": 1000}, "n", "whole number"),
        ("/v1/completions", {"prompt": ["a"] * 100, "n": 100}, "prompt", "10,000 answers"),
        ("/v1/completions", {"prompt": []}, "prompt", "empty"),
        ("/v1/completions", {"prompt": [1, 2, 10**9]}, None, "not in the vocabulary"),
        ("/v1/completions", {"prompt": "a", "stop": ["x"] * 1000}, "stop", "at most 64"),
        ("/v1/completions", {"prompt": "a", "logprobs": 99}, "logprobs", "0 to 20"),
        ("/v1/completions", {"prompt": {"a": 1}}, "prompt", "prompt"),
        ("/v1/completions", {}, "prompt", "required"),
        ("/v1/chat/completions", {"messages": []}, "messages", "at least 1"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, None, "message 0"),
        ("/v1/chat/completions", {"messages": SAID, "top_logprobs": 2}, "top_logprobs", "logprobs"),
        ("/v1/chat/completions", {"messages": SAID, "max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "differ"),
        ("/tokenize", {}, "prompt", "either"),
        ("/detokenize", {"tokens": [-1]}, None, "whole number"),
    ],
)
def test_a_bad_request_gets_one_clear_error(running, path, body, param, words):
    response = httpx.post(running.url + path, content=json.dumps(body), headers=JSON, timeout=120)
    error = error_of(response, 400)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert words in error["message"]


NO_BODIES = [b"", b"{", b"[1]", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"prompt": "\\ud800"}', b'{"prompt": 1e999}']


@pytest.mark.parametrize("data", NO_BODIES, ids=range(len(NO_BODIES)))
def test_a_body_that_is_none_is_refused(running, data):
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        error_of(httpx.post(running.url + path, content=data, headers=JSON, timeout=120), 400)


def test_a_prompt_that_is_too_long_names_the_context_as_agents_look_for_it(running):
    for body in ({"prompt": "a1" * 600}, {"prompt": "a1", "max_tokens": 100_000}):
        error = error_of(running.post("/v1/completions", body), 400)
        assert error["code"] == "context_length_exceeded"
        assert "maximum context length is 512 tokens" in error["message"]


def test_a_body_that_is_too_large_is_refused_told_or_not(running):
    for content in (b"x" * 300_000, iter([b"x" * 100_000] * 3)):
        error = error_of(httpx.post(f"{running.url}/v1/completions", content=content, timeout=120), 413)
        assert "262,144 bytes" in error["message"]


def test_a_body_that_does_not_come_is_not_waited_for(running, monkeypatch):
    monkeypatch.setattr("mla_jax.serve.gate.BODY_SECONDS", 0.05)
    host, port = running.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
        )
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 408")


def test_an_unexpected_error_is_told_without_its_text_and_is_not_repeated(running, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("/secret/path")

    monkeypatch.setattr("mla_jax.serve.asked.read_completion", fail)
    response = running.post("/v1/completions", {"prompt": "a1"})
    assert "secret" not in error_of(response, 500)["message"]
    assert response.headers["x-should-retry"] == "false"


def test_unknown_routes_models_and_methods_have_openais_form(running):
    error_of(running.post("/v1/embeddings", {}), 404)
    error_of(running.get("/v1/completions"), 405)
    error = error_of(running.post("/v1/completions", {"prompt": "a", "model": "gpt-4"}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError, match="gpt-4"):
        running.client.models.retrieve("gpt-4")


def test_models_are_listed_with_their_context_under_each_name(running):
    found = running.client.models.list().data
    assert [model.id for model in found] == ["tiny", "alias"]
    assert running.get("/v1/models").json()["data"][0]["max_model_len"] == running.llm.context
    assert running.client.models.retrieve("alias").id == "alias"
    assert running.client.completions.create(model="alias", prompt="a1", max_tokens=1).model == "alias"


def test_texts_become_tokens_and_texts_again(running):
    found = running.post("/tokenize", {"prompt": "a1b2", "return_token_strs": True}).json()
    expected = running.llm.tokenizer.encode("a1b2")
    assert (found["tokens"], found["count"], found["max_model_len"]) == (expected, len(expected), 512)
    assert len(found["token_strs"]) == len(expected)
    assert running.post("/tokenize", {"prompt": "a1b2", "add_special_tokens": False}).json()["tokens"] == expected[1:]
    assert running.post("/tokenize", {"prompt": "<eos>a1", "add_special_tokens": False}).json()["tokens"] == [1, expected[1]]
    assert running.post("/tokenize", {"messages": SAID}).json()["tokens"] == running.llm.encode_chat(SAID)
    assert running.post("/detokenize", {"tokens": expected}).json() == {"prompt": "a1b2"}
    about = running.get("/tokenizer_info").json()
    assert about["bos_token"] == "<bos>"
    assert "messages" in about["chat_template"]


def test_health_is_empty_and_metrics_count_what_was_answered(running):
    assert (running.get("/health").status_code, running.get("/health").content) == (200, b"")
    before = figures(running)
    running.client.completions.create(prompt="a1", **GREEDY)
    after = figures(running)
    counted = 'vllm:generation_tokens_total{model_name="tiny"}'
    assert after[counted] == before[counted] + 12
    ended = 'vllm:request_success_total{finished_reason="length",model_name="tiny"}'
    assert after[ended] == before.get(ended, 0) + 1
    first = 'vllm:time_to_first_token_seconds_count{model_name="tiny"}'
    assert after[first] == before[first] + 1
    assert after['vllm:kv_cache_usage_perc{model_name="tiny"}'] == 0


def figures(running) -> dict[str, float]:
    lines = [line for line in running.get("/metrics").text.splitlines() if not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


@pytest.mark.deep
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_row(running, stream, monkeypatch):
    engine = running.llm.engine
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: (time.sleep(0.05), step()))
    finished, began = running.llm.stats().finished, running.llm.stats().generated
    body = {"prompt": "a1", "max_tokens": 400, "ignore_eos": True, "stream": stream}
    if stream:
        with httpx.stream("POST", f"{running.url}/v1/completions", json=body, timeout=120) as response:
            next(response.iter_lines())
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{running.url}/v1/completions", json={**body, "n": 8}, timeout=0.2)
    until(lambda: running.llm.stats().running == running.llm.stats().waiting == 0)
    assert running.llm.stats().finished > finished
    assert running.llm.stats().generated - began < 400 * (1 if stream else 8)
    assert not running.server.served.metrics._last


def test_many_clients_at_once_get_the_answers_they_get_alone(running):
    prompts = [f"{'abcdefgh'[i % 8]}{i % 10}" * (1 + i % 5) for i in range(24)]
    expected = [greedy(running, prompt).text for prompt in prompts]
    found: dict[int, str] = {}

    def ask(number: int) -> None:
        if number % 2:
            stream = running.client.completions.create(prompt=prompts[number], stream=True, **GREEDY)
            found[number] = "".join(chunk.choices[0].text for chunk in stream)
        else:
            found[number] = running.client.completions.create(prompt=prompts[number], **GREEDY).choices[0].text

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(24)] == expected


@pytest.mark.deep
def test_keys_limits_and_web_pages(chat_folder, tmp_path):
    (tmp_path / "keys").write_text("# of two users\nsecret-1\n\nsecret-2\n")
    settings = {"api_key_file": tmp_path / "keys", "cors_origins": "https://chat.example", "max_rows": 1, "max_waiting": 1}
    for running in started(chat_folder, **settings):
        assert running.get("/health").status_code == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            assert error_of(running.get("/v1/models", headers=headers), 401)["code"] == "invalid_api_key"
        right = {"Authorization": "Bearer secret-2"}
        assert running.get("/v1/models", headers=right).json()["data"][0]["id"] == chat_folder.name
        asks = {"Origin": "https://chat.example", "Access-Control-Request-Method": "POST"}
        allowed = httpx.options(f"{running.url}/v1/completions", headers=asks)
        assert allowed.headers["access-control-allow-origin"] == "https://chat.example"
        response = running.post("/v1/completions", {"prompt": ["a1"] * 9, "max_tokens": 300}, headers=right)
        error_of(response, 429)
        assert int(response.headers["retry-after"]) >= 1


@pytest.mark.deep
def test_a_time_limit_ends_answers_with_what_they_have(chat_folder):
    for running in started(chat_folder, request_timeout=0.05):
        body = {"prompt": "a1", "max_tokens": 450, "ignore_eos": True, "timeout": 60}
        answer = running.post("/v1/completions", body).json()
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] < 450


def test_a_silent_stream_gets_comments(running, monkeypatch):
    monkeypatch.setattr("mla_jax.serve.connections.SILENT_SECONDS", 0.001)
    lines = stream_lines(running, "/v1/completions", {**GREEDY, "prompt": "a1"})
    assert ": ping" in lines
    assert len(events(lines)) >= 2


def test_the_log_has_a_line_for_each_request_and_no_prompt(running, caplog):
    with caplog.at_level("INFO", logger="mla_jax.serve"):
        answer = running.post("/v1/completions", {**GREEDY, "prompt": "a1b2c3"}).json()
        until(lambda: any(answer["id"] in line for line in caplog.messages))
    (line,) = [line for line in caplog.messages if answer["id"] in line]
    assert re.match(r"POST /v1/completions 200 \d+\.\d{3} s  cmpl-\w+ 1 x 4 tokens$", line)
    assert "a1b2c3" not in caplog.text


def test_nobody_is_answered_before_the_model_is_ready(running):
    served = running.server.served
    served.is_ready = False
    try:
        assert running.get("/health").status_code == 503
        response = running.post("/v1/completions", {**GREEDY, "prompt": "a1"})
        error_of(response, 503)
        assert int(response.headers["retry-after"]) > 0
    finally:
        served.is_ready = True
