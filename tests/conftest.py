"""Test-wide settings: eight virtual CPU devices, no network, warnings as errors (see pyproject.toml).

Environment variables are set before JAX is imported, since its CPU backend reads them once.
"""

import functools
import gc
import importlib.util
import logging
import os
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

# Imports and the collection of tests leave little garbage, and each file ends by collecting it (``_unload_programs``).
gc.set_threshold(200_000, 20, 100)
# The load generator unfreezes when it has measured. The next collection would then look at every module that was ever
# imported, which takes a second, and ``jaxserve bench serve`` runs dozens of times.
gc.unfreeze = lambda: None

# Threads enough for the collectives of eight virtual devices on any number of cores, and an end with a message when one
# is stuck all the same.
os.environ.setdefault("PJRT_NPROC", "16")
_COLLECTIVE_TIMEOUTS = (
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=10 --xla_cpu_collective_call_terminate_timeout_seconds=30"
)
if "xla_cpu_collective_call" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_COLLECTIVE_TIMEOUTS}".strip()
# Tests run small programs a few times each: compiling fast matters more than fast code. The second flag halves the time
# again; later versions of XLA no longer know it, and an unknown flag ends the process.
_FAST_COMPILES = "--xla_backend_optimization_level=0"
if metadata.version("jaxlib").startswith("0.10."):
    _FAST_COMPILES += " --xla_cpu_use_fusion_emitters=false"
if "xla_backend_optimization_level" not in os.environ["XLA_FLAGS"]:
    os.environ["XLA_FLAGS"] += f" {_FAST_COMPILES}"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")  # lowering notes no line of Python: a twentieth faster
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import hypothesis  # noqa: E402  (after the environment that JAX reads)
import jax  # noqa: E402
import pytest  # noqa: E402

from tests import cost_profile, drafting, suite  # noqa: E402
from tests.server_process import PROGRAMS_CACHE  # noqa: E402
from tests.shape_checks import check_shapes  # noqa: E402

REPOSITORY = Path(__file__).resolve().parent.parent
check_shapes(REPOSITORY)

from jaxserve.api.config import EngineConfig  # noqa: E402  (after what checks it)

NUM_CPU_DEVICES = 8

jax.config.update("jax_num_cpu_devices", NUM_CPU_DEVICES)
# Both workers, and later runs, load a program that was compiled once. JAX reports a load like a compilation, so that
# tests of "nothing compiles after ready" see it. Processes that tests start choose their own directory, as users' do.
jax.config.update("jax_compilation_cache_dir", str(PROGRAMS_CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# Calls without a client, such as httpx2.get, make a TLS context each, also for plain HTTP. Reading the certificate
# authorities takes it 20 ms, and tests of servers make thousands of calls. That of Mosaic has no client.
if importlib.util.find_spec("httpx2"):
    transports: Any = importlib.import_module("httpx2._transports.default")
    transports.create_ssl_context = functools.cache(transports.create_ssl_context)

# No test is timed; a failure found in continuous integration must come back at the next run.
hypothesis.settings.register_profile("jaxserve", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("jaxserve")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--attention-backend``, ``--kernels`` and ``--speculation``, which every engine of the tests then takes."""
    suite.add_options(parser)
    parser.addoption("--profile-costs", type=Path, help="write to this file what each test spends its time on")
    parser.addoption("--attention-backend", help="run engines with this one, such as pallas-interpret")
    parser.addoption("--kernels", choices=("native", "xla"), help="run engines with these alone")
    parser.addoption("--speculation", choices=drafting.METHODS, help="run engines, also those of servers, with drafts")


def pytest_configure(config: pytest.Config) -> None:
    """Make what the command line names the engines' default, and register the plugins of the suite."""
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    if not is_worker:
        suite.empty_if_large(PROGRAMS_CACHE)
        config.pluginmanager.register(suite.CostReport())
    if (path := config.getoption("--profile-costs")) is not None:
        if not is_worker:
            config.pluginmanager.register(cost_profile.ProfileFile(path))
        if is_worker or not config.getoption("numprocesses", None):
            config.pluginmanager.register(cost_profile.Profile())
    if (method := config.getoption("--speculation")) is not None:
        os.environ[drafting.VARIABLE] = method
    names = {"attention_backend": "--attention-backend", "kernels": "--kernels"}
    given = {name: config.getoption(option) for name, option in names.items()}
    defaults = {name: value for name, value in given.items() if value is not None}
    if not defaults and method is None:
        return
    if "attention_backend" in defaults:
        os.environ["TESTS_ATTENTION_BACKEND"] = defaults["attention_backend"]
    make = EngineConfig.__init__

    def make_with_defaults(self: EngineConfig, **settings: Any) -> None:
        make(self, **{**defaults, **settings, **drafting.default(settings)})

    EngineConfig.__init__ = make_with_defaults


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Arrange the tests; skip those marked `gpu` unless `JAX_PLATFORMS` asks for one, such as `cuda,cpu`."""
    suite.arrange(config, items)
    platforms = os.environ["JAX_PLATFORMS"].split(",")
    if {"cuda", "gpu"}.isdisjoint(platforms):
        skip = pytest.mark.skip(reason="needs a GPU: run with JAX_PLATFORMS=cuda,cpu")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Take what was imported out of garbage collection, which takes a sixth of the time of tests otherwise."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what begins after ``--deadline``."""
    suite.check_deadline(item.config)


@pytest.fixture(scope="module", autouse=True)
def _unload_programs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Unload a file's compiled programs: each takes several memory mappings, and Linux allows a process 65,530."""
    yield
    for value in vars(request.module).values():
        if isinstance(value, functools._lru_cache_wrapper):
            value.cache_clear()
    jax.clear_caches()
    gc.collect()
    gc.freeze()  # what is left is imported modules: the next file's collections need not look at them


_LOGGER = logging.getLogger("jaxserve")
_LOG_LEVEL = _LOGGER.level


@pytest.fixture(autouse=True)
def _log_level() -> None:
    """Undo what a command that ran in this process, in a test or in a fixture of a file, has set."""
    _LOGGER.setLevel(_LOG_LEVEL)


@pytest.fixture(scope="session")
def repository() -> Path:
    """The repository root."""
    return REPOSITORY


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real configs, tokenizers, traces and the stories260k model that lies beside a checkout."""
    path = REPOSITORY.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip(f"needs the data folder {path}, which is not part of the repository")
    return path


@pytest.fixture(scope="session")
def stories_model(shared_data: Path) -> Path:
    """Directory of the trained 260k-parameter Llama (Hugging Face layout, float32)."""
    return shared_data / "models" / "stories260k"


@pytest.fixture
def switchable_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry's line for the family whose config switches layers; see ``tests.switchable``."""
    from jaxserve.models import registry
    from tests import switchable

    monkeypatch.setitem(registry.FAMILIES, switchable.ARCHITECTURE, switchable.__name__)
