"""Encryption of both listeners, with certificates that openssl makes here."""

import asyncio
import contextlib
import os
import shutil
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from jaxserve.api.errors import ConfigError
from jaxserve.client import AsyncClient
from jaxserve.server.errors import UnavailableError
from jaxserve.server.settings import ServerConfig
from jaxserve.server.tls import make_grpc_credentials, make_ssl_context, watch_files
from tests.certificates import Authority, Pair, openssl
from tests.grpc_servers import run, serving

WHOLE = "0:0 0:1 0:2 0:3 "


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """One that clients and servers know."""
    return Authority(tmp_path_factory.mktemp("tls") / "known")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """One that they don't."""
    return Authority(tmp_path_factory.mktemp("tls") / "other")


def credentials(root: Authority, own: Pair | None = None) -> grpc.ChannelCredentials:
    """A client's."""
    if own is None:
        return grpc.ssl_channel_credentials(root.pair.certificate.read_bytes())
    return grpc.ssl_channel_credentials(
        root.pair.certificate.read_bytes(), own.key.read_bytes(), own.certificate.read_bytes()
    )


async def generated(port: int | None, by: grpc.ChannelCredentials | None) -> str:
    """What a client gets."""
    async with AsyncClient(f"127.0.0.1:{port}", credentials=by, timeout_s=20.0) as client:
        return (await client.generate("Hi")).outputs[0].text


async def assert_refused(port: int | None, by: grpc.ChannelCredentials | None) -> None:
    """Fails unless the connection does."""
    with pytest.raises(UnavailableError):
        await generated(port, by)


def test_both_grpc_listeners_are_encrypted(authority: Authority, other: Authority) -> None:
    async def main() -> None:
        async with serving(**authority.sign("server").settings) as there:
            assert await generated(there.server.port, credentials(authority)) == WHOLE
            await assert_refused(there.server.port, None)
            await assert_refused(there.server.port, credentials(other))
            async with AsyncClient(there.admin_target, credentials=credentials(authority)) as client:
                assert await client.health("")
            await assert_refused(there.server.admin_port, None)

    run(main)


def test_clients_refuse_a_certificate_that_has_expired(authority: Authority) -> None:
    async def main() -> None:
        async with serving(**authority.sign("old", days=-1).settings) as there:
            await assert_refused(there.server.port, credentials(authority))

    run(main)


@pytest.mark.parametrize("refreshes", [False, True])
def test_grpc_clients_with_certificates(authority: Authority, other: Authority, refreshes: bool) -> None:
    settings = {"ssl_ca_certs": str(authority.pair.certificate), "ssl_cert_reqs": 2, "enable_ssl_refresh": refreshes}

    async def main() -> None:
        async with serving(**authority.sign("server").settings, **settings) as there:
            port = there.server.port
            assert await generated(port, credentials(authority, authority.sign("client"))) == WHOLE
            await assert_refused(port, credentials(authority))
            await assert_refused(port, credentials(authority, other.sign("stranger")))
            await assert_refused(port, credentials(authority, authority.sign("late", days=-1)))

    run(main)


def replace(old: Pair, new: Pair) -> None:
    """Puts other files in the place of a pair's."""
    for source, place in ((new.key, old.key), (new.certificate, old.certificate)):
        copy = place.with_suffix(".new")
        shutil.copy(source, copy)
        os.replace(copy, place)


def test_grpc_takes_new_files_without_a_restart(authority: Authority, other: Authority) -> None:
    pair = authority.sign("rotating")

    async def main() -> None:
        async with serving(**pair.settings, enable_ssl_refresh=True) as there:
            port = there.server.port
            assert await generated(port, credentials(authority)) == WHOLE
            async with AsyncClient(there.target, credentials=credentials(authority), timeout_s=20.0) as old_client:
                assert await old_client.health()
                new = other.sign("rotated")
                shutil.copy(new.certificate, pair.certificate)  # half of it: the old files count on
                assert await generated(port, credentials(authority)) == WHOLE
                replace(pair, new)
                assert await generated(port, credentials(other)) == WHOLE
                await assert_refused(port, credentials(authority))
                assert await old_client.health()  # connections that there are stay
                pair.key.unlink()
                assert await generated(port, credentials(other)) == WHOLE

    run(main)


def test_grpc_keeps_its_files_where_it_shall_not_look(authority: Authority, other: Authority) -> None:
    pair = authority.sign("staying")

    async def main() -> None:
        async with serving(**pair.settings) as there:
            replace(pair, other.sign("not-taken"))
            assert await generated(there.server.port, credentials(authority)) == WHOLE

    run(main)


def config_for(pair: Pair, **settings: Any) -> ServerConfig:
    """A server's settings."""
    return ServerConfig(**pair.settings, **settings)


@contextlib.asynccontextmanager
async def echoing(context: ssl.SSLContext) -> AsyncIterator[int]:
    """A server that sends one line back, as HTTP's listener would use the context; gives its port."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            writer.write(await reader.readline())
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def echoed(port: int, root: Authority, own: Pair | None = None) -> bytes:
    """What a client gets that knows one authority; nothing where the server hangs up."""
    context = ssl.create_default_context(cafile=str(root.pair.certificate))
    if own is not None:
        context.load_cert_chain(own.certificate, own.key)
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        writer.write(b"Hi\n")
        return await reader.readline()
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            await writer.wait_closed()


def test_https(authority: Authority, other: Authority) -> None:
    async def main() -> None:
        context = make_ssl_context(config_for(authority.sign("web")))
        assert context.minimum_version >= ssl.TLSVersion.TLSv1_2
        async with echoing(context) as port:
            assert await echoed(port, authority) == b"Hi\n"
            with pytest.raises(ssl.SSLCertVerificationError):
                await echoed(port, other)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                assert b"HTTP" not in await reader.read()
            writer.close()

    run(main)


@pytest.mark.parametrize(("mode", "may_be_without"), [(0, True), (1, True), (2, False)])
def test_https_clients_with_certificates(
    authority: Authority, other: Authority, mode: int, may_be_without: bool
) -> None:
    signers = {"ssl_ca_certs": str(authority.pair.certificate)} if mode else {}
    config = config_for(authority.sign("web"), ssl_cert_reqs=mode, **signers)

    async def answered(port: int, own: Pair | None) -> bool:
        try:
            return await echoed(port, authority, own) == b"Hi\n"
        except (ConnectionError, ssl.SSLError):
            return False

    async def main() -> None:
        async with echoing(make_ssl_context(config)) as port:
            assert await answered(port, authority.sign("client"))
            assert await answered(port, None) == may_be_without
            assert await answered(port, other.sign("stranger")) == (mode == 0)

    run(main)


def test_https_takes_new_files_without_a_restart(authority: Authority, other: Authority) -> None:
    pair = authority.sign("web-rotating")
    config = config_for(pair, enable_ssl_refresh=True)

    async def main() -> None:
        context = make_ssl_context(config)
        watching = asyncio.create_task(watch_files(config, context, 0.01))
        async with echoing(context) as port:
            assert await echoed(port, authority) == b"Hi\n"
            new = other.sign("web-rotated")
            shutil.copy(new.certificate, pair.certificate)
            await asyncio.sleep(0.1)
            assert await echoed(port, authority) == b"Hi\n"
            replace(pair, new)
            while True:
                await asyncio.sleep(0.01)
                with contextlib.suppress(ssl.SSLCertVerificationError):
                    assert await echoed(port, other) == b"Hi\n"
                    break
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await watch_files(config_for(pair), context)  # returns at once: nothing is to be watched

    run(main)


async def answered(port: int, root: Authority, own: Pair) -> bool:
    """Whether a client with a certificate gets in."""
    try:
        return await echoed(port, root, own) == b"Hi\n"
    except (ConnectionError, ssl.SSLError):
        return False


@contextlib.asynccontextmanager
async def refreshed(config: ServerConfig) -> AsyncIterator[int]:
    """A server that follows its files; gives its port."""
    context = make_ssl_context(config)
    watching = asyncio.create_task(watch_files(config, context, 0.01))
    async with echoing(context) as port:
        yield port
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


def test_an_authority_that_is_removed_is_not_trusted_any_more(tmp_path: Path) -> None:
    first, second = Authority(tmp_path / "first"), Authority(tmp_path / "second")
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(first.pair.certificate.read_bytes() + second.pair.certificate.read_bytes())
    config = config_for(first.sign("web"), ssl_ca_certs=str(trusted), ssl_cert_reqs=2, enable_ssl_refresh=True)
    stays, goes = first.sign("stays"), second.sign("goes")

    async def main() -> None:
        async with refreshed(config) as port, serving(**vars(config)) as there:
            assert await answered(port, first, stays) and await answered(port, first, goes)
            assert await generated(there.server.port, credentials(first, goes)) == WHOLE
            trusted.write_bytes(first.pair.certificate.read_bytes())
            while await answered(port, first, goes):
                await asyncio.sleep(0.01)
            assert await answered(port, first, stays)
            assert await generated(there.server.port, credentials(first, stays)) == WHOLE
            await assert_refused(there.server.port, credentials(first, goes))

    run(main)


def test_a_certificate_that_is_revoked_is_refused(tmp_path: Path) -> None:
    known = Authority(tmp_path / "known")
    stays, goes = known.sign("stays"), known.sign("goes")
    signers = {"ssl_ca_certs": str(known.pair.certificate), "ssl_cert_reqs": 2, "ssl_crl_file": str(known.revoke())}
    ports = {"grpc_port": -1, "admin_port": -1}
    config = config_for(known.sign("web"), enable_ssl_refresh=True, **signers, **ports)

    async def main() -> None:
        async with refreshed(config) as port:
            assert await answered(port, known, stays) and await answered(port, known, goes)
            known.revoke(goes)
            while await answered(port, known, goes):
                await asyncio.sleep(0.01)
            assert await answered(port, known, stays)
            Path(signers["ssl_crl_file"]).write_bytes(
                known.pair.certificate.read_bytes()
            )  # no list: the old one counts
            await asyncio.sleep(0.1)
            assert await answered(port, known, stays) and not await answered(port, known, goes)

    run(main)


def test_revocation_lists_need_what_they_are_about(authority: Authority) -> None:
    pair, certificate = authority.sign("web"), str(authority.pair.certificate)
    signers = {"ssl_ca_certs": certificate, "ssl_cert_reqs": 2}
    with pytest.raises(ConfigError, match="ssl_crl_file: gRPC cannot read revocation lists"):
        config_for(pair, ssl_crl_file=certificate, **signers, admin_port=-1)
    ports = {"grpc_port": -1, "admin_port": -1}
    with pytest.raises(ConfigError, match="ssl_crl_file requires ssl_ca_certs"):
        config_for(pair, ssl_crl_file=certificate, **ports)
    with pytest.raises(ConfigError, match="ssl_crl_file: no such file"):
        config_for(pair, ssl_crl_file="/nowhere", **signers, **ports)
    with pytest.raises(ConfigError, match=r"expected certificate revocation lists \(PEM\) and nothing else"):
        make_ssl_context(config_for(pair, ssl_crl_file=certificate, **signers, **ports))


def test_files_that_cannot_be_used(authority: Authority, other: Authority, tmp_path: Path) -> None:
    good, stranger = authority.sign("good"), other.sign("stranger")
    text = tmp_path / "text.pem"
    text.write_text("no certificate")
    locked = tmp_path / "locked.key"
    openssl("ec", "-in", good.key, "-out", locked, "-aes256", "-passout", "pass:x")
    for pair in (Pair(stranger.key, good.certificate), Pair(good.key, text), Pair(text, good.certificate)):
        for make in (make_ssl_context, make_grpc_credentials):
            with pytest.raises(
                ConfigError, match="ssl_certfile, ssl_keyfile, ssl_ca_certs: these files cannot be used"
            ):
                make(config_for(pair))
    with pytest.raises(ConfigError, match="the key needs a password"):
        make_ssl_context(config_for(Pair(locked, good.certificate)))
    with pytest.raises(ConfigError, match="these files cannot be used"):
        make_ssl_context(config_for(good, ssl_ca_certs=str(text), ssl_cert_reqs=2))
