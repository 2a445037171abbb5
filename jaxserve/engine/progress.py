"""vLLM's progress bar."""

from collections.abc import Callable

from tqdm import tqdm

from jaxserve.engine.request_state import RequestState


class ProgressBar:
    """Finished samples, and tokens per second of finished requests; nothing if ``use_tqdm`` is False."""

    def __init__(self, requests: list[RequestState], use_tqdm: bool | Callable[..., tqdm]):
        self._bar = None
        self._num_input = self._num_output = 0
        if use_tqdm:
            make = tqdm if use_tqdm is True else use_tqdm
            total = sum(len(request.samples) for request in requests)
            self._bar = make(
                total=total,
                desc="Processed prompts",
                dynamic_ncols=True,
                postfix="est. speed input: 0.00 toks/s, output: 0.00 toks/s",
            )

    def update(self, request: RequestState) -> None:
        """Counts a finished request."""
        if self._bar is None:
            return
        count = len(request.samples)
        self._num_input += len(request.prompt_token_ids) * count
        self._num_output += sum(sample.sequence.num_output_tokens for sample in request.samples)
        elapsed = max(self._bar.format_dict["elapsed"], 1e-9)
        self._bar.postfix = (
            f"est. speed input: {self._num_input / elapsed:.2f} toks/s, output: {self._num_output / elapsed:.2f} toks/s"
        )
        self._bar.update(count)

    def close(self) -> None:
        """Leaves the bar as it is."""
        if self._bar is not None:
            self._bar.close()
