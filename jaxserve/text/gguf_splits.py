"""How GGUF's tokenizers split text into words before they merge bytes: the files only name it (``tokenizer.ggml.pre``).

Each name stands for expressions that split one after the other: what matches becomes a word, and so does what lies
between. They are those of the original tokenizers (``tokenizer.json``), as llama.cpp lists them in
``src/llama-vocab.cpp``.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple


class Splitting(NamedTuple):
    """How one kind of tokenizer prepares text.

    Attributes:
        patterns: The expressions, in order.
        normalizes: Whether text is first put in Unicode's composed form (NFC).
        ignores_merges: Whether a word that is a token is not split, whatever the merges say.
        adds_bos: Whether a prompt begins with BOS if the file does not say.
    """

    patterns: tuple[str, ...]
    normalizes: bool = False
    ignores_merges: bool = False
    adds_bos: bool = False


_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_REST: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3: Final = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2: Final = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_REST: Final = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _by_case(end: str, numbers: str) -> str:
    """Return an expression of words that begin with capitals or have only these, each with an optional ending."""
    start = r"[^\r\n\p{L}\p{N}]?"
    words = (f"{start}{_UPPER}*{_LOWER}+{end}", f"{start}{_UPPER}+{_LOWER}*{end}")
    return "|".join((*words, numbers, _CASED_REST))


_DEEPSEEK3: Final = (
    r"\p{N}{1,3}",
    r"[\x{4e00}-\x{9fa5}\x{3040}-\x{309f}\x{30a0}-\x{30ff}]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_ASIAN: Final = r"[\x{4e00}-\x{9fa5}\x{0800}-\x{4e00}\x{ac00}-\x{d7ff}]+"
_DEEPSEEK_CODER: Final = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _ASIAN, r"\p{N}")
_CASED_LETTERS: Final = (
    r"[A-Za-z\x{b5}\x{c0}-\x{d6}\x{d8}-\x{f6}\x{f8}-\x{1ba}\x{1bc}-\x{1bf}\x{1c4}-\x{293}\x{295}-"
    r"\x{2af}\x{370}-\x{373}\x{376}\x{377}\x{37b}-\x{37d}\x{37f}\x{386}\x{388}-\x{38a}\x{38c}\x{38e}-"
    r"\x{3a1}\x{3a3}-\x{3f5}\x{3f7}-\x{481}\x{48a}-\x{52f}\x{531}-\x{556}\x{10a0}-\x{10c5}\x{13a0}-"
    r"\x{13f5}\x{13f8}-\x{13fd}\x{1c90}-\x{1cba}\x{1cbd}-\x{1cbf}\x{1d00}-\x{1d2b}\x{1d6b}-\x{1d77}\x{1d79}-"
    r"\x{1d9a}\x{1e00}-\x{1f15}\x{1f18}-\x{1f1d}\x{1f20}-\x{1f45}\x{1f48}-\x{1f4d}\x{1f50}-"
    r"\x{1f57}\x{1f59}\x{1f5b}\x{1f5d}\x{1f5f}-\x{1f7d}\x{1f80}-\x{1fb4}\x{1fb6}-\x{1fbc}\x{1fbe}\x{1fc2}-"
    r"\x{1fc4}\x{1fc6}-\x{1fcc}\x{1fd0}-\x{1fd3}\x{1fd6}-\x{1fdb}\x{1fe0}-\x{1fec}\x{1ff2}-\x{1ff4}\x{1ff6}-"
    r"\x{1ffc}\x{2102}\x{2107}\x{210a}-\x{2113}\x{2115}\x{2119}-\x{211d}\x{2124}\x{2126}\x{2128}\x{212a}-"
    r"\x{212d}\x{212f}-\x{2134}\x{2139}\x{213c}-\x{213f}\x{2145}-\x{2149}\x{214e}\x{2183}\x{2184}\x{2c00}-"
    r"\x{2c7b}\x{2c7e}-\x{2ce4}\x{2ceb}-\x{2cee}\x{2cf2}\x{2cf3}\x{a640}-\x{a66d}\x{a680}-\x{a69b}\x{a722}-"
    r"\x{a76f}\x{a771}-\x{a787}\x{a78b}-\x{a78e}\x{ab70}-\x{abbf}\x{fb00}-\x{fb06}\x{fb13}-\x{fb17}\x{ff21}-"
    r"\x{ff3a}\x{ff41}-\x{ff5a}\x{10400}-\x{1044f}\x{104b0}-\x{104d3}\x{104d8}-\x{104fb}\x{10c80}-"
    r"\x{10cb2}\x{10cc0}-\x{10cf2}\x{118a0}-\x{118df}\x{1e900}-\x{1e943}]"
)
"""Letters that have a case."""
_DEEPSEEK_LLM: Final = (
    r"[\r\n]",
    rf"\s?{_CASED_LETTERS}+",
    r"\s?[!-/:-~\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}\x{3000}-\x{3002}]+",
    r"\s+$",
    _ASIAN,
    r"\p{N}+",
)

_HAN_OR_NOT: Final = r"&&[^\p{Han}]]"
_KIMI: Final = (
    r"\p{Han}+|"
    + _by_case(f"{_CONTRACTIONS}?", r"\p{N}{1,3}")
    .replace(_UPPER, f"{_UPPER[:-1]}{_HAN_OR_NOT}")
    .replace(_LOWER, f"{_LOWER[:-1]}{_HAN_OR_NOT}")
    .replace(_CASED_REST, _REST),
)
"""Words of Chinese characters alone; other words as GPT-4o's, without such characters."""
_YOUTU: Final = (
    r"[\x{ac00}-\x{d7a3}\x{3131}-\x{318e}]+"
    r"|[\x{ff01}\x{2026}\x{201c}\x{201d}\x{2018}\x{2019}\x{2014}\x{ff1a}\x{ff1b}\x{ff0c}\x{3001}-\x{303f}\x{fe30}-\x{fe4f}]+"
    r"|[\x{3105}-\x{312f}]+|[\x{4e00}-\x{9fa5}\x{3040}-\x{309f}\x{30a0}-\x{30ff}]+",
    _by_case(f"{_CONTRACTIONS}?", r"\p{N}"),
)
_SEED: Final = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_BY_GPT2: Final = Splitting((_GPT2,))
_BY_DIGIT: Final = Splitting((r"\p{N}", _GPT2))
_BY_LLAMA3: Final = Splitting((_LLAMA3,), ignores_merges=True, adds_bos=True)
_BY_QWEN2: Final = Splitting((_QWEN2,), normalizes=True)
_BY_O200K: Final = Splitting((_by_case(f"{_CONTRACTIONS}?", r"\p{N}{1,3}"),))

SPLITTINGS: Final[Mapping[str, Splitting]] = {
    "a.x-4.0": _BY_GPT2,
    "codeshell": _BY_DIGIT,
    "command-r": _BY_DIGIT,
    "dbrx": Splitting((_LLAMA3,)),
    "deepseek-coder": Splitting(_DEEPSEEK_CODER),
    "deepseek-llm": Splitting(_DEEPSEEK_LLM),
    "deepseek-r1-qwen": _BY_QWEN2,
    "deepseek-v3": Splitting(_DEEPSEEK3),
    "exaone": _BY_DIGIT,
    "exaone4": _BY_GPT2,
    "falcon": Splitting((r"[\p{P}$+<=>^~|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "falcon-h1": _BY_LLAMA3,
    "falcon3": _BY_LLAMA3,
    "gigachat": _BY_GPT2,
    "gpt-2": _BY_GPT2,
    "gpt-4o": _BY_O200K,
    "granite-docling": _BY_GPT2,
    "hunyuan-dense": Splitting(_DEEPSEEK3),
    "jais": _BY_GPT2,
    "joyai-llm": Splitting(_DEEPSEEK3),
    "kimi-k2": Splitting(_KIMI),
    "lfm2": _BY_LLAMA3,
    "llama-bpe": _BY_LLAMA3,
    "llama-v3": _BY_LLAMA3,
    "llama3": _BY_LLAMA3,
    "llama4": _BY_O200K,
    "megrez": _BY_QWEN2,
    "mellum": _BY_GPT2,
    "midm-2.0": _BY_LLAMA3,
    "minerva-7b": _BY_DIGIT,
    "mpt": Splitting((_GPT2,), normalizes=True),
    "olmo": Splitting((_GPT2,), normalizes=True),
    "phi-2": _BY_GPT2,
    "pixtral": _BY_LLAMA3,
    "qwen2": _BY_QWEN2,
    "refact": _BY_DIGIT,
    "seed-coder": Splitting((_SEED,)),
    "smaug-bpe": Splitting((_LLAMA3,)),
    "smollm": _BY_DIGIT,
    "stablelm2": _BY_QWEN2,
    "starcoder": _BY_DIGIT,
    "tekken": Splitting((_by_case("", r"\p{N}"),), ignores_merges=True, adds_bos=True),
    "trillion": _BY_GPT2,
    "youtu": Splitting(_YOUTU, ignores_merges=True),
}
"""By the name in the file."""
