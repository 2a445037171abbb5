"""The Python API: ``LLM``, with vLLM's names."""

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from tqdm import tqdm

from jaxserve.config import EngineConfig
from jaxserve.device.build import EnginePlan
from jaxserve.engine.beam_search import BeamSearch
from jaxserve.engine.offline import OfflineRunner
from jaxserve.engine.startup import start_engine
from jaxserve.engine.stats_log import StatsLogger
from jaxserve.errors import ConfigError, RequestError
from jaxserve.metric_types import Metric
from jaxserve.outputs import BeamSearchOutput, EmbeddingRequestOutput, PoolingRequestOutput, RequestOutput
from jaxserve.parsers import MessageParser, ParsedMessage, starts_in_reasoning
from jaxserve.pooling_params import PoolingParams, check_pooling_task
from jaxserve.request import parse_prompts, priorities_for_each
from jaxserve.sampling_params import BeamSearchParams, SamplingParams
from jaxserve.text.chat_prompt import chat_prompts, read_template

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
        self._chat_template = read_template(self.config.chat_template)
        self._started = start_engine(self.config)
        self.engine = self._started.engine
        self.ledger = self._started.ledger
        logger.info("%s", self.ledger)
        stats = None if self.config.disable_log_stats else StatsLogger(self.ledger.device)
        self._runner = OfflineRunner(self.engine, self._started.default_params, stats)

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the devices' memory."""
        self.engine.close()

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self._started.plan.config.vocab_size

    @property
    def plan(self) -> EnginePlan:
        """Return how the model was fitted to the devices."""
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
        """Return the tokenizer: transformers' object, or jaxserve's own where transformers would read the files
        wrong."""
        return self._started.public_tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What ``generate`` uses when it is given none: the model's generation_config.json and what overrides it."""
        return self._started.default_params

    def get_metrics(self) -> list[Metric]:
        """Numbers about the engine, each with ``name`` and ``value``."""
        return self.engine.metrics()

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., tqdm] = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generate text for each prompt, all of them together.

        Args:
            prompts: A string, a list of token ids, ``{"prompt": …}``, ``{"prompt_token_ids": …}``, or a list of those.
            sampling_params: For all prompts, or one for each; None takes the model's defaults.
            use_tqdm: Whether to show a progress bar, or what makes it.
            priority: One number for each prompt, the lowest first; needs ``scheduling_policy="priority"``.

        Returns:
            Outputs in the order of the prompts.

        Raises:
            RequestError: A bad prompt or parameter; the message names its index. Nothing has run then.
        """
        inputs = parse_prompts(prompts, sampling_params)
        return self._runner.run(inputs, priorities_for_each(priority, len(inputs)), use_tqdm)

    def embed(
        self,
        prompts: Any,
        *,
        use_tqdm: bool | Callable[..., tqdm] = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Make a vector of each prompt from the model's last hidden states, all of them together.

        Args:
            prompts: As in ``generate``; up to the whole context long.
            use_tqdm: As in ``generate``.
            pooling_params: For all prompts, or one for each; None takes the last token's state, scaled to length 1.
            priority: As in ``generate``.

        Returns:
            Outputs in the order of the prompts; the vector is ``outputs.embedding``.

        Raises:
            RequestError: A bad prompt or parameter; the message names its index. Nothing has run then.
            RequestFailedError: A vector is not numbers.
        """
        outputs = self.encode(prompts, pooling_params, use_tqdm=use_tqdm, priority=priority)
        return [EmbeddingRequestOutput.of(output) for output in outputs]

    def encode(
        self,
        prompts: Any,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., tqdm] = True,
        pooling_task: str | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[PoolingRequestOutput]:
        """As ``embed``, with the vector in ``outputs.data``; ``embed`` is the only ``pooling_task``."""
        check_pooling_task(pooling_task)
        inputs = parse_prompts(prompts, pooling_params, PoolingParams)
        return self._runner.pool(inputs, priorities_for_each(priority, len(inputs)), use_tqdm)

    def beam_search(
        self, prompts: Any, params: BeamSearchParams, *, use_tqdm: bool = False, concurrency_limit: int | None = None
    ) -> list[BeamSearchOutput]:
        """Return the likeliest texts for each prompt.

        Args:
            prompts: As in ``generate``.
            params: How many texts, how long, and how they compare.
            use_tqdm: Whether to show a progress bar.
            concurrency_limit: Most prompts searched for at the same time; None for all.

        Returns:
            For each prompt up to ``beam_width`` texts, best first, their tokens with the prompt's in front.
        """
        return BeamSearch(self.engine, params).run(parse_prompts(prompts), use_tqdm, concurrency_limit)

    def parse_message(
        self, text: str, tools: Sequence[Mapping[str, Any]] | None = None, *, prompt: str = ""
    ) -> ParsedMessage:
        """What a model's answer holds: reasoning, content, tool calls.

        Args:
            text: The answer, generated with ``skip_special_tokens=False`` where the model's marks are special tokens.
            tools: The tools that were offered, each with its JSON schema; formats without types take them from there.
            prompt: The text before the answer, which may have begun the reasoning.

        Raises:
            ConfigError: The engine was made without ``reasoning_parser`` and without ``tool_call_parser``.
        """
        reasoning, calls = self.config.reasoning_parser, self.config.tool_call_parser
        if reasoning is None and calls is None:
            raise ConfigError("parse_message needs an engine with a reasoning_parser or a tool_call_parser")
        begun = None if reasoning is None else starts_in_reasoning(prompt, reasoning)
        return MessageParser(reasoning, calls, schemas=tools, prompt_ends_in_reasoning=begun).parse(text)

    def reset_prefix_cache(self) -> bool:
        """Forget every cached page (after a change of weights, say); texts that run go on. Returns whether it did."""
        return self.engine.reset_prefix_cache()

    def chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., tqdm] = True,
        *,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generate the next message of one conversation, or of each in a list.

        Args:
            messages: A list of ``{"role": …, "content": …}``, or a list of such lists.
            sampling_params: As in ``generate``.
            use_tqdm: As in ``generate``.
            chat_template: A Jinja template in place of the model's.
            chat_template_content_format: What it sees of contents: ``string``, ``openai`` (lists of parts), ``auto``.
            add_generation_prompt: End the prompt where the assistant's message begins.
            continue_final_message: Leave the last message open, to be continued.
            tools: Passed to the template.
            chat_template_kwargs: Further variables for the template.
            priority: As in ``generate``.
        """
        inputs = chat_prompts(
            self._started.tokenizer,
            messages,
            sampling_params,
            chat_template=self._chat_template if chat_template is None else read_template(chat_template),
            chat_template_content_format=chat_template_content_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self._runner.run(inputs, priorities_for_each(priority, len(inputs)), use_tqdm)

    def stream(
        self, prompt: Any, sampling_params: SamplingParams | None = None
    ) -> Generator[RequestOutput, None, None]:
        """Generate text for one prompt: outputs of the kind it asks for as they come. Closing it ends the request."""
        inputs = parse_prompts(prompt, sampling_params)
        if len(inputs) != 1:
            raise RequestError(f"stream takes one prompt, got {len(inputs)}")
        return self._runner.stream(inputs[0])
