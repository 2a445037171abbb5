"""What every format of tool calls declares."""

from abc import ABC, abstractmethod
from typing import ClassVar

from jaxserve.parsers.call_reader import CallReader, Spellings
from jaxserve.parsers.schema_types import Schemas
from jaxserve.parsers.source import Reading


class ToolFormat(ABC):
    """A format of tool calls.

    Args:
      schemas: The parameters of the offered tools; JSON formats ignore them, because JSON has types.
    """

    id_length: ClassVar[int | None] = None
    """Length of the alphanumeric ids that the model's template requires; None for vLLM's usual ids."""
    reasoning: ClassVar[str | None] = None
    """Name of the reasoning format that has to read the text first; None if any or none may."""
    starts: ClassVar[Spellings] = ()
    """Markers that begin calls."""
    leading_starts: ClassVar[Spellings] = ()
    """Markers that begin calls only where no content comes first."""

    def __init__(self, schemas: Schemas) -> None:
        self.schemas = schemas

    @abstractmethod
    def run(self, reader: CallReader) -> Reading[None]:
        """Read to the end of the text."""


class TextFormat(ToolFormat):
    """Content alone."""

    def run(self, reader: CallReader) -> Reading[None]:
        """Read to the end of the text."""
        yield from reader.read_content([])
