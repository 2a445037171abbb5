"""What a front end asks its engine process besides requests."""

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from typing import Any

from jaxserve.api.metric_types import Metric
from jaxserve.api.turns import SHARED_TURN, Turn


class EngineQueries(ABC):
    """Calls the control methods of an engine process."""

    @property
    def groups_up(self) -> Sequence[bool]:
        """Whether each group of processes is ready; empty unless each replica is a group."""
        return ()

    @abstractmethod
    async def _query(self, method: str, **arguments: Any) -> Any:
        """Call a control method of the engine process.

        Raises:
            JaxserveError: The method is unknown, or failed.
            EngineDeadError: The process has ended.
        """

    async def tokenize(
        self, text: str, add_special_tokens: bool = True, with_strings: bool = False, turn: Turn = SHARED_TURN
    ) -> tuple[Sequence[int], list[str]]:
        """Return the token ids of a text and, if ``with_strings``, the text of each token."""
        options = {"add_special_tokens": add_special_tokens, "with_strings": with_strings, "turn": turn}
        packed, strings = await self._query("tokenize", text=text, **options)
        token_ids = array("i")
        token_ids.frombytes(packed)
        return token_ids, strings

    async def detokenize(
        self, token_ids: Sequence[int], skip_special_tokens: bool = False, turn: Turn = SHARED_TURN
    ) -> str:
        """Return the text of token ids."""
        options = {"skip_special_tokens": skip_special_tokens, "turn": turn}
        return await self._query("detokenize", token_ids=list(token_ids), **options)

    async def tokenizer_info(self) -> dict[str, Any]:
        """Return what the model's files say about its tokenizer, and the chat template in use."""
        return await self._query("tokenizer_info")

    async def model_files(self) -> dict[str, str]:
        """Return the size of each of the model's files, with a hash of its beginning."""
        return await self._query("model_files")

    async def metrics(self) -> list[Metric]:
        """Return the engine's current metrics."""
        return await self._query("metrics")

    async def reset_prefix_cache(self) -> None:
        """Drop all cached pages."""
        await self._query("reset_prefix_cache")

    async def start_profile(self, directory: str) -> None:
        """Start to record a profile."""
        await self._query("start_profile", directory=directory)

    async def stop_profile(self) -> None:
        """Stop the recording and write the profile."""
        await self._query("stop_profile")
