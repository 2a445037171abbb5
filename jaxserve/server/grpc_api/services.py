"""The other gRPC services: models, tokenizer, and operation of the server."""

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxserve.api.errors import RequestError
from jaxserve.api.metric_types import Metric
from jaxserve.server.byte_budget import conversion_bytes
from jaxserve.server.chat import chat_arguments
from jaxserve.server.converted_tokens import check_converted
from jaxserve.server.errors import NotImplementedRequestError
from jaxserve.server.frontend import Frontend
from jaxserve.server.grpc_api.calls import Context
from jaxserve.server.grpc_api.generation import conversation_fields
from jaxserve.server.grpc_api.interceptor import CURRENT_CALL
from jaxserve.server.long_work import LongWork
from jaxserve.server.metrics import rank_progress, values_of_all
from jaxserve.server.proto.jaxserve.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    tokenization_pb2,
    tokenization_pb2_grpc,
)


class ModelServicer(model_pb2_grpc.ModelServiceServicer):
    """The models of a server."""

    def __init__(self, frontend: Frontend):
        self._frontend = frontend

    async def ListModels(self, request: model_pb2.ListModelsRequest, context: Context) -> model_pb2.ListModelsResponse:
        """Return the model under each of its names."""
        del request, context
        return model_pb2.ListModelsResponse(models=[self._model(name) for name in self._frontend.model_names])

    async def GetModel(self, request: model_pb2.GetModelRequest, context: Context) -> model_pb2.GetModelResponse:
        """Return the model by one of its names."""
        del context
        return model_pb2.GetModelResponse(model=self._model(self._frontend.check_model(request.model)))

    def _model(self, name: str) -> model_pb2.Model:
        made = model_pb2.Model()
        made.CopyFrom(self._frontend.info.model)
        made.id, made.created = name, self._frontend.created_s
        return made


class TokenizationServicer(tokenization_pb2_grpc.TokenizationServiceServicer):
    """The model's tokenizer and chat template."""

    def __init__(self, frontend: Frontend):
        self._frontend = frontend

    @property
    def _long_work(self) -> LongWork:
        return self._frontend.long_work

    def _admit(self, model: str, num_bytes: int) -> contextlib.AbstractContextManager[None]:
        self._frontend.check_model(model)
        return self._frontend.ledger.admit(CURRENT_CALL.get().caller, num_bytes=num_bytes)

    async def Tokenize(
        self, request: tokenization_pb2.TokenizeRequest, context: Context
    ) -> tokenization_pb2.TokenizeResponse:
        """Return the token ids of a text."""
        del context
        adds = request.add_special_tokens if request.HasField("add_special_tokens") else True
        with self._admit(request.model, conversion_bytes(text=request.text)):
            token_ids, strings = await self._frontend.engine.tokenize(
                request.text, adds, request.return_token_strings, CURRENT_CALL.get().caller.turn
            )
        fields: dict[str, Any] = {
            "token_ids": token_ids,
            "token_strings": strings if request.return_token_strings else (),
            "max_model_len": self._frontend.info.max_model_len,
        }
        return await self._long_work.read(
            CURRENT_CALL.get().caller.turn, len(request.text), lambda: tokenization_pb2.TokenizeResponse(**fields)
        )

    async def Detokenize(
        self, request: tokenization_pb2.DetokenizeRequest, context: Context
    ) -> tokenization_pb2.DetokenizeResponse:
        """Return the text of token ids."""
        del context
        if not request.HasField("token_ids"):
            raise RequestError("expected token_ids", parameter="token_ids")
        check_converted("token_ids", len(request.token_ids.ids))
        with self._admit(request.model, conversion_bytes(num_tokens=len(request.token_ids.ids))):
            text = await self._frontend.engine.detokenize(
                list(request.token_ids.ids), request.skip_special_tokens, CURRENT_CALL.get().caller.turn
            )
        return tokenization_pb2.DetokenizeResponse(text=text)

    async def ApplyChatTemplate(
        self, request: tokenization_pb2.ApplyChatTemplateRequest, context: Context
    ) -> tokenization_pb2.ApplyChatTemplateResponse:
        """Return the prompt of a conversation."""
        del context
        turn = CURRENT_CALL.get().caller.turn

        def read() -> tuple[dict[str, Any], int]:
            fields = conversation_fields(request.messages)
            return chat_arguments(self._frontend.config, fields), conversion_bytes(text=fields)

        chat, num_bytes = await self._long_work.read(turn, request.ByteSize(), read)
        with self._admit(request.model, num_bytes):
            text, token_ids = await self._frontend.engine.render_chat(chat, turn)
        return tokenization_pb2.ApplyChatTemplateResponse(text=text, token_ids=token_ids)


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Operation of a server.

    Args:
        frontend: The front end.
        on_drain: Starts a drain; gets the seconds that in-flight requests may take, None for the server's setting.
    """

    def __init__(self, frontend: Frontend, on_drain: Callable[[float | None], None]):
        self._frontend = frontend
        self._on_drain = on_drain

    async def GetLoad(self, request: admin_pb2.GetLoadRequest, context: Context) -> admin_pb2.GetLoadResponse:
        """Return how busy the server is."""
        del request, context
        engine, ledger = self._frontend.engine, self._frontend.ledger
        metrics = await engine.metrics()
        groups = [
            admin_pb2.GroupLoad(
                is_up=is_up, **_load(each for each in metrics if each.labels.get("engine") == str(index))
            )
            for index, is_up in enumerate(engine.groups_up)
        ]
        ranks = [admin_pb2.RankProgress(**each._asdict()) for each in rank_progress(metrics)]
        return admin_pb2.GetLoadResponse(
            **_load(metrics),
            num_in_flight=ledger.num_in_flight,
            is_draining=not ledger.is_open,
            groups=groups,
            ranks=ranks,
        )

    async def Drain(self, request: admin_pb2.DrainRequest, context: Context) -> admin_pb2.DrainResponse:
        """Stop accepting requests, and stop the server when in-flight requests have finished."""
        del context
        timeout_s = request.timeout_s if request.HasField("timeout_s") else None
        if timeout_s is not None and not 0 <= timeout_s < float("inf"):
            message = f"timeout_s must be a finite number of seconds of at least 0, got {timeout_s:g}"
            raise RequestError(message, parameter="timeout_s", value=timeout_s)
        self._on_drain(timeout_s)
        return admin_pb2.DrainResponse()

    async def ResetPrefixCache(
        self, request: admin_pb2.ResetPrefixCacheRequest, context: Context
    ) -> admin_pb2.ResetPrefixCacheResponse:
        """Remove all pages from the prefix cache."""
        del request, context
        await self._frontend.engine.reset_prefix_cache()
        return admin_pb2.ResetPrefixCacheResponse()

    async def StartProfile(
        self, request: admin_pb2.StartProfileRequest, context: Context
    ) -> admin_pb2.StartProfileResponse:
        """Start to record a profile of the engine."""
        del request, context
        directory = self._profile_directory()
        await self._frontend.engine.start_profile(directory)
        return admin_pb2.StartProfileResponse(directory=directory)

    async def StopProfile(
        self, request: admin_pb2.StopProfileRequest, context: Context
    ) -> admin_pb2.StopProfileResponse:
        """Stop recording."""
        del request, context
        directory = self._profile_directory()
        await self._frontend.engine.stop_profile()
        return admin_pb2.StopProfileResponse(directory=directory)

    async def Abort(self, request: admin_pb2.AbortRequest, context: Context) -> admin_pb2.AbortResponse:
        """Abort requests by their full ids."""
        del context
        aborted = await self._frontend.engine.abort(list(request.request_ids))
        return admin_pb2.AbortResponse(aborted_request_ids=aborted)

    async def Reshard(self, request: admin_pb2.ReshardRequest, context: Context) -> admin_pb2.ReshardResponse:
        """Move the engine to another mesh or layout, and limit the sequences in flight to what it has room for."""
        del context
        mesh, layout = (getattr(request, name) if request.HasField(name) else None for name in ("mesh", "layout"))
        report = await self._frontend.engine.reshard(mesh, layout)
        self._frontend.reopen()
        meshes = {name: _mesh_axes(report.pop(name)) for name in ("from_mesh", "to_mesh")}
        return admin_pb2.ReshardResponse(**meshes, **report)

    def _profile_directory(self) -> str:
        directory = self._frontend.config.profile_dir
        if directory is None:
            raise NotImplementedRequestError("this server records no profiles: it was started without --profile-dir")
        return directory


def _load(metrics: Iterable[Metric]) -> dict[str, Any]:
    """Return the fields of a load that the metrics of an engine, or of several groups, have."""
    gauges = values_of_all(metrics)
    return {
        "num_running": round(gauges.get("num_requests_running", 0)),
        "num_waiting": round(gauges.get("num_requests_waiting", 0)),
        "kv_cache_usage": gauges.get("kv_cache_usage_perc", 0),
    }


def _mesh_axes(sizes: Mapping[str, int]) -> list[model_pb2.MeshAxis]:
    return [model_pb2.MeshAxis(name=name, size=size) for name, size in sizes.items()]
