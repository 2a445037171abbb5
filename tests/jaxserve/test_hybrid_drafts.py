"""Models on the device draft for families with recurrent layers: answers are those without, whatever is rejected.

A test puts known tokens in the place of drafts, some of them wrong, so that rows go back in the middle of a state.
"""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from jaxserve import LLM, SamplingParams
from jaxserve.api.request import parse_prompt
from jaxserve.device.runner import LocalRunner
from jaxserve.device.step_batch import LatestTokens
from jaxserve.scheduling.plan import StepPlan
from tests.jaxserve import test_hybrids as hybrids
from tests.jaxserve import test_models as models
from tests.jaxserve.test_hybrids import METRICS, chosen_logprobs, settings_of
from tests.jaxserve.test_lanes import schedulers, tokens
from tests.random_checkpoint import LLAMA, write_checkpoint

torch = pytest.importorskip("torch")

NUM_DRAFTS = 3
PARAMS = SamplingParams(temperature=0.0, max_tokens=30, logprobs=1)
Check = Callable[[list[int], list[int]], None]
"""Receives the tokens of a sequence and the drafts that the device has made after them."""
DRAFTED = [("qwen3-5", "tp1"), ("lfm2", "pp2"), ("falcon-h1", "tp2"), ("mamba2", "tp1"), ("nemotron-h", "context2")]
DRAFTED += [("kimi-linear", "ep2")]
MTP = [("qwen3-5", "tp1"), ("qwen3-next", "tp2"), ("qwen3-5-moe", "pp2")]


def make(name: str, directory: Path) -> Any:
    """Write a row's checkpoint; return transformers' model."""
    torch.set_num_threads(1)
    row = hybrids.ROWS[name]
    model = hybrids.make_hf(row)
    models.save(model, row, directory)
    return model


def speculation(method: str, **others: Any) -> dict[str, Any]:
    number = {"num_speculative_tokens": NUM_DRAFTS, "enable_adaptive_verification": False}
    return {"speculative_config": {"method": method, **number, **others}, "max_num_batched_tokens": 24}


def mistaken(latest: LatestTokens, texts: dict[int, list[int]]) -> LatestTokens:
    """The latest tokens with known drafts after those of each slot with a text, every third of them wrong."""
    assert latest.drafts is not None
    drafts, positions, last = np.array(latest.drafts), np.asarray(latest.positions), np.asarray(latest.token_ids)
    for slot, text in texts.items():
        position = int(positions[slot])
        if position < len(text) and text[position] == last[slot]:
            following = enumerate([*text, *[0] * NUM_DRAFTS][position + 1 : position + 1 + NUM_DRAFTS], position + 1)
            drafts[slot] = [token if at % 3 else max(token - 1, 0) for at, token in following]
    return latest._replace(drafts=jax.device_put(drafts, latest.drafts.sharding))


def run_with_mistakes(llm: LLM, prompts: list[list[int]], texts: list[list[int]], check: Check | None) -> list[Any]:
    """Outputs of prompts whose drafts are known texts, with every third token wrong."""
    requests = [llm.engine.submit(parse_prompt({"prompt_token_ids": prompt}, PARAMS)) for prompt in prompts]
    (replica,), (scheduler,) = llm.engine.replicas, schedulers(llm)
    assert isinstance(replica.runner, LocalRunner)
    stage, pipeline = replica.runner._stages[-1], replica.runner._pipeline

    def replace() -> None:
        texts_of = {
            sequence.slot: text
            for sequence in scheduler.running
            for text in texts
            if text[: sequence.num_prompt_tokens] == sequence.token_ids[: sequence.num_prompt_tokens]
        }
        stage.state = stage.state._replace(latest=mistaken(stage.state.latest, texts_of))

    if pipeline is not None:  # which copies them to the other stages
        send_back = pipeline.send_back

        def send_mistakes(plans: Sequence[StepPlan], latest: LatestTokens | None) -> None:
            assert latest is stage.state.latest
            replace()
            send_back(plans, stage.state.latest)

        pipeline.send_back = send_mistakes
    while llm.engine.num_unfinished or replica.has_steps_in_flight:
        llm.engine.step()
        if pipeline is not None:
            continue
        drafts = np.array(stage.state.latest.drafts)
        for sequence in scheduler.running:
            num_known, is_last = len(sequence.token_ids), sequence.max_length - NUM_DRAFTS
            if check is not None and sequence.num_prompt_tokens < num_known < is_last and not sequence.num_pending:
                check(sequence.token_ids, drafts[sequence.slot].tolist())
        replace()
    if pipeline is not None:
        del pipeline.send_back
    assert all(len(tokens(request)) == PARAMS.max_tokens for request in requests)
    return [request.output() for request in requests]


def check_answers(
    directory: Path, layout: str, settings: dict[str, Any], check: Check | None = None, **others: Any
) -> None:
    """With drafts that are right and wrong, then with the drafter's own, cached and not: bits are those without.

    ``others`` are settings with and without drafts.
    """
    prompts = models.prompts(509)
    same = {"num_gpu_blocks_override": 99, **METRICS, **others}
    with LLM(str(directory), **settings_of(layout, **same)) as llm:
        is_exact = llm.plan.models[0].kernel.name == "native"
        expected = llm.generate(prompts, PARAMS, use_tqdm=False)
        texts = [[*prompt, *each.outputs[0].token_ids] for prompt, each in zip(prompts, expected, strict=True)]
        longer = [[*text[:-5], 3] for text in texts]
        after = llm.generate(longer, PARAMS, use_tqdm=False)
    with LLM(str(directory), **settings_of(layout, **same, **settings)) as llm:
        found = run_with_mistakes(llm, prompts, texts, check)
        counts = {metric.name.partition("num_")[2]: metric.value for metric in llm.get_metrics() if not metric.labels}
        also = llm.generate(longer, PARAMS, use_tqdm=False)
        again = llm.generate(prompts, PARAMS, use_tqdm=False)
    assert 10 < counts["accepted_tokens"] < counts["draft_tokens"] - 10
    assert any(each.num_cached_tokens for each in also)
    for one, other in zip([*found, *also, *again], [*expected, *after, *expected], strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        numbers, wanted = chosen_logprobs(one), chosen_logprobs(other)
        np.testing.assert_allclose(numbers, wanted, rtol=0, atol=0 if is_exact else 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), DRAFTED)
def test_a_dense_model_drafts(name: str, layout: str, tmp_path: Path) -> None:
    make(name, tmp_path / "model")
    (tmp_path / "drafter").mkdir()
    write_checkpoint(tmp_path / "drafter", {**LLAMA, "vocab_size": 509, "max_position_embeddings": 96}, 1)
    settings = speculation("draft_model", model=str(tmp_path / "drafter"))
    check_answers(tmp_path / "model", layout, settings, **hybrids.EXACT.get(name, {}))


class Layer:
    """An MTP layer with random weights, computed with transformers' own attention layer.

    Args:
        model: The target.
    """

    def __init__(self, model: Any):
        decoder = model.model
        self.target, self.decoder, config = model, decoder, decoder.config
        torch.manual_seed(5)
        kinds = [index for index, kind in enumerate(config.layer_types) if kind == "full_attention"]
        source = decoder.layers[kinds[-1]]
        self.layer = type(source)(config, kinds[-1])
        self.fc = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.norms = [type(decoder.norm)(config.hidden_size, config.rms_norm_eps) for _ in range(3)]
        with torch.no_grad():
            for module in (self.layer, self.fc, *self.norms):
                for parameter in module.parameters():
                    scale = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.3
                    parameter.normal_(0.0, scale)

    def tensors(self) -> dict[str, Any]:
        """Its tensors by their names in checkpoints."""
        names = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
        found = {f"mtp.{name}.weight": norm.weight for name, norm in zip(names, self.norms, strict=True)}
        found["mtp.fc.weight"] = self.fc.weight
        for name, value in self.layer.state_dict().items():
            found[f"mtp.layers.0.{name}"] = value
        return {name: value.detach().contiguous().clone() for name, value in found.items()}

    @torch.no_grad()
    def drafts(self, text: tuple[int, ...]) -> list[int]:
        """The tokens that it drafts after a text."""
        final, of_embedding, of_state = self.norms
        states = self.decoder(torch.tensor([text[:-1]])).last_hidden_state[0]
        states, known, found = torch.cat([torch.zeros(1, states.shape[1]), states]), list(text), list[int]()
        for _ in range(NUM_DRAFTS):
            embedded = self.decoder.embed_tokens(torch.tensor(known))
            x = self.fc(torch.cat([of_embedding(embedded), of_state(states)], 1))[None]
            positions = torch.arange(len(known))[None]
            rotary = self.decoder.rotary_emb(x, positions)
            mask = torch.full((len(known), len(known)), float("-inf")).triu(1)[None, None]
            output = self.layer(x, position_embeddings=rotary, attention_mask=mask, position_ids=positions)
            output = final(output[0] if isinstance(output, tuple) else output)[0]
            found.append(int(self.target.lm_head(output[-1]).argmax()))
            known.append(found[-1])
            states = torch.cat([states, output[-1:]])
        return found


@pytest.mark.parametrize(
    ("name", "layout"), [MTP[0], *(pytest.param(*each, marks=pytest.mark.slow) for each in MTP[1:])]
)
def test_the_models_own_layer_drafts(name: str, layout: str, tmp_path: Path) -> None:
    """What the layer says, after whatever was rejected before."""
    model = make(name, tmp_path)
    layer, path = Layer(model), tmp_path / "model.safetensors"
    save_file({**load_file(path), **layer.tensors()}, path, metadata={"format": "pt"})
    drafts = functools.cache(layer.drafts)
    num_checked = list[int]()

    def check(known: list[int], found: list[int]) -> None:
        assert found == drafts(tuple(known))
        num_checked.append(len(known))

    check_answers(tmp_path, layout, speculation("mtp"), check)
    assert len(num_checked) > 20 or layout == "pp2"
