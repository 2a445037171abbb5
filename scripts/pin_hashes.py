"""Writes the hashes of the packages that jaxserve needs, in the versions of scripts/constraints-VERSION.txt.

    .venv/bin/python scripts/pin_hashes.py

The file, scripts/hashes-VERSION.txt for the version of the Python that runs this, is what
``scripts/make_venv.sh --require-hashes`` installs. It has the file that pip takes on this machine for each package, by
the hash that the package index states: nothing is installed. Run it again after a change of the pins.
"""

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
VERSION = "{}.{}".format(*sys.version_info)
BUILD = ["setuptools"]
"""What builds the project itself, which is not taken from an index."""
HEADER = f"""# Hashes of what jaxserve needs on Python {VERSION}, Linux x86_64, for make_venv.sh --require-hashes.
# Written by scripts/pin_hashes.py from scripts/constraints-{VERSION}.txt.
"""


def resolve(requirements: list[str], constraints: Path) -> list[dict[str, Any]]:
    """Return pip's report of each package that it would install into an empty environment.

    Raises:
        subprocess.CalledProcessError: The requirements cannot be met; pip has printed why.
    """
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-"]
    command += ["--only-binary", ":all:", "--constraint", str(constraints), *requirements]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)["install"]


def lines_of(packages: list[dict[str, Any]]) -> list[str]:
    """Return the lines of a requirements file with a hash for each package, by name.

    Raises:
        ValueError: A package comes from a folder of this machine, or its index states no SHA-256.
    """
    found = list[str]()
    for package in packages:
        source, metadata = package["download_info"], package["metadata"]
        digest = source.get("archive_info", {}).get("hashes", {}).get("sha256")
        if not source["url"].startswith("https:") or digest is None:
            raise ValueError(f"{metadata['name']} has no hash of an index: pip would take {source['url']}")
        found.append(f"{metadata['name'].lower().replace('_', '-')}=={metadata['version']} --hash=sha256:{digest}")
    return sorted(found)


def main() -> None:
    """Write the file."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    constraints = REPOSITORY / "scripts" / f"constraints-{VERSION}.txt"
    lines = lines_of(resolve([*project["dependencies"], *BUILD], constraints))
    path = REPOSITORY / "scripts" / f"hashes-{VERSION}.txt"
    path.write_text(HEADER + "".join(f"{line}\n" for line in lines))
    print(f"{path}: {len(lines)} packages")


if __name__ == "__main__":
    main()
