"""Which implementation of each operation an engine takes, and the threads of native ones."""

import pytest

from jaxserve import EngineConfig
from jaxserve.api.errors import ConfigError
from jaxserve.device.build import plan_engine
from jaxserve.device.sharded_model import ShardedModel
from pallas_kernels import UnsupportedKernelError, linear_native, native_library, qkv_write_native, truncation_xla

needs_native = pytest.mark.skipif(
    native_library.unavailable() is not None, reason=f"needs native kernels: {native_library.unavailable()}"
)


def planned(**settings) -> ShardedModel:
    return plan_engine(EngineConfig(model="demo", max_num_seqs=2, max_num_batched_tokens=32, **settings)).models[0]


@needs_native
@pytest.mark.parametrize(
    "settings, attention, linear, pages",
    [
        ({"dtype": "float32"}, "native", "native", "float32"),
        ({"dtype": "bfloat16"}, "native", "native", "bfloat16"),
        ({"dtype": "bfloat16", "kernels": "xla"}, "xla", "xla", "float32"),
        ({"dtype": "float32", "kernels": "xla", "attention_backend": "native"}, "native", "xla", "float32"),
        ({"dtype": "bfloat16", "attention_backend": "xla"}, "xla", "native", "float32"),
    ],
    ids=str,
)
def test_kernels_of_a_cpu(request, settings, attention, linear, pages):
    if request.config.getoption("--kernels") or request.config.getoption("--attention-backend"):
        pytest.skip("the command line names the kernels of all tests")
    program = planned(**settings)
    assert (program.kernel.name, program.policy.linear, program.policy.kv) == (attention, linear, pages)


@needs_native
def test_kernels_that_cannot_run_are_refused_by_name(monkeypatch):
    monkeypatch.setattr(qkv_write_native, "unavailable", lambda: "no such instructions")
    with pytest.raises(UnsupportedKernelError, match="native: no such instructions"):
        planned(kernels="native")
    assert planned(dtype="float32", attention_backend=None, kernels="xla").kernel.name == "xla"


@needs_native
def test_without_native_kernels_xla_runs_everything(monkeypatch, caplog):
    for module in (qkv_write_native, linear_native):
        monkeypatch.setattr(module, "unavailable", lambda: "the native library was not built")
    with caplog.at_level("INFO"):
        planned(kernels=None, attention_backend=None)
    assert "xla (the first that can run; not triton: needs an NVIDIA GPU" in caplog.text
    assert "not native: the native library was not built" in caplog.text


def test_the_log_says_what_multiplies_and_why(caplog):
    reason = native_library.unavailable()
    first = "native (the first that can run)" if reason is None else f"xla (the first that can run; not {reason})"
    with caplog.at_level("INFO"):
        planned(dtype="bfloat16", kernels=None)
        planned(dtype="float32", kernels="xla")
    assert f"Matrix multiplication: {first}" in caplog.text
    assert "Matrix multiplication: xla (requested)" in caplog.text


def test_devices_that_sample_together_use_the_truncation_that_can(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        program = planned(tensor_parallel_size=2, layout="split_logits")
    assert "Top-k and top-p: xla (each device has the logits of its part of the vocabulary)" in caplog.text
    assert program.sampler.truncation is truncation_xla


@needs_native
def test_threads_are_a_setting():
    try:
        planned(num_threads=1)
        assert native_library.num_threads() == 1
    finally:
        native_library.set_threads(None)
    assert native_library.num_threads() == native_library.default_threads()


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"kernels": "cuda"}, "kernels: expected one of native, xla, got 'cuda'"),
        ({"num_threads": 0}, "num_threads: expected an integer >= 1, got 0"),
    ],
)
def test_other_values_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model="demo", **settings)
