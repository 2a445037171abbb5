"""What an engine process says of itself when it is ready."""

from jaxserve.config import EngineConfig
from jaxserve.engine.model_defaults import generation_defaults
from jaxserve.engine.startup import StartedEngine
from jaxserve.server.proto.jaxserve.internal.v1 import engine_pb2
from jaxserve.server.proto.jaxserve.v1 import model_pb2
from jaxserve.server.sampling_codec import params_to_proto


def num_places(started: StartedEngine) -> int:
    """Sequences that all steps together have room for."""
    return started.plan.max_num_seqs * len(started.plan.programs)


def ready_message(started: StartedEngine, config: EngineConfig) -> engine_pb2.Ready:
    """The model, its defaults and its memory."""
    defaults = params_to_proto(started.default_params)
    has_limit = generation_defaults(config, started.plan.directory).get("max_new_tokens") is not None
    if has_limit and started.default_params.max_tokens is not None:
        defaults.max_tokens = started.default_params.max_tokens  # even where it is Python's default
    return engine_pb2.Ready(
        model=_model(started, config),
        default_sampling_params=defaults,
        ledger=str(started.ledger),
        extra_arguments=sorted(started.plan.programs[0].arguments),
    )


def _model(started: StartedEngine, config: EngineConfig) -> model_pb2.Model:
    plan, ledger = started.plan, started.ledger
    program = plan.programs[0]
    devices = program.mesh.devices
    return model_pb2.Model(
        root=config.model,
        max_model_len=plan.max_model_len,
        architecture=plan.config.architecture,
        dtype=program.policy.weights,
        vocab_size=plan.config.vocab_size,
        mesh=[
            model_pb2.MeshAxis(name="data", size=len(plan.programs)),
            model_pb2.MeshAxis(name="tensor", size=devices.size),
        ],
        device=devices.flat[0].device_kind,
        layout=program.layout.name,
        attention_backend=program.kernel.name,
        kv_cache=model_pb2.KvCache(
            num_pages=ledger.num_pages,
            page_size=ledger.page_size,
            num_tokens=ledger.num_tokens,
            max_concurrency=ledger.max_concurrency,
            dtype=program.policy.kv,
            size_bytes=program.pool_bytes * devices.size * len(plan.programs),
        ),
        memory=[model_pb2.MemoryUse(name=name, size_bytes=size) for name, size in ledger.lines],
        max_num_seqs=num_places(started),
        max_num_batched_tokens=plan.max_num_batched_tokens * len(plan.programs),
    )
