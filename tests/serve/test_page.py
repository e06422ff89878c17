"""The page at `/`: its file and its headers, and where a browser is installed, what a person sees."""

import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from scripted import DEEPSEEK, write_scripted
from servers import Running, started, until

from mla_jax import SamplingParams
from mla_jax.serve.errors import ApiError
from mla_jax.serve.page import FILE

pytestmark = [pytest.mark.once, pytest.mark.xdist_group("serve")]

PAGE = FILE.read_text("utf-8")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chromium-headless-shell")
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
ENDLESS = {"ignore_eos": True, "max_tokens": 450}


def exported(running: Running) -> set[str]:
    """Names of figures as /metrics has them."""
    lines = running.get("/metrics").text.splitlines()
    return {re.split(r"[{ ]", line)[0] for line in lines if not line.startswith("#")}


def test_the_page_may_run_its_own_script_and_ask_its_own_server_alone(running):
    response = running.get("/")
    assert (response.status_code, response.text) == (200, PAGE)
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["cache-control"] == "no-store"
    policy = dict(rule.split(" ", 1) for rule in response.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert "unsafe" not in str(policy)
    assert all(policy[kind].startswith("'sha256-") for kind in ("script-src", "style-src"))


@pytest.fixture(scope="module")
def locked(chat_folder, tmp_path_factory) -> Iterator[Running]:
    """A server that wants a key."""
    keys = tmp_path_factory.mktemp("locked") / "keys"
    keys.write_text("secret\n")
    yield from started(chat_folder, api_key_file=keys, model_name="locked")


@pytest.mark.deep
def test_the_page_needs_no_key_and_whatever_it_asks_for_does(locked):
    assert locked.get("/").text == PAGE
    for path in ("/metrics", "/v1/models", "/tokenizer_info", "/page.html", "/docs"):
        assert locked.get(path).status_code == 401


def test_the_page_is_one_file_that_names_no_other_place():
    assert re.findall(r"\b(?:src|href)=\S+", PAGE) == ['href="data:,">']
    assert not re.search(r"https?:|[\"'(`]//|url\(|@import|\bimport\b", PAGE)
    addresses = re.findall(r'ask\("([^"]+)"', PAGE) + re.findall(r'"(v1/[^"]+)"', PAGE)
    assert {"metrics", "tokenizer_info", "v1/models", "v1/completions", "v1/chat/completions"} == {*addresses}


def test_texts_of_models_cannot_become_markup():
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval|new Function|setAttribute|style=", PAGE)


def test_every_element_that_the_script_names_is_there_once():
    ids = re.findall(r'\bid="(\w+)"', PAGE)
    settings = re.findall(r'"(\w+)"', " ".join(re.findall(r"const (?:NUMBERS|SETTINGS) = .*", PAGE)))
    named = re.findall(r'\$\("(\w+)"\)', PAGE) + settings
    assert len({*ids}) == len(ids)
    assert {*named} == {*ids} - {"engine"}


def test_figures_that_the_page_shows_are_exported(running):
    shown = set(re.findall(r'"((?:vllm|mla_jax):\w+)"', PAGE))
    assert len(shown) == 7
    assert shown <= exported(running)


# In a browser


class Visit:
    """A tab with the page, as a person uses it. `complaints` are those of the browser."""

    def __init__(self, tab, url: str):
        from playwright.sync_api import expect

        self.tab, self._expect = tab, expect
        self.asked: list[dict] = []  # bodies of requests
        self.complaints: list[str] = []
        tab.on("pageerror", lambda error: self.complaints.append(str(error)))
        tab.on("console", self._note_complaint)
        tab.on("request", lambda request: self.asked.append(request.post_data_json) if request.post_data else None)
        tab.goto(url)

    def _note_complaint(self, message) -> None:
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            self.complaints.append(message.text)

    def expect(self, selector: str):
        return self._expect(self.tab.locator(selector))

    def set(self, name: str, value: str) -> None:
        self.tab.click("#show")
        self.tab.fill(f"#{name}", value)
        self.tab.click("#show")

    def say(self, text: str, **further) -> None:
        """Types a message and sends it; `further` are keys of the request."""
        self.set("further", json.dumps({"temperature": 0, **further}))
        self.tab.fill("#input", text)
        self.tab.press("#input", "Enter")

    def say_and_wait(self, text: str, **further) -> None:
        self.say(text, **further)
        self.expect("#send").to_have_text("Send")

    def texts(self, selector: str) -> list[str]:
        return self.tab.locator(selector).all_text_contents()


@pytest.fixture(scope="module")
def browser() -> Iterator:
    playwright = pytest.importorskip("playwright.sync_api", reason="the Python package playwright is not installed")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"no browser is installed: none of {', '.join(BROWSERS)}")
    playwright.expect.set_options(timeout=60_000)
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def visit(browser) -> Iterator[Callable[..., Visit]]:
    """Opens the page of a server. In the end nothing may have been complained of."""
    visits: list[Visit] = []

    def opened(running: Running, **settings) -> Visit:
        visits.append(Visit(browser.new_page(**settings), running.url))
        visits[-1].expect("#running").to_contain_text("of")
        return visits[-1]

    yield opened
    for one in visits:
        one.tab.close()
        assert one.complaints == []


@pytest.fixture(scope="module")
def scripted(tmp_path_factory) -> Iterator[Running]:
    yield from started(write_scripted(tmp_path_factory.mktemp("scripted"), DEEPSEEK), model_name="scripted")


@pytest.mark.deep
def test_a_conversation_goes_on_with_all_that_was_said(scripted, visit):
    page = visit(scripted)
    page.expect("#model").to_have_text("scripted")
    page.set("system", "Be brief.")
    page.say_and_wait("<b>one</b> & <script>two</script>")
    page.say_and_wait("three")
    said = "plain words < </that\n\nis all"
    assert page.texts(".user") == ["<b>one</b> & <script>two</script>", "three"]
    assert page.texts(".answer > .text") == [said, said]
    assert page.tab.locator("#talk b, #talk script").count() == 0
    assert all(re.match(r"tokens: 9.*, the first after \d", note) for note in page.texts(".note"))
    asked = [(message["role"], message["content"]) for message in page.asked[1]["messages"]]
    first = [("system", "Be brief."), ("user", "<b>one</b> & <script>two</script>")]
    assert asked == [*first, ("assistant", said), ("user", "three")]
    page.tab.click("#new")
    assert page.texts("#talk > *") == []
    page.say_and_wait("four")
    assert [message["content"] for message in page.asked[2]["messages"]] == ["Be brief.", "four"]


def test_reasoning_is_folded_and_calls_are_told_as_text(scripted, visit):
    page = visit(scripted)
    page.say_and_wait("hot?", tools=[WEATHER], chat_template_kwargs={"thinking": True})
    page.expect("details .text").to_be_hidden()
    page.tab.click("summary")
    page.expect("details .text").to_be_visible()
    assert page.texts("details .text") == ["Let me see."]
    assert page.texts(".answer > .text") == ["I look it up \N{GRINNING FACE}", 'weather {"city": "Tromsø"}']
    page.say_and_wait("and now?", tools=[WEATHER])
    (call,) = page.asked[1]["messages"][1]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Tromsø"}'}
    assert call["id"]
    assert page.texts(".error") == []


@pytest.fixture
def held(running, monkeypatch) -> Iterator[threading.Event]:
    """An engine that goes on slowly, and only while this is set."""
    goes_on, step = threading.Event(), running.llm.engine.step
    monkeypatch.setattr(running.llm.engine, "step", lambda: (goes_on.wait(60), time.sleep(0.2), step()))
    yield goes_on
    goes_on.set()


@pytest.mark.deep
@pytest.mark.parametrize("way", ["Escape", "button"])
def test_a_stopped_answer_stays_and_frees_its_row(running, visit, held, way):
    held.set()
    page = visit(running)
    page.say("a1", **ENDLESS)
    page.expect("#running").to_have_text(re.compile("1 of"))
    page.expect(".answer .note").to_contain_text("tokens/s")
    page.tab.keyboard.press("Escape") if way == "Escape" else page.tab.click("#send")
    page.expect(".answer .note").to_contain_text("stopped")
    until(lambda: running.llm.stats().running == 0)
    assert page.texts(".error") == []
    (text,) = page.texts(".answer > .text")
    page.say_and_wait("b2", max_tokens=2)
    assert [message["content"] for message in page.asked[1]["messages"]] == ["a1", text, "b2"]
    page.expect(".answer >> nth=1").to_contain_text("cut by a limit")


def test_an_answer_that_is_stopped_before_it_begins_leaves_the_message_to_be_sent_again(running, visit, held):
    page = visit(running)
    page.say("a1", **ENDLESS)
    page.expect("#send").to_have_text("Stop")
    until(lambda: running.llm.stats().running + running.llm.stats().waiting > 0)
    page.tab.keyboard.press("Escape")
    page.expect("#input").to_have_value("a1")
    assert page.texts("#talk > *") == []


def test_errors_are_told_in_plain_words(running, visit):
    page = visit(running)
    page.say_and_wait("a1", max_tokens=100_000)
    page.expect("[role=alert]").to_contain_text("maximum context length is 512 tokens")
    page.expect("#input").to_have_value("a1")
    page.set("top_p", "much")
    page.tab.press("#input", "Enter")
    page.expect(".error >> nth=1").to_have_text('top_p in the settings is "much", which is no number.')
    page.set("top_p", "")
    page.set("further", "{no")
    page.tab.press("#input", "Enter")
    page.expect(".error >> nth=2").to_contain_text("The further keys in the settings are no JSON")
    page.tab.context.set_offline(True)
    page.say("a1")
    page.expect(".error >> nth=3").to_have_text("The server cannot be reached. Is it still running?")
    page.tab.context.set_offline(False)
    page.say_and_wait("a1", max_tokens=2)
    assert len(page.texts(".answer")) == 1


def test_an_error_amid_an_answer_leaves_what_was_said(running, visit, held, monkeypatch):
    held.set()
    page = visit(running)
    page.say("a1", **ENDLESS)
    page.expect(".answer .note").to_contain_text("tokens/s")

    def fail(*_):
        raise ApiError(500, "the model's logits are not finite")

    monkeypatch.setattr("mla_jax.serve.answering._refuse_unfinished", fail)
    page.expect(".error").to_have_text("the model's logits are not finite")
    page.expect(".answer .note").to_contain_text("stopped")
    assert page.texts(".answer > .text") != [""]


@pytest.mark.deep
def test_a_key_goes_with_the_requests_and_is_kept_for_this_tab_alone(locked, browser):
    page = Visit(browser.new_page(), locked.url)
    page.expect("#model").to_have_text("mla-jax: an API key is needed")
    page.say("a1", max_tokens=3)
    page.expect(".error").to_have_text("the API key is missing or wrong. Give it in the settings.")
    page.set("key", "secret")
    page.tab.press("#input", "Enter")
    page.expect(".answer .note").to_contain_text("tokens: 3")
    page.expect("#model").to_have_text("locked")
    assert page.tab.evaluate("() => [sessionStorage.getItem('key'), localStorage.length]") == ["secret", 0]
    page.tab.reload()
    page.expect("#running").to_contain_text("of")
    page.tab.close()
    assert page.complaints == []


def test_a_model_without_a_template_continues_texts(chat_folder, tmp_path, visit):
    folder = shutil.copytree(chat_folder, tmp_path / "plain")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    for running in started(folder):
        page = visit(running)
        page.expect("#input").to_have_attribute("placeholder", re.compile("continues"))
        page.expect("#max_tokens").to_have_attribute("placeholder", "256")
        page.say_and_wait("a1b2", max_tokens=5)
        expected = running.llm.generate(["a1b2"], SamplingParams(temperature=0, max_tokens=5))[0].text
        assert page.texts(".answer > .text") == [expected]
        assert page.asked[0]["prompt"] == "a1b2"


@pytest.mark.deep
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_narrow_window_has_all_of_the_page(scripted, visit, scheme):
    page = visit(scripted, viewport={"width": 320, "height": 568}, color_scheme=scheme)
    page.say_and_wait("long" * 40)
    page.tab.click("#show")
    assert page.tab.evaluate("() => document.documentElement.scrollWidth") == 320
    assert page.tab.evaluate("() => document.getElementById('talk').scrollWidth") == 320
    for name in ("#new", "#show", "#input", "#send"):
        box = page.tab.locator(name).bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 320
        assert box["y"] + box["height"] <= 568
    shade = page.tab.evaluate("() => getComputedStyle(document.body).backgroundColor")
    assert (shade == "rgb(255, 255, 255)") == (scheme == "light")


def test_shift_and_enter_begin_a_line_and_nothing_empty_is_sent(scripted, visit):
    page = visit(scripted)
    page.tab.press("#input", "Enter")
    page.tab.fill("#input", "one")
    page.tab.press("#input", "Shift+Enter")
    page.tab.keyboard.type("two")
    page.expect("#input").to_have_value("one\ntwo")
    assert page.asked == []
    page.tab.press("#input", "Enter")
    page.expect(".user").to_have_text("one\ntwo")
