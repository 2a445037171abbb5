"""What the READMEs, CONTRIBUTING and CHANGELOG name exists: files, commands, flags, modules, symbols."""

import ast
import contextlib
import functools
import importlib
import io
import posixpath
import re
import shlex
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
DOCUMENTS = (
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "scripts/README.md"),
    *("jaxserve/README.md", "jaxserve/GUIDE.md", "jaxserve/server/README.md"),
    *("pallas_kernels/README.md", "sharding/README.md"),
)
PACKAGES = ("jaxserve", "pallas_kernels", "sharding", "checkpoints")
FOLDERS = (*PACKAGES, "tests", "scripts", ".ci")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")


def current_text(document: str) -> str:
    """A document's text; of the changelog only the entries not yet released, since older ones speak of older trees."""
    text = (REPOSITORY / document).read_text()
    return re.split(r"^## \[\d", text, maxsplit=1, flags=re.MULTILINE)[0] if document == "CHANGELOG.md" else text


def fences(text: str) -> list[tuple[str, str]]:
    """Language and content of each fenced block."""
    return re.findall(r"^ *```(\w*)[^\n]*\n(.*?)^ *```", text, flags=re.MULTILINE | re.DOTALL)


def spans(text: str) -> list[str]:
    """What stands in single backticks outside fenced blocks."""
    prose = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`\n]+)`", prose)


def command_lines(text: str) -> list[str]:
    """Shell lines of fenced blocks (continuations joined, comments cut) and inline spans with arguments."""
    shell = "\n".join(content for language, content in fences(text) if language in ("", "bash", "sh", "console"))
    lines = [line.strip().removeprefix("$ ") for line in shell.replace("\\\n", " ").splitlines()]
    return [re.sub(r"\s#.*", "", line) for line in [*lines, *spans(text)]]


@functools.cache
def accepted_flags(command: str) -> frozenset[str]:
    """Flags that `jaxserve COMMAND --help` prints."""
    output = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output), pytest.raises(SystemExit) as exit_:
        patch.setenv("COLUMNS", "200")
        importlib.import_module("jaxserve.cli").main([*command.split(), "--help"])
    assert exit_.value.code in (0, None), f"jaxserve {command} is no command"
    return frozenset(FLAG.findall(output.getvalue()))


def jaxserve_commands(text: str) -> dict[str, set[str]]:
    """Documented `jaxserve` commands (such as "bench latency") with the flags that stand behind them."""
    commands: dict[str, set[str]] = {}
    for line in command_lines(text):
        launched = re.match(r"(?:\S*/)?jaxserve launch (\S+ \S+) (?=serve )", line)
        if launched:  # the flags after it are those of the command that it runs
            commands.setdefault("launch", set()).update(FLAG.findall(launched[1]))
            line = f"jaxserve {line[launched.end() :]}"
        match = re.match(r"(?:\S*/)?jaxserve ((?:[a-z]+ ?)+)(?:\s|$|\[)?", line)
        if match:
            commands.setdefault(match[1].strip(), set()).update(FLAG.findall(line))
    return commands


def path_exists(name: str) -> bool:
    """Whether a path from the root, or a bare file name anywhere in the project's folders, exists."""
    if "/" in name.rstrip("/"):
        return (REPOSITORY / name).exists()
    return (REPOSITORY / name).exists() or any(any((REPOSITORY / folder).rglob(name)) for folder in FOLDERS)


def named_paths(text: str, folder: str = "") -> set[str]:
    """Paths of this repository that a document names in code, or in links relative to the document's folder."""
    code = [token for line in command_lines(text) for token in re.split(r"[\s\"'=,]+", line)]
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    links = [posixpath.normpath(posixpath.join(folder, link)) for link in links if link]
    tokens = [token.removeprefix("./").rstrip(".,:;") for token in [*code, *links]]
    plain = [token for token in tokens if re.fullmatch(r"[\w.-]+(/[\w.-]+)*/?", token)]
    inside = re.compile(rf"(?:{'|'.join(map(re.escape, FOLDERS))})/.*|[\w-]+\.(?:py|sh)|{'|'.join(DOCUMENTS)}")
    return {token for token in plain if inside.fullmatch(token)} | set(links)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_named_paths_exist(document: str) -> None:
    names = named_paths(current_text(document), posixpath.dirname(document))
    missing = sorted(name for name in names if not path_exists(name))
    assert not missing, f"{document} names what is not there: {missing}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_and_their_flags_exist(document: str) -> None:
    text = current_text(document)
    unknown, known = [], set[str]()
    for command, flags in jaxserve_commands(text).items():
        accepted = accepted_flags(command)
        known |= accepted
        unknown += [f"jaxserve {command} {flag}" for flag in sorted(flags - accepted)]
    for command in ("generate", "bench latency", "bench throughput", "bench startup", "convert"):
        known |= accepted_flags(command)
    for script in (REPOSITORY / "scripts").glob("*.*"):
        known |= set(FLAG.findall(script.read_text()))
    unknown += [
        flag for span in spans(text) for flag in FLAG.findall(span) if span.startswith("--") and flag not in known
    ]
    assert not unknown, f"{document} names flags that are not there: {unknown}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_scripts_are_called_as_they_are(document: str) -> None:
    """`bash scripts/x.sh` names a script, and each shell line of a fenced block can be split into words."""
    for line in command_lines(current_text(document)):
        if line.startswith(("bash ", "python ")):
            words = shlex.split(line)
            if words[1].startswith(FOLDERS):
                assert (REPOSITORY / words[1]).is_file(), f"{document}: {line}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_dotted_names_resolve(document: str) -> None:
    unresolved = []
    for span in spans(current_text(document)):
        name = span.removesuffix("()")
        if re.fullmatch(rf"(?:{'|'.join(PACKAGES)})(?:\.\w+)+", name) and not name.endswith((".py", ".md")):
            try:
                resolve(name)
            except (ImportError, AttributeError) as error:
                unresolved.append(f"{name}: {error}")
    assert not unresolved, f"{document}: {unresolved}"


def resolve(name: str) -> object:
    """The module, class or function of a dotted name."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            found = getattr(found, part)
        return found
    raise ImportError(f"no module {parts[0]}")


def missing_definitions(text: str, folder: str) -> list[str]:
    """Those of the spans ``file.py::Class.method`` whose file, relative to the document, does not define the name."""
    missing = []
    for span in spans(text):
        match = re.fullmatch(r"([\w/]+\.py)::([\w.]+)", span)
        if match is None:
            continue
        path, body = REPOSITORY / folder / match[1], list[ast.stmt]()
        if path.is_file():
            body = ast.parse(path.read_text()).body
        for name in match[2].split("."):
            found = (node for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef))
            named = next((node for node in found if node.name == name), None)
            if named is None:
                missing.append(span)
                break
            body = named.body
    return missing


@pytest.mark.parametrize("document", DOCUMENTS)
def test_named_definitions_exist(document: str) -> None:
    assert missing_definitions(current_text(document), posixpath.dirname(document)) == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_python_examples_parse_and_import_what_exists(document: str) -> None:
    for language, content in fences(current_text(document)):
        if language != "python":
            continue
        for node in ast.walk(ast.parse(content)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES:
                for alias in node.names:
                    resolve(f"{node.module}.{alias.name}")


def test_a_wrong_name_is_seen() -> None:
    """The readers above find what they look for."""
    text = "See `jaxserve/absent.py`, `absent.sh` and [this](gone.md).\n"
    text += "```bash\njaxserve bench latency --absent 3  # --no\n```\n"
    assert named_paths(text) == {"jaxserve/absent.py", "absent.sh", "gone.md"}
    assert not any(path_exists(name) for name in named_paths(text))
    assert jaxserve_commands(text) == {"bench latency": {"--absent"}}
    wrong = "See `jaxserve/llm.py::LLM.absent` and `absent.py::f`, but `jaxserve/llm.py::LLM.generate` is there."
    assert missing_definitions(wrong, "") == ["jaxserve/llm.py::LLM.absent", "absent.py::f"]
