"""Classes that do not run are refused with the reason and the nearest that does, before a file of weights is opened."""

import re
from typing import Any

import pytest

from jaxserve.api.errors import UnsupportedModelError
from jaxserve.models.refused import REFUSED
from jaxserve.models.registry import config_from_hf, supported_architectures

SAID = {
    "Phi4MMForCausalLM": "Phi-4-mini (Phi3ForCausalLM), which is the nearest; Phi4MMForCausalLM needs images and audio",
    "WhisperForConditionalGeneration": "Qwen2.5-7B (Qwen2ForCausalLM), which is the nearest; .* needs audio",
    "Qwen2_5OmniThinkerForConditionalGeneration": "Qwen2.5-7B (Qwen2ForCausalLM), .* needs images and audio",
    "GlmOcrForConditionalGeneration": "GLM-4-9B-0414 (Glm4ForCausalLM), .* needs images",
    "MllamaForConditionalGeneration": "Llama 3.1 8B (LlamaForCausalLM), .* needs images",
    "LLaDAModelLM": "Llama 3.1 8B (LlamaForCausalLM), .* generates text by diffusion",
    "XLMRobertaForMaskedLM": "Qwen3-Embedding-0.6B (Qwen3ForCausalLM), .* is an encoder",
    "T5ForConditionalGeneration": "the language model of Gemma 3 (.*), .* has an encoder beside the decoder",
    "MambaForCausalLM": "Mistral 7B (MistralForCausalLM), .* has recurrent layers",
    "JambaForCausalLM": "Mixtral 8x7B (MixtralForCausalLM), .* has recurrent layers",
    "ChatGLMModel": "GLM-4-9B (GlmForCausalLM), .* is defined by code in the checkpoint, which is never run",
    "QWenLMHeadModel": "Qwen2.5-7B (Qwen2ForCausalLM), .* is defined by code in the checkpoint",
    "Qwen3ForSequenceClassification": "Qwen3ForCausalLM, the same model with an output head for tokens",
}


def refused(**fields: Any) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        config_from_hf(fields, "config.json")
    return str(caught.value)


@pytest.mark.parametrize("name", SAID)
def test_the_reason_and_the_nearest_are_said(name: str) -> None:
    text = SAID[name].replace("(", r"\(").replace(")", r"\)")
    assert re.fullmatch(
        f"config.json: architecture {name} is not supported; supported: {text}.*", refused(architectures=[name])
    )


def test_names_that_nobody_knows_get_the_list() -> None:
    listed = f"supported: {', '.join(supported_architectures())}"
    assert refused(architectures=["LlamaForCasualLM"]).endswith(f"{listed}; did you mean LlamaForCausalLM?")
    assert refused(architectures=["SomeForCausalLM"]).endswith(listed)
    text = refused(architectures=["SomeForCausalLM"], auto_map={"AutoModelForCausalLM": "modeling.Some"})
    assert text.endswith(f"{listed}; code in the checkpoint (auto_map) is never run")


def test_the_nearest_run_and_the_refused_do_not() -> None:
    known = supported_architectures()
    names = [name for each in REFUSED for name in each.names]
    assert len({*names}) == len(names)
    for each in REFUSED:
        assert any(f"({name})" in each.nearest for name in known), each.nearest
    endings = ("", "ForCausalLM", "ForConditionalGeneration", "Model", "LMHeadModel")
    assert not {name + ending for name in names for ending in endings} & {*known}
