"""``ModelService``: what runs, under each of its names."""

from jaxserve.server.frontend import Frontend
from jaxserve.server.grpc_api.context import Context
from jaxserve.server.proto.jaxserve.v1 import model_pb2, model_pb2_grpc


class ModelServicer(model_pb2_grpc.ModelServiceServicer):
    """The models of a server.

    Args:
        frontend: What runs behind it.
    """

    def __init__(self, frontend: Frontend):
        self._frontend = frontend

    async def ListModels(self, request: model_pb2.ListModelsRequest, context: Context) -> model_pb2.ListModelsResponse:
        """All names that requests may use."""
        del request, context
        return model_pb2.ListModelsResponse(models=[self._model(name) for name in self._frontend.model_names])

    async def GetModel(self, request: model_pb2.GetModelRequest, context: Context) -> model_pb2.GetModelResponse:
        """One model, by any of its names."""
        del context
        return model_pb2.GetModelResponse(model=self._model(self._frontend.check_model(request.model)))

    def _model(self, name: str) -> model_pb2.Model:
        made = model_pb2.Model()
        made.CopyFrom(self._frontend.info.model)
        made.id, made.created = name, self._frontend.created_s
        return made
