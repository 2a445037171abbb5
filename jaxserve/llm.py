"""The Python API: ``LLM``, with vLLM's names."""

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int
from tqdm import tqdm

from jaxserve.api.config import EngineConfig
from jaxserve.api.errors import ConfigError, RequestError
from jaxserve.api.outputs import BeamSearchOutput, EmbeddingRequestOutput, PoolingRequestOutput, RequestOutput
from jaxserve.api.pooling_params import PoolingParams, check_pooling_task
from jaxserve.api.request import parse_prompts
from jaxserve.api.sampling_params import BeamSearchParams, SamplingParams
from jaxserve.device.build import EnginePlan
from jaxserve.engine.beam_search import BeamSearch
from jaxserve.engine.calls import Calls
from jaxserve.engine.resharding import ReshardReport
from jaxserve.parsers import MessageParser, ParsedMessage, ends_in_line, starts_in_reasoning
from jaxserve.running_model import RunningModel
from jaxserve.text.chat_prompt import chat_prompts, read_template
from sharding import ShardingLayout


class LLM(RunningModel):
    """A model that generates text.

    A thread of its own steps the model while calls wait for it. Threads may share it: their calls run in the same
    steps. Ctrl-C, an alarm or a progress bar that raises ends the call in progress and its requests, and the next call
    is as if nothing had been.

    Args:
        model: Directory, ``.gguf`` file, hub id, or ``demo`` for the model included in the package.
        **arguments: Settings with vLLM's names; see ``EngineConfig``.

    Raises:
        ConfigError: A setting is unknown or unsupported, or the model is not supported or does not fit into memory.
        CheckpointError: The checkpoint cannot be read.

    Example:
        >>> with LLM("demo") as llm:
        ...     print(llm.generate("12+30=", SamplingParams(temperature=0))[0].outputs[0].text)
    """

    def __init__(self, model: str, **arguments: Any):
        super().__init__(EngineConfig.from_arguments(model, **arguments))
        self._calls = Calls(self._loop, self.engine.prepare, not self.config.disable_log_stats)

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the devices' memory, after the current step. Calls in progress then fail."""
        self._loop.check_outside()
        self._stop()

    @property
    def _is_on_demand(self) -> bool:
        return True

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self._started.plan.config.vocab_size

    @property
    def plan(self) -> EnginePlan:
        """Memory plan and shapes of the engine."""
        return self._started.plan

    @property
    def load_s(self) -> float:
        """Seconds spent loading weights at start-up."""
        return self._started.load_s

    @property
    def compile_s(self) -> float:
        """Seconds spent tracing and compiling at start-up, partly overlapping with loading."""
        return self._started.compile_s

    def expert_load(self) -> Int[np.ndarray, "layers E"]:
        """Return the number of tokens that each expert of each layer with experts has computed so far.

        Raises:
            ConfigError: The engine does not count them.
        """
        if self.engine.expert_load is None:
            raise ConfigError("expert_load needs an engine that counts tokens; set expert_load_metrics=1")
        return self.engine.expert_load.total()

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., tqdm] = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generate completions of all prompts in one batch.

        Args:
            prompts: A string, a list of token ids, ``{"prompt": …}``, ``{"prompt_token_ids": …}``, or a list of those.
            sampling_params: For all prompts, or one for each; None uses the model's defaults.
            use_tqdm: Whether to show a progress bar, or a function that creates it.
            priority: One number per prompt, the lowest run first; needs ``scheduling_policy="priority"``.

        Returns:
            Outputs in the order of the prompts.

        Raises:
            RequestError: An invalid prompt or parameter; the message names its index. No request has run.
        """
        requests = parse_prompts(prompts, sampling_params, self._started.default_params, priority)
        return self._calls.run(requests, use_tqdm)

    def embed(
        self,
        prompts: Any,
        *,
        use_tqdm: bool | Callable[..., tqdm] = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Embed each prompt, using the model's last hidden states, in one batch.

        Args:
            prompts: As in ``generate``; up to the whole context long.
            use_tqdm: As in ``generate``.
            pooling_params: For all prompts, or one for each; None uses the last token's state, scaled to length 1.
            priority: As in ``generate``.

        Returns:
            Outputs in the order of the prompts; the vector is ``outputs.embedding``.

        Raises:
            RequestError: An invalid prompt or parameter; the message names its index. No request has run.
            RequestFailedError: A vector has non-finite values.
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
        """Embed prompts as ``embed``, with the vector in ``outputs.data``; ``embed`` is the only ``pooling_task``."""
        check_pooling_task(pooling_task)
        return self._calls.pool(parse_prompts(prompts, pooling_params, PoolingParams(), priority), use_tqdm)

    def beam_search(
        self, prompts: Any, params: BeamSearchParams, *, use_tqdm: bool = False, concurrency_limit: int | None = None
    ) -> list[BeamSearchOutput]:
        """Search the most likely completions of each prompt.

        Args:
            prompts: As in ``generate``.
            params: Beam width, length and scoring.
            use_tqdm: Whether to show a progress bar.
            concurrency_limit: Largest number of prompts searched at the same time; None for all.

        Returns:
            For each prompt up to ``beam_width`` sequences, best first; their tokens include the prompt's.
        """
        return BeamSearch(self.engine, self._calls.run, params).run(parse_prompts(prompts), use_tqdm, concurrency_limit)

    def parse_message(
        self, text: str, tools: Sequence[Mapping[str, Any]] | None = None, *, prompt: str = ""
    ) -> ParsedMessage:
        """Parse a completion into reasoning, content and tool calls.

        Args:
            text: The completion, generated with ``skip_special_tokens=False`` if the model's markers are special
                tokens, as those of GPT-OSS are.
            tools: The offered tools with their JSON schemas, which formats without types need.
            prompt: The text before the completion, which may open the reasoning.

        Raises:
            ConfigError: The engine has neither ``reasoning_parser`` nor ``tool_call_parser``.
        """
        reasoning, calls = self._started.parsers.reasoning, self._started.parsers.tools
        if reasoning is None and calls is None:
            raise ConfigError("parse_message needs an engine with reasoning_parser or tool_call_parser set")
        begun = None if reasoning is None else starts_in_reasoning(prompt, reasoning)
        is_in_line = reasoning is not None and ends_in_line(prompt, reasoning)
        return MessageParser(
            reasoning, calls, schemas=tools, prompt_ends_in_reasoning=begun, prompt_ends_in_line=is_in_line
        ).parse(text)

    def reset_prefix_cache(self) -> bool:
        """Clear the prefix cache, for example after changing weights; running requests continue. Returns whether it
        was cleared."""
        return self._loop.run(self.engine.reset_prefix_cache)

    def reshard(self, mesh: str | None = None, layout: str | ShardingLayout | None = None) -> ReshardReport:
        """Move the running engine to other devices or another layout; requests and streams continue.

        The prefix cache, running and waiting requests and the weights, with all changes since loading, are kept.

        Args:
            mesh: Devices along each axis, such as ``data=2,tensor=2``; None keeps the mesh.
            layout: A layout, as in ``EngineConfig``; None keeps it.

        Raises:
            ConfigError: The mesh or layout is not valid for the model.
            MeshError: There are too few devices.
            LayoutError: The layout is unknown, or contradicts itself.
            MemoryPlanError: The weights and pages do not fit, or not during the move.
            EngineDeadError: The move failed, and the engine has stopped. After any other error it continues as it was.
        """
        self._loop.check_outside()
        return self._resharder.reshard(mesh, layout, self._loop.run, self._loop.deliver)

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
            chat_template: A Jinja template that replaces the model's.
            chat_template_content_format: Form of message contents in the template: ``string``, ``openai`` (lists of
                parts), or ``auto``.
            add_generation_prompt: End the prompt with the start of the assistant's message.
            continue_final_message: Continue the last message instead of starting a new one.
            tools: Tools for the template.
            chat_template_kwargs: Further variables of the template.
            priority: As in ``generate``.
        """
        requests = chat_prompts(
            self._started.tokenizer,
            self._renderer,
            messages,
            sampling_params,
            self._started.default_params,
            priority,
            chat_template=self._chat_template if chat_template is None else read_template(chat_template),
            chat_template_content_format=chat_template_content_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            finds_generation_prompt=self._started.has_states,
        )
        return self._calls.run(requests, use_tqdm)

    def stream(
        self, prompt: Any, sampling_params: SamplingParams | None = None
    ) -> Generator[RequestOutput, None, None]:
        """Generate a completion of one prompt and yield outputs as they come. Closing the generator aborts the
        request."""
        requests = parse_prompts(prompt, sampling_params, self._started.default_params)
        if len(requests) != 1:
            raise RequestError(f"LLM.stream takes one prompt, got {len(requests)}; call it once for each")
        return self._calls.stream(requests[0])
