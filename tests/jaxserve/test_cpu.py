"""What is read of a CPU."""

from pathlib import Path

import pytest

from jaxserve.layers.cpu import cpu_key, has_bfloat16_products


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model name\t: Zen 4\nflags\t\t: fpu avx512f avx512_bf16 vnni\n", True),
        ("model name\t: Zen 2\nflags\t\t: fpu avx2\n", False),
        ("Features\t: fp asimd bf16 i8mm\n", True),
        ("", False),
    ],
)
def test_bfloat16_products(tmp_path: Path, text: str, expected: bool) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(text)
    assert has_bfloat16_products(cpuinfo) is expected


def test_a_system_without_cpuinfo(tmp_path: Path) -> None:
    assert not has_bfloat16_products(tmp_path / "absent")


def test_the_key_follows_the_features_not_the_number_of_cores(tmp_path: Path) -> None:
    core = "processor\t: {}\nmodel name\t: Zen 2\nflags\t\t: fpu {}\n"
    keys = []
    for text in (core.format(0, "avx2"), core.format(0, "avx2") + core.format(1, "avx2"), core.format(0, "avx512f")):
        cpuinfo = tmp_path / "cpuinfo"
        cpuinfo.write_text(text)
        keys.append(cpu_key(cpuinfo))
    assert keys[0] == keys[1] != keys[2]
