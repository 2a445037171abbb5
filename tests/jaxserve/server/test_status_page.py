"""The status page: its numbers, who may see them, and the page itself in a headless Chromium."""

import asyncio
import contextlib
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib import resources
from typing import Any

import pytest
from starlette.testclient import TestClient

from jaxserve.api.errors import EngineDeadError, RequestFailedError
from jaxserve.api.metric_types import Counter, Gauge, Metric
from jaxserve.server.frontend import Frontend
from jaxserve.server.http_api.app import make_app
from jaxserve.server.http_api.status import content_security_policy
from tests.jaxserve.server.threaded_server import threaded_server
from tests.observed_engine import ObservedEngine, engine_numbers, make_frontend, output, read_all

PAGE = resources.files("jaxserve.server.http_api").joinpath("status_page.html").read_text("utf-8")
# Chromium is to talk to nobody but the server under test.
CHROMIUM_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


def client_of(frontend: Frontend) -> TestClient:
    """An HTTP client of the whole application."""
    return TestClient(make_app(frontend), base_url="http://localhost")


# ---------------------------------------------------------------- the numbers


def test_numbers_after_a_known_load() -> None:
    frontend = make_frontend(served_model_name=["tiny", "other"])
    asyncio.run(read_all(frontend))
    found = client_of(frontend).get("/status.json")
    assert found.headers["cache-control"] == "no-store"
    report = found.json()
    assert (report["state"], report["model_names"], report["has_chat"]) == ("ready", ["tiny", "other"], True)
    assert report["requests"]["started"] == report["requests"]["outcomes"]["ok"] == 1
    assert (report["requests"]["in_flight"], report["requests"]["refused"]) == (0, 0)
    assert report["engine"]["num_requests_running"] == 2
    assert report["engine"]["kv_cache_usage_perc"] == 0.25
    assert report["engine"]["prefix_cache_states"] == 5
    assert {reason: count for reason, count in report["prefix_cache_misses"].items() if count} == {"evicted": 3}
    assert report["model"]["mesh"] == [{"name": "data", "size": 2}, {"name": "tensor", "size": 4}]
    assert report["model"]["memory"][0] == {"name": "weights", "size_bytes": 600 << 20}
    assert report["model"]["kv_cache"] == {"num_pages": 50, "page_size": 16, "num_tokens": 800, "size_bytes": 3 << 20}
    assert report["uptime_s"] >= 0
    assert "jaxserve" in report["versions"]


@pytest.mark.parametrize("has_chat", [True, False])
def test_a_page_knows_whether_there_is_a_chat_template(has_chat: bool) -> None:
    engine = ObservedEngine()
    engine.has_chat = has_chat
    client = client_of(make_frontend(engine))
    assert client.get("/status.json").json()["has_chat"] is has_chat
    engine.is_ready = False
    assert client.get("/status.json").json()["has_chat"] is False


def test_states() -> None:
    engine = ObservedEngine()
    frontend = make_frontend(engine)
    client = client_of(frontend)
    frontend.ledger.close("the server is shutting down")
    assert client.get("/status.json").json()["state"] == "busy"
    engine.numbers = EngineDeadError("gone")
    report = client.get("/status.json").json()
    assert (report["state"], report["engine"]) == ("down", None)
    assert report["requests"]["started"] == 0


def test_numbers_need_a_key_and_the_page_does_not(tmp_path: Any) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("[{key: sees, name: a}, {key: blind, name: b, scopes: [generate]}]")
    client = client_of(make_frontend(auth_file=str(keys)))
    assert client.get("/").status_code == 200
    expected = {None: 401, "Bearer wrong": 401, "Bearer blind": 403, "Bearer sees": 200}
    for key, code in expected.items():
        found = client.get("/status.json", headers={} if key is None else {"Authorization": key})
        assert found.status_code == code
        assert code == 200 or "message" in found.json()["error"]
        assert code == 200 or "tiny" not in found.text


def test_the_page_can_be_left_out() -> None:
    client = client_of(make_frontend(disable_status_page=True))
    assert [client.get(path).status_code for path in ("/", "/status.json")] == [404, 404]


# ---------------------------------------------------------------- the page as text


def test_the_page_comes_with_a_policy() -> None:
    found = client_of(make_frontend()).get("/")
    assert found.headers["content-type"] == "text/html; charset=utf-8"
    policy = found.headers["content-security-policy"]
    assert policy == content_security_policy(PAGE)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert found.headers["x-frame-options"] == "DENY"
    assert found.headers["x-content-type-options"] == "nosniff"
    changed = content_security_policy(PAGE.replace("const SECONDS", "let SECONDS"))
    assert changed != policy


def test_the_page_is_whole_and_makes_no_markup_of_text() -> None:
    class Reader(HTMLParser):
        ids: list[str] = []
        labelled: list[str] = []
        foreign: list[str] = []

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            named = dict(attrs)
            self.ids += [named["id"] or ""] if "id" in named else []
            self.labelled += [named["for"] or ""] if "for" in named else []
            self.foreign += [f"{k}={v}" for k, v in attrs if k in ("src", "href") and not (v or "").startswith("data:")]
            self.foreign += [k for k in named if k == "style" or k.startswith("on")]

    reader = Reader()
    reader.feed(PAGE)
    assert reader.foreign == []
    assert len(set(reader.ids)) == len(reader.ids)
    assert set(reader.labelled) <= set(reader.ids)
    used = set(re.findall(r'(?:byId|show|makeChart)\("([a-z-]+)"', PAGE))
    assert used <= set(reader.ids)
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "localStorage"):
        assert way not in PAGE


# ---------------------------------------------------------------- the page in a browser


DRAFTS = {"spec_decode_num_drafts": 10, "spec_decode_num_draft_tokens": 32, "spec_decode_num_accepted_tokens": 24}


class LivelyEngine(ObservedEngine):
    """Each look at its numbers finds 50 generated and 20 prompt tokens more."""

    def __init__(self, *script: Any):
        super().__init__(*script)
        self.num_looks = 0
        self.is_dead = False

    async def metrics(self) -> list[Metric]:
        """Numbers that move."""
        if self.is_dead:
            raise EngineDeadError("gone")
        self.num_looks += 1
        moving = {
            "generation_tokens": Counter("jaxserve:generation_tokens", {}, 50 * self.num_looks),
            "prompt_tokens": Counter("jaxserve:prompt_tokens", {}, 20 * self.num_looks),
            "kv_cache_usage_perc": Gauge("jaxserve:kv_cache_usage_perc", {}, min(0.1 * self.num_looks, 0.875)),
        }
        numbers = [moving.get(one.name.removeprefix("jaxserve:"), one) for one in engine_numbers()]
        return [*numbers, *(Counter(f"jaxserve:{name}", {}, each * self.num_looks) for name, each in DRAFTS.items())]


@contextlib.contextmanager
def served(frontend: Frontend) -> Iterator[str]:
    """The base URL of a real server for the application, in a thread."""
    with threaded_server(make_app(frontend), ws="none", log_level="warning") as url:
        yield url


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip(f"needs one of {', '.join(names)} on the PATH")
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=path, args=list(CHROMIUM_FLAGS))
        yield found
        found.close()


class Watched:
    """A page and what happened in it."""

    def __init__(self, page: Any):
        self.page = page
        self.requests: list[str] = []
        self.complaints: list[str] = []
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("console", lambda line: self.complaints.append(line.text) if line.type != "log" else None)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def wait_for_text(self, what: str, pattern: str) -> str:
        """The text of an element, once it fits."""
        element = self.page.locator(what)
        self.page.wait_for_function(
            "([what, pattern]) => new RegExp(pattern).test(document.querySelector(what).textContent)",
            arg=[what, pattern],
        )
        return element.text_content()


@contextlib.contextmanager
def opened(browser: Any, url: str, **options: Any) -> Iterator[Watched]:
    """The page at a URL, in a browser without memory; it must talk to its server alone."""
    context = browser.new_context(viewport={"width": 1180, "height": 1000}, **options)
    context.set_default_timeout(20_000)
    watched = Watched(context.new_page())
    watched.page.goto(f"{url}/")
    try:
        yield watched
    finally:
        context.close()
    assert watched.requests
    assert [one for one in watched.requests if not one.startswith((f"{url}/", "data:"))] == []


def test_numbers_appear_and_move(browser: Any) -> None:
    frontend = make_frontend(LivelyEngine(), served_model_name=["<b>tiny</b>"])
    with served(frontend) as url, opened(browser, url) as watched:
        page = watched.page
        watched.wait_for_text("#state", "^Ready$")
        # What looks like markup stays text.
        assert page.locator("h1").text_content() == "<b>tiny</b>"
        assert page.locator("h1 b").count() == 0
        watched.wait_for_text("#kv-use", "^10.0 %$")
        watched.wait_for_text("#kv-use", "^30.0 %$")
        generation = float(watched.wait_for_text("#generation-rate", r"^\d"))
        prompt = float(watched.wait_for_text("#prompt-rate", r"^\d"))
        assert 0 < prompt < generation <= 60
        assert page.locator("#running").text_content() == "2"
        assert page.locator("#waiting").text_content() == "1"
        assert page.locator("#hit-rate").text_content() == "40.0 %"
        assert page.locator("#draft-length").text_content() == "3.2"
        assert page.locator("#accepted").text_content() == "75.0 %"
        assert page.locator("#throughput-chart .one").get_attribute("points").count(",") >= 2
        facts = page.locator("#facts").text_content()
        for fact in ("LlamaForCausalLM", "data 2 × tensor 4", "800 tokens, 3.0 MiB", "xla", "bfloat16"):
            assert fact in facts
        assert "weights600 MiB" in page.locator("#memory-legend").text_content()
        assert page.locator("#memory-bar i").count() == 4
        assert "jaxserve 0" in page.locator("#versions").text_content()
        assert watched.complaints == []


def test_a_prompt_streams(browser: Any) -> None:
    engine = LivelyEngine(output(("<i>One ", 1)), 0.3, output(("two ", 2)), output(("three", 1), reason="stop"))
    with served(make_frontend(engine)) as url, opened(browser, url) as watched:
        page = watched.page
        watched.wait_for_text("#state", "^Ready$")
        page.fill("#prompt", "Count!")
        page.click("#run")
        watched.wait_for_text("#output", "^<i>One $")
        watched.wait_for_text("#output", "^<i>One two three$")
        note = watched.wait_for_text("#prompt-note", "finish reason")
        assert re.match(r"4 tokens · first token after [\d,]+ ms · \d\.\d s · .* tokens/s · finish reason: stop$", note)
        assert page.locator("#prompt-error").is_hidden()
        assert page.locator("#stop").is_disabled()
        assert any(one.endswith("/v1/chat/completions") for one in watched.requests)
        page.select_option("#mode", "text")
        with page.expect_request("**/v1/completions"):
            page.press("#prompt", "Control+Enter")
        watched.wait_for_text("#output", "^<i>One two three$")
        assert watched.complaints == []


def test_a_model_without_a_chat_template_completes_text(browser: Any) -> None:
    engine = LivelyEngine()
    engine.has_chat = False
    with served(make_frontend(engine)) as url, opened(browser, url) as watched:
        watched.wait_for_text("#state", "^Ready$")
        assert watched.page.locator("#mode-field").is_hidden()
        watched.page.fill("#prompt", "Once")
        watched.page.click("#run")
        watched.wait_for_text("#output", "^ a b$")
        assert any(one.endswith("/v1/completions") for one in watched.requests)
        assert watched.complaints == []


def test_stopping_ends_the_request(browser: Any) -> None:
    frontend = make_frontend(LivelyEngine(output(("Endless", 1)), 600.0))
    with served(frontend) as url, opened(browser, url) as watched:
        watched.wait_for_text("#state", "^Ready$")
        watched.page.fill("#prompt", "Go on")
        watched.page.click("#run")
        watched.wait_for_text("#output", "^Endless$")
        assert watched.page.locator("#run").is_disabled()
        watched.page.click("#stop")
        watched.wait_for_text("#prompt-note", "stopped$")
        assert watched.page.locator("#run").is_enabled()
        # The page shows it once the server has seen it.
        watched.wait_for_text("#counts", "1cancelled")
        assert frontend.log.counts.finished["cancelled"] == 1
        assert watched.complaints == []


def test_errors_are_shown(browser: Any) -> None:
    engine = LivelyEngine(RequestFailedError("the model's <scores> are not numbers"))
    with served(make_frontend(engine)) as url, opened(browser, url) as watched:
        page = watched.page
        watched.wait_for_text("#state", "^Ready$")
        page.fill("#prompt", "Hello")
        page.click("#run")
        watched.wait_for_text("#prompt-error", "the model's <scores> are not numbers")
        engine.script = (output(("Some", 1)), RequestFailedError("it broke midway"))
        page.click("#run")
        watched.wait_for_text("#prompt-error", "it broke midway")
        assert page.locator("#output").text_content() == "Some"
        engine.script = (output(("Fine", 1), reason="stop"),)
        page.click("#run")
        watched.wait_for_text("#output", "^Fine$")
        assert page.locator("#prompt-error").is_hidden()


def test_a_key_is_asked_for(browser: Any) -> None:
    frontend = make_frontend(LivelyEngine(), api_key=["the-key"])
    with served(frontend) as url, opened(browser, url) as watched:
        page = watched.page
        watched.wait_for_text("#state", "^API key required$")
        assert page.locator("#key").get_attribute("type") == "password"
        page.fill("#key", "wrong")
        page.press("#key", "Enter")
        watched.wait_for_text("#key-note", "unknown API key")
        page.fill("#key", "the-key")
        page.press("#key", "Enter")
        watched.wait_for_text("#state", "^Ready$")
        assert page.locator("#key-form").is_hidden()
        page.fill("#prompt", "Hello")
        page.click("#run")
        watched.wait_for_text("#output", "^ a b$")
        assert [one for one in watched.requests if "the-key" in one] == []


def test_an_engine_that_dies_and_a_server_that_goes(browser: Any) -> None:
    engine = LivelyEngine()
    with contextlib.ExitStack() as stack:
        with served(make_frontend(engine)) as url:
            watched = stack.enter_context(opened(browser, url))
            watched.wait_for_text("#state", "^Ready$")
            engine.is_dead = True
            watched.wait_for_text("#state", "^Engine is down$")
            assert "stale" in watched.page.locator("main").get_attribute("class")
            engine.is_dead = False
            watched.wait_for_text("#state", "^Ready$")
        watched.wait_for_text("#state", "^Not reachable$")
