"""A typed client of jaxserve's gRPC server, independent of JAX.

with Client("localhost:8001") as client:
    print(client.generate("Once upon a time").outputs[0].text)
"""

from jaxserve.client.admin_client import AdminClient as AdminClient
from jaxserve.client.async_client import AsyncClient as AsyncClient
from jaxserve.client.requests import ConversationOptions as ConversationOptions
from jaxserve.client.requests import Prompt as Prompt
from jaxserve.client.requests import RequestOptions as RequestOptions
from jaxserve.client.results import ChatDelta as ChatDelta
from jaxserve.client.results import ChatOutput as ChatOutput
from jaxserve.client.results import RenderedPrompt as RenderedPrompt
from jaxserve.client.results import TokenizedText as TokenizedText
from jaxserve.client.sync_client import Client as Client
