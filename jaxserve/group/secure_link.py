"""TLS for the connections of a group, whose two sides both show a certificate of the group's authority."""

import contextlib
import socket
import ssl
import threading

from jaxserve.api.errors import ConfigError
from jaxserve.group.settings import GroupPlace

_CHUNK_BYTES = 1 << 16


class SecureLink:
    """A connection over TLS 1.3. One thread may receive while others send, which a socket of Python's ``ssl`` forbids.

    Args:
        link: The socket, connected.
        place: The certificate of this side and its authority.
        is_leader: Whether this side is process 0, or the one that took the connection between two others.
        peer_name: Address or name that the certificate of the other side must be for; None: any.

    Raises:
        OSError: The other side has ended, or shows no certificate that this side trusts.
    """

    def __init__(self, link: socket.socket, place: GroupPlace, is_leader: bool, peer_name: str | None = None):
        self._link = link
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = _context(place, is_leader, peer_name is not None)
        self._tls = context.wrap_bio(self._incoming, self._outgoing, is_leader, peer_name)
        self._lock = threading.Lock()  # of the three above
        self._sending = threading.Lock()  # keeps what is sent in order
        self._greet()

    def _greet(self) -> None:
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._flush()
                self._receive()
            except ssl.SSLError:
                with contextlib.suppress(OSError):  # the other side is told, if it listens
                    self._flush()
                raise
            else:
                self._flush()
                return

    def sendall(self, data: bytes) -> None:
        """Send all bytes.

        Raises:
            OSError: The other side has ended.
        """
        with self._sending:
            with self._lock:
                left = memoryview(data)
                while left:
                    left = left[self._tls.write(left) :]
                sealed = self._outgoing.read()
            self._link.sendall(sealed)

    def read(self, count: int) -> bytes:
        """Wait for a number of bytes; return fewer at the end of the connection.

        Raises:
            OSError: The connection has failed, or the other side does not trust this one.
        """
        found = bytearray()
        while len(found) < count:
            try:
                with self._lock:
                    found += self._tls.read(count - len(found))
            except ssl.SSLWantReadError:
                # What TLS itself has to say goes out with the next message: this thread must not wait for one that
                # sends, since that one may wait for the other side to receive, which may be waiting in the same way.
                if not self._receive():
                    break
            except ssl.SSLZeroReturnError:
                break
        return bytes(found)

    def _receive(self) -> bool:
        """Wait for bytes of the other side; return whether any came."""
        received = self._link.recv(_CHUNK_BYTES)
        with self._lock:
            if received:
                self._incoming.write(received)
            else:
                self._incoming.write_eof()
        return bool(received)

    def _flush(self) -> None:
        """Send what TLS itself has to say."""
        with self._sending:
            with self._lock:
                sealed = self._outgoing.read()
            if sealed:
                self._link.sendall(sealed)


def check_certificate(place: GroupPlace) -> None:
    """Check the certificate of this process as the others will, before any of them is asked.

    Raises:
        ConfigError: A file cannot be used; the certificate has expired, is of another authority or, for process 0, is
            not for the address of the group.
    """
    for path in (place.certfile, place.keyfile, place.ca_certs):
        try:
            with open(path or "", "rb"):
                pass
        except OSError as error:
            raise ConfigError(f"group_certfile, group_keyfile, group_ca_certs: {path}: {error.strerror}") from error
    here, there = socket.socketpair()
    problems: list[Exception] = []

    def answer() -> None:
        try:
            SecureLink(there, place, is_leader=True)
        except OSError as error:
            problems.append(error)
            there.close()

    with here, there:
        answering = threading.Thread(target=answer, daemon=True)
        answering.start()
        try:
            SecureLink(here, place, is_leader=False, peer_name=None if place.rank else place.address)
        except OSError as error:
            problems.insert(0, error)
            here.close()
        answering.join()
    for error in problems:
        raise ConfigError(f"group_certfile, group_keyfile, group_ca_certs: {reason_of(error)}") from error


def is_distrust(error: BaseException) -> bool:
    """Return whether one side does not trust the other one, or speaks no TLS, which time does not change."""
    return isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError)


def speaks_no_tls(error: BaseException) -> bool:
    """Return whether what the other side said is no TLS."""
    return isinstance(error, ssl.SSLError) and error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE")


def reason_of(error: BaseException) -> str:
    """Return why a certificate was refused, in OpenSSL's words, or the error itself."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.lower().replace("_", " ")
    return str(error)


def _context(place: GroupPlace, is_leader: bool, checks_name: bool) -> ssl.SSLContext:
    assert place.certfile is not None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_leader else ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = checks_name
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(place.certfile, place.keyfile)
    context.load_verify_locations(place.ca_certs)
    return context
