"""What both surfaces share: names of models, salts of tenants, the server's own deadline."""

import asyncio
from typing import Any

import pytest

from jaxserve import RequestError, SamplingParams
from jaxserve.api.request import Request
from jaxserve.server.auth import Caller
from jaxserve.server.errors import UnknownModelError
from jaxserve.server.frontend import Frontend, new_request_id
from tests.observed_engine import ANYBODY, ObservedEngine, make_frontend


def made(**settings: Any) -> tuple[Frontend, ObservedEngine]:
    """A front end and its engine."""
    engine = ObservedEngine()
    return make_frontend(engine, **settings), engine


def sent(frontend: Frontend, engine: ObservedEngine, caller: Caller, **fields: Any) -> Request:
    """The request as it reaches the engine."""

    async def run() -> None:
        request = Request(request_id=new_request_id("cmpl"), text="a", params=SamplingParams(), **fields)
        async for _ in frontend.generate(frontend.entry(caller, request)):
            pass

    asyncio.run(run())
    return engine.requests[-1]


def test_models_are_known_by_the_names_given() -> None:
    frontend, _ = made(served_model_name=["first", "second"])
    assert [frontend.check_model(name) for name in (None, "", "second")] == ["first", "first", "second"]
    with pytest.raises(UnknownModelError, match="The model `tiny` does not exist"):
        frontend.check_model("tiny")
    assert made()[0].check_model("tiny") == "tiny"


def test_no_salt_without_keys() -> None:
    assert sent(*made(), ANYBODY, cache_salt="mine").cache_salt == "mine"
    assert sent(*made(), ANYBODY).cache_salt is None


@pytest.mark.parametrize("tenant", [None, "one"])
def test_an_empty_salt_is_refused_with_and_without_keys(tenant: str | None) -> None:
    with pytest.raises(RequestError, match="cache_salt must not be empty"):
        sent(*made(), Caller("one", frozenset(), tenant=tenant), cache_salt="")


def test_tenants_never_have_the_same_salt() -> None:
    frontend, engine = made(api_key=["a"])
    one, other = (Caller(name, frozenset(), tenant=name) for name in ("one", "other"))
    salts = {
        sent(frontend, engine, caller, cache_salt=salt).cache_salt
        for caller in (one, other)
        for salt in (None, "x", "one", "\0", "other\0x")
    }
    assert len(salts) == 10
    assert sent(frontend, engine, one, cache_salt="x").cache_salt in salts
    # What another tenant's salt looks like is of no use to a caller who sends it.
    stolen = sent(frontend, engine, one).cache_salt
    assert sent(frontend, engine, other, cache_salt=stolen).cache_salt != stolen


def test_the_servers_deadline_is_for_requests_without_one() -> None:
    frontend, engine = made(request_timeout=7.0)
    assert sent(frontend, engine, ANYBODY).timeout_s == 7
    assert sent(frontend, engine, ANYBODY, timeout_s=2.0).timeout_s == 2
    assert sent(*made(), ANYBODY).timeout_s is None


def test_names_of_requests_cannot_be_guessed() -> None:
    names = {new_request_id("cmpl") for _ in range(100)}
    assert len(names) == 100
    assert all(len(name) == len("cmpl-") + 32 for name in names)
