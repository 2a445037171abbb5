"""``TokenizationService``: text to token ids and back."""

import contextlib

from jaxserve.errors import RequestError
from jaxserve.server.engine_request import check_converted
from jaxserve.server.frontend import Frontend
from jaxserve.server.grpc_api.context import CURRENT_CALL, Context
from jaxserve.server.grpc_api.conversations import chat_arguments, read_tools
from jaxserve.server.proto.jaxserve.v1 import tokenization_pb2, tokenization_pb2_grpc


class TokenizationServicer(tokenization_pb2_grpc.TokenizationServiceServicer):
    """The model's tokenizer and chat template.

    Args:
        frontend: What runs behind it.
    """

    def __init__(self, frontend: Frontend):
        self._frontend = frontend

    def _admit(self, model: str) -> contextlib.AbstractContextManager[None]:
        self._frontend.check_model(model)
        return self._frontend.admit(CURRENT_CALL.get().caller)

    async def Tokenize(
        self, request: tokenization_pb2.TokenizeRequest, context: Context
    ) -> tokenization_pb2.TokenizeResponse:
        """Text to token ids."""
        del context
        adds = request.add_special_tokens if request.HasField("add_special_tokens") else True
        with self._admit(request.model):
            token_ids, strings = await self._frontend.engine.tokenize(request.text, adds, request.return_token_strings)
        return tokenization_pb2.TokenizeResponse(
            token_ids=token_ids,
            token_strings=strings if request.return_token_strings else (),
            max_model_len=self._frontend.info.max_model_len,
        )

    async def Detokenize(
        self, request: tokenization_pb2.DetokenizeRequest, context: Context
    ) -> tokenization_pb2.DetokenizeResponse:
        """Token ids to text."""
        del context
        if not request.HasField("token_ids"):
            raise RequestError("expected token_ids", parameter="token_ids")
        check_converted("token_ids", len(request.token_ids.ids))
        with self._admit(request.model):
            text = await self._frontend.engine.detokenize(list(request.token_ids.ids), request.skip_special_tokens)
        return tokenization_pb2.DetokenizeResponse(text=text)

    async def ApplyChatTemplate(
        self, request: tokenization_pb2.ApplyChatTemplateRequest, context: Context
    ) -> tokenization_pb2.ApplyChatTemplateResponse:
        """A conversation to the prompt that the model would get."""
        del context
        use = read_tools(self._frontend, request.messages)
        chat = chat_arguments(self._frontend, request.messages, use)
        with self._admit(request.model):
            text, token_ids = await self._frontend.engine.render_chat(chat)
        return tokenization_pb2.ApplyChatTemplateResponse(text=text, token_ids=token_ids)
