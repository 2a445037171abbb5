"""Print a bill of materials of this environment in CycloneDX 1.6: jaxserve and every package that it needs.

Usage: python scripts/make_sbom.py [EXTRA …] > sbom.json; extras are those of pyproject.toml, such as otel.
"""

import importlib.metadata
import json
import sys
import uuid
from collections.abc import Iterable
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def make_sbom(extras: Iterable[str] = ()) -> dict[str, Any]:
    """Return the bill of materials, with what each package needs.

    Args:
        extras: Extras of jaxserve.
    """
    needs: dict[str, set[str]] = {}
    waiting = [("jaxserve", extra) for extra in ("", *extras)]
    seen = set[tuple[str, str]]()
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        try:
            wanted = importlib.metadata.requires(name) or ()
        except importlib.metadata.PackageNotFoundError:  # what a marker or an extra left out
            continue
        own = needs.setdefault(name, set())
        for requirement in map(Requirement, wanted):
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
                continue
            other = canonicalize_name(requirement.name)
            own.add(other)
            waiting += [(other, each) for each in ("", *requirement.extras)]
    found = {name: importlib.metadata.version(name) for name in sorted(needs)}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(found))}",
        "version": 1,
        "metadata": {"component": _component("jaxserve", found["jaxserve"], "application")},
        "components": [_component(name, version, "library") for name, version in found.items() if name != "jaxserve"],
        "dependencies": [
            {"ref": _url(name, found[name]), "dependsOn": sorted(_url(one, found[one]) for one in others & set(found))}
            for name, others in sorted(needs.items())
        ],
    }


def _component(name: str, version: str, kind: str) -> dict[str, str]:
    url = _url(name, version)
    return {"type": kind, "bom-ref": url, "name": name, "version": version, "purl": url}


def _url(name: str, version: str) -> str:
    return f"pkg:pypi/{name}@{version}"


if __name__ == "__main__":
    print(json.dumps(make_sbom(sys.argv[1:]), indent=2))
