"""Keys and certificates for tests of encryption, made with the program openssl."""

import dataclasses
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
_SIGNS = ("-addext", "keyUsage=critical,keyCertSign,cRLSign")  # Python 3.13 wants it of those who sign


@dataclasses.dataclass(frozen=True)
class Pair:
    """A key and its certificate."""

    key: Path
    certificate: Path

    @property
    def settings(self) -> dict[str, Any]:
        """For a server."""
        return {"ssl_keyfile": str(self.key), "ssl_certfile": str(self.certificate)}


class Authority:
    """Signs certificates for this machine."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir()
        self.pair = Pair(folder / "ca.key", folder / "ca.pem")
        files = ("-keyout", self.pair.key, "-out", self.pair.certificate)
        openssl("req", "-x509", *_NEW_KEY, *files, "-days", "2", "-subj", f"/CN={folder.name}", *_SIGNS)

    def sign(self, name: str, days: int = 2) -> Pair:
        """Makes a key with a certificate."""
        made = Pair(self.folder / f"{name}.key", self.folder / f"{name}.pem")
        asked = self.folder / f"{name}.csr"
        names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
        openssl("req", *_NEW_KEY, "-keyout", made.key, "-out", asked, "-subj", f"/CN={name}", "-addext", names)
        by = ("-CA", self.pair.certificate, "-CAkey", self.pair.key, "-CAcreateserial")
        openssl("x509", "-req", "-in", asked, *by, "-days", days, "-copy_extensions", "copy", "-out", made.certificate)
        return made

    def revoke(self, *pairs: Pair) -> Path:
        """Writes the list of certificates that are revoked, which replaces the one before."""
        database, number, settings = (self.folder / name for name in ("index.txt", "crlnumber", "crl.cnf"))
        database.touch()
        if not number.exists():
            number.write_text("01")
        settings.write_text(
            f"[ca]\ndefault_ca=own\n[own]\ndatabase={database}\ncrlnumber={number}\ndefault_md=sha256\n"
        )
        by = ("ca", "-config", settings, "-keyfile", self.pair.key, "-cert", self.pair.certificate)
        for pair in pairs:
            openssl(*by, "-revoke", pair.certificate)
        made = self.folder / "revoked.new"
        openssl(*by, "-gencrl", "-crldays", 2, "-out", made)
        return made.replace(self.folder / "revoked.pem")


def openssl(*arguments: object) -> None:
    """Runs openssl."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the program openssl, to make certificates")
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
