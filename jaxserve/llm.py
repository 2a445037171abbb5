"""The Python API: ``LLM``, with vLLM's names."""

import logging
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

from tqdm import tqdm

from jaxserve.config import EngineConfig
from jaxserve.engine.build import EnginePlan
from jaxserve.engine.chat import load_chat_template, split_conversations
from jaxserve.engine.metrics import Metric
from jaxserve.engine.progress import ProgressBar
from jaxserve.engine.request_state import RequestState
from jaxserve.engine.startup import start_engine
from jaxserve.engine.stats_log import StatsLogger
from jaxserve.engine.tokenizer import Tokenizer
from jaxserve.errors import RequestError
from jaxserve.outputs import RequestOutput
from jaxserve.request import PromptInput, params_for_each, parse_prompts
from jaxserve.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


class LLM:
    """A model ready to generate text.

    Args:
        model: Directory, hub id, or ``demo`` for the model that comes with the package.
        **arguments: Settings under vLLM's names; see ``EngineConfig``.

    Raises:
        ConfigError: An unknown or unsupported setting, or a model that cannot run or does not fit.
        CheckpointError: A checkpoint that cannot be read.

    Example:
        >>> with LLM("demo") as llm:
        ...     print(llm.generate("12+30=", SamplingParams(temperature=0))[0].outputs[0].text)
    """

    def __init__(self, model: str, **arguments: Any):
        self.config = EngineConfig.from_arguments(model, **arguments)
        self._chat_template = _read_template(self.config.chat_template)
        self._started = start_engine(self.config)
        self.engine = self._started.engine
        self.ledger = self._started.ledger
        logger.info("%s", self.ledger)
        self._defaults = self._started.default_params
        self._stats = None if self.config.disable_log_stats else StatsLogger(self.ledger.device)

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees the devices' memory."""
        self.engine.close()

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self._started.plan.config.vocab_size

    @property
    def plan(self) -> EnginePlan:
        """How the model was fitted to the devices."""
        return self._started.plan

    @property
    def load_s(self) -> float:
        """Seconds spent reading weights at the start."""
        return self._started.load_s

    @property
    def compile_s(self) -> float:
        """Seconds spent tracing and compiling at the start, partly beside the reading."""
        return self._started.compile_s

    def get_tokenizer(self) -> Any:
        """The tokenizer: transformers' object, or jaxserve's own where transformers would read the files wrong."""
        tokenizer = self._tokenizer()
        return tokenizer if tokenizer.hf is None else tokenizer.hf

    def get_default_sampling_params(self) -> SamplingParams:
        """What ``generate`` uses when it is given none: the model's generation_config.json."""
        return self._defaults

    def get_metrics(self) -> list[Metric]:
        """Numbers about the engine, each with ``name`` and ``value``."""
        return self.engine.metrics()

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., tqdm] = True,
    ) -> list[RequestOutput]:
        """Generates text for each prompt, all of them together.

        Args:
            prompts: A string, a list of token ids, ``{"prompt": …}``, ``{"prompt_token_ids": …}``, or a list of those.
            sampling_params: For all prompts, or one for each; None takes the model's defaults.
            use_tqdm: Whether to show a progress bar, or what makes it.

        Returns:
            Outputs in the order of the prompts.

        Raises:
            RequestError: A bad prompt or parameter; the message names its index. Nothing has run then.
        """
        return self._run(parse_prompts(prompts, sampling_params), use_tqdm)

    def chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., tqdm] = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generates the next message of one conversation, or of each in a list.

        Args:
            messages: A list of ``{"role": …, "content": …}``, or a list of such lists.
            sampling_params: As in ``generate``.
            use_tqdm: As in ``generate``.
            chat_template: A Jinja template in place of the model's.
            add_generation_prompt: End the prompt where the assistant's message begins.
            continue_final_message: Leave the last message open, to be continued.
            tools: Passed to the template.
            chat_template_kwargs: Further variables for the template.
        """
        conversations = split_conversations(messages)
        params = params_for_each(sampling_params, len(conversations))
        tokenizer = self._tokenizer()
        template = self._chat_template if chat_template is None else _read_template(chat_template)
        inputs = []
        for conversation, one in zip(conversations, params, strict=True):
            text = tokenizer.render_chat(
                conversation,
                template,
                add_generation_prompt,
                continue_final_message,
                tools,
                **(chat_template_kwargs or {}),
            )
            token_ids = tokenizer.encode(text, add_special_tokens=False)
            inputs.append(PromptInput(prompt=text, prompt_token_ids=tuple(token_ids), params=one))
        return self._run(inputs, use_tqdm)

    def stream(
        self, prompt: Any, sampling_params: SamplingParams | None = None
    ) -> Generator[RequestOutput, None, None]:
        """Generates text for one prompt, giving what there is of it after each step; closing it ends the request."""
        inputs = parse_prompts(prompt, sampling_params)
        if len(inputs) != 1:
            raise RequestError(f"stream takes one prompt, got {len(inputs)}")
        (request,) = self._submit(inputs)
        try:
            while not request.is_finished():
                if request in self._step() and not request.is_finished():
                    yield request.output(not self.config.disable_log_stats)
            yield request.output(not self.config.disable_log_stats)
        finally:
            self.engine.abort(request)

    def _run(self, inputs: list[PromptInput], use_tqdm: bool | Callable[..., tqdm]) -> list[RequestOutput]:
        """Submits everything, steps to the end, and puts the outputs in order."""
        requests = self._submit(inputs)
        bar = ProgressBar(requests, use_tqdm)
        try:
            while self.engine.num_unfinished:
                for request in self._step():
                    if request.is_finished():
                        bar.update(request)
        except BaseException:
            self._abort(requests)
            raise
        finally:
            bar.close()
        return [request.output(not self.config.disable_log_stats) for request in requests]

    def _step(self) -> list[RequestState]:
        """One step of the engine, and the log line when it is due."""
        changed = self.engine.step()
        if self._stats is not None and self._stats.is_due():
            self._stats.log(self.engine.metrics())
        return changed

    def _submit(self, inputs: list[PromptInput]) -> list[RequestState]:
        """All requests, or none: a bad one takes back those before it."""
        arrival_s = time.monotonic()
        requests: list[RequestState] = []
        for index, one in enumerate(inputs):
            try:
                requests.append(self.engine.submit(one, one.params or self._defaults, arrival_s))
            except RequestError as error:
                self._abort(requests)
                raise RequestError(f"prompt {index}: {error}") from error
        return requests

    def _abort(self, requests: list[RequestState]) -> None:
        for request in requests:
            self.engine.abort(request)

    def _tokenizer(self) -> Tokenizer:
        if self.engine.tokenizer is None:
            raise RequestError(f"{self._started.plan.directory} has no tokenizer")
        return self.engine.tokenizer


def _read_template(template: str | None) -> str | None:
    return None if template is None else load_chat_template(template)
