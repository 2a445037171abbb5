"""Model classes that do not run, with the reason and the nearest model that does."""

import re
from collections.abc import Sequence
from typing import Final, NamedTuple


class Refused(NamedTuple):
    """Classes that do not run for one reason.

    Attributes:
        reason: What they need or have, after their name.
        nearest: The nearest model that runs, with its class.
        names: Names of the classes without what they compute (``ForCausalLM``, ``Model``).
    """

    reason: str
    nearest: str
    names: tuple[str, ...]


_IMAGES: Final = "needs images"
_AUDIO: Final = "needs audio"
_ALL_MEDIA: Final = "needs images and audio"
_ENCODER: Final = "is an encoder, which generates no text"
_ENCODER_DECODER: Final = "has an encoder beside the decoder"
_RECURRENT: Final = "has recurrent layers"
_REMOTE: Final = "is defined by code in the checkpoint, which is never run"
_DIFFUSION: Final = "generates text by diffusion, not token by token"
_POSITIONS: Final = "has no rotary embedding but biases of the scores by distance (ALiBi)"

_QWEN3: Final = "Qwen3-8B (Qwen3ForCausalLM)"
_QWEN3_MOE: Final = "Qwen3-30B-A3B (Qwen3MoeForCausalLM)"
_QWEN25: Final = "Qwen2.5-7B (Qwen2ForCausalLM)"
_QWEN3_VL: Final = "the language model of Qwen3-VL (Qwen3VLForConditionalGeneration)"
_GEMMA3: Final = "the language model of Gemma 3 (Gemma3ForConditionalGeneration)"
_GLM4: Final = "GLM-4-9B (GlmForCausalLM)"
_LLAMA: Final = "Llama 3.1 8B (LlamaForCausalLM)"
_LLAMA2: Final = "Llama 2 7B (LlamaForCausalLM)"
_MISTRAL: Final = "Mistral 7B (MistralForCausalLM)"
_EMBEDDING: Final = "Qwen3-Embedding-0.6B (Qwen3ForCausalLM)"

REFUSED: Final = (
    Refused(_IMAGES, _LLAMA, ("Mllama", "VipLlava")),
    Refused(_IMAGES, "GLM-4-9B-0414 (Glm4ForCausalLM)", ("GlmOcr",)),
    Refused(_IMAGES, _GEMMA3, ("PaliGemma",)),
    Refused(_IMAGES, "SmolLM3 (SmolLM3ForCausalLM)", ("SmolVLM", "Idefics", "Idefics2", "Idefics3")),
    Refused(_IMAGES, "Command R7B (Cohere2ForCausalLM)", ("AyaVision", "Cohere2Vision")),
    Refused(_IMAGES, "ERNIE 4.5 (Ernie4_5_MoeForCausalLM)", ("Ernie4_5_VLMoe", "PaddleOCRVL")),
    Refused(_IMAGES, "Hunyuan 7B (HunYuanDenseV1ForCausalLM)", ("HunYuanVL",)),
    Refused(_IMAGES, "Phi-3.5-mini (Phi3ForCausalLM)", ("Phi3V",)),
    Refused(_IMAGES, "Granite 4.0 (GraniteMoeHybridForCausalLM)", ("Granite4Vision", "GraniteDocling")),
    Refused(_IMAGES, "DeepSeek-V3 (DeepseekV3ForCausalLM)", ("DeepseekVLV2", "DeepseekOCR", "DeepseekOcr2", "KimiVL")),
    Refused(
        _IMAGES,
        _QWEN3_VL,
        ("LlavaOnevision2", "VideoLlama3", "VideoLlava", "Ovis", "Ovis2")
        + ("Molmo", "Molmo2", "MiniCPMV", "MiniCPMO", "GotOcr2", "Janus", "Aria", "Chameleon", "Emu3", "FastVlm")
        + ("Fuyu", "Blip2", "InstructBlip", "Kosmos2", "PerceptionLM", "DotsOCR", "VisionEncoderDecoder"),
    ),
    Refused(
        f"{_IMAGES} and code in the checkpoint, which is never run",
        "the language model of InternVL in the form of transformers (InternVLForConditionalGeneration)",
        ("InternVLChat",),
    ),
    Refused(_ALL_MEDIA, "Phi-4-mini (Phi3ForCausalLM)", ("Phi4MM", "Phi4Multimodal")),
    Refused(_ALL_MEDIA, "the language model of Gemma 4 (Gemma4ForConditionalGeneration)", ("Gemma3n",)),
    Refused(_ALL_MEDIA, _QWEN25, ("Qwen2_5Omni", "Qwen2_5OmniThinker")),
    Refused(_ALL_MEDIA, _QWEN3_MOE, ("Qwen3OmniMoe", "Qwen3OmniMoeThinker")),
    Refused(_AUDIO, _QWEN25, ("Qwen2Audio", "AudioFlamingo3", "Ultravox", "Whisper", "Moonshine", "Speech2Text")),
    Refused(_AUDIO, _QWEN3, ("Qwen3ASR", "SpeechT5", "SeamlessM4T", "SeamlessM4Tv2", "Dia", "Moshi")),
    Refused(_AUDIO, "the language model of Mistral Small 3.2 (Mistral3ForConditionalGeneration)", ("Voxtral",)),
    Refused(_AUDIO, "Granite 3.1 (GraniteForCausalLM)", ("GraniteSpeech", "GraniteSpeechPlus")),
    Refused(
        _ENCODER,
        _EMBEDDING,
        ("Bert", "Roberta", "XLMRoberta", "XLMRobertaXL", "ModernBert", "DistilBert", "Deberta", "DebertaV2", "Electra")
        + ("Albert", "Camembert", "MPNet", "NomicBert", "EuroBert", "Longformer", "Gte", "New", "JinaBert", "ColBERT")
        + ("JinaEmbeddingsV3", "CLIP", "Siglip"),
    ),
    Refused(
        _ENCODER_DECODER,
        _GEMMA3,
        ("T5", "MT5", "UMT5", "LongT5", "T5Gemma", "T5Gemma2", "SwitchTransformers", "Bart", "MBart", "Pegasus")
        + ("Marian", "MarianMT", "M2M100", "NllbMoe", "LED", "Blenderbot", "EncoderDecoder", "ProphetNet"),
    ),
    Refused(_RECURRENT, _MISTRAL, ("Mamba", "FalconMamba", "Rwkv", "RWKV", "Rwkv5", "Rwkv6", "RWKV7", "xLSTM")),
    Refused(_RECURRENT, "Mixtral 8x7B (MixtralForCausalLM)", ("Jamba", "MiniMax", "MiniMaxText01", "MiniMaxM1")),
    Refused(_RECURRENT, _QWEN3, ("Lfm2Vl", "OlmoHybrid")),
    Refused(_RECURRENT, _LLAMA, ("Zamba", "Zamba2")),
    Refused(_RECURRENT, "Gemma 2 (Gemma2ForCausalLM)", ("RecurrentGemma",)),
    Refused(_DIFFUSION, _LLAMA, ("LLaDA", "LLaDAModelLM", "LLaDAMoEModelLM", "LLaDA2MoeModelLM")),
    Refused(_DIFFUSION, _QWEN25, ("Dream", "SDAR")),
    Refused(_DIFFUSION, _GEMMA3, ("DiffusionGemma",)),
    Refused(_REMOTE, _GLM4, ("ChatGLM",)),
    Refused(_REMOTE, "EXAONE 4 (Exaone4ForCausalLM)", ("Exaone",)),
    Refused(_REMOTE, "Hunyuan A13B (HunYuanMoEV1ForCausalLM)", ("HunYuan",)),
    Refused(_REMOTE, _QWEN25, ("QWen", "InternLM", "InternLM2", "InternLM3", "InternLM2VE", "Orion", "MiniCPM")),
    Refused(_REMOTE, _LLAMA2, ("Aquila", "Xverse", "Skywork", "DeciLM")),
    Refused(_POSITIONS, _LLAMA2, ("MPT", "Mpt", "Bloom", "RW")),
)


def refusal(architecture: str) -> Refused | None:
    """Return why a class does not run, and the nearest model that does; None if nothing is known of it."""
    stem = re.sub(r"(For[A-Z]\w*|LMHeadModel|Model)$", "", architecture)
    return next((each for each in REFUSED if stem in each.names or architecture in each.names), None)


def other_class(architecture: str, supported: Sequence[str]) -> str | None:
    """Return the supported class of the same family as a classifier or a reward model; None for other classes."""
    found = re.fullmatch(r"(\w+)For(\w*Classification|QuestionAnswering|\w*RewardModel)", architecture)
    names = [f"{found[1]}ForCausalLM", f"{found[1]}LMHeadModel"] if found else []
    return next((name for name in names if name in supported), None)
