"""The table of quantized weights: ratios of pairs, what the table says, and the whole run in a tiny size."""

import json
from pathlib import Path

import pytest

from pallas_kernels.native_library import unavailable
from scripts.bench_quantized import main, markdown, ratio_of

PEERS = Path(__file__).resolve().parents[2] / "shared" / "bench" / "peers"
PRODUCTS = {"bf16", "int8", "int4, int8 activations", "int4, float activations"}
FIELDS = {"cold_gb_s": 10.0, "cold_us": 5.0, "cold_share": 0.9, "gop_s_512": 100.0, "times_bf16_512": 1.7}


def test_a_ratio_is_the_median_with_an_interval() -> None:
    ratio = ratio_of([(2, 1), (4, 2), (6, 2)])
    assert ratio.median == pytest.approx(2) and ratio.low < 2 < ratio.high
    same = ratio_of([(3, 1)] * 4)
    assert (same.median, same.low, same.high) == pytest.approx((3, 3, 3))


def test_the_table_names_what_is_missing() -> None:
    rows = {"A": {"ratio": ratio_of([(2, 1), (4, 2)])._asdict(), "pairs": [[2, 1], [4, 2]]}}
    found = {
        **{"size": "1b", "machine": {"cpu": "a CPU", "load": "0 0 0"}},
        "products": {"instructions": "amx", "threads": 2, "read_gb_s": 20, "clock_ghz": 3, "forms": {"int8": FIELDS}},
        "ratios": {"int8 : bfloat16": rows, "W8A8 file : vLLM, W8A8": {}},
        "rounds": [{"int8": {"A": 2}, "vLLM, W8A8": {}}, {"int8": {"A": 4}, "vLLM, W8A8": {}}],
    }
    lines = markdown(found).splitlines()
    assert "| int8 | 10.0 | 0.9 | 100.0 | 1.7 |" in lines
    assert "| int8 : bfloat16 | 2.00 (2.00 to 2.00) | - | - |" in lines
    assert "| W8A8 file : vLLM, W8A8 | - | - | - |" in lines
    assert "| int8 | 3.0 | - | - |" in lines
    assert "| vLLM, W8A8 | not prepared: see prepare_peers.sh | | |" in lines


@pytest.mark.slow
@pytest.mark.skipif(unavailable() is not None, reason=f"needs native kernels: {unavailable()}")
@pytest.mark.skipif(not PEERS.exists(), reason="needs the workloads of the peers' bench")
def test_one_command_makes_the_table(tmp_path: Path) -> None:
    json_file, table = tmp_path / "table.json", tmp_path / "table.md"
    tiny = ["--size", "15m", "--tiny", "--workloads", "A"]
    given = [*tiny, "--rounds", "2", "--megabytes", "2", "--outer", "512", "--inner", "256"]
    places = ["--files", str(tmp_path), "--peers", str(PEERS), "--out", str(json_file), "--markdown", str(table)]
    engines = ["bfloat16", "int4, int8 activations", "vLLM, W8A8"]
    main([*given, "--engines", *engines, *places])
    found = json.loads(json_file.read_text())
    assert found["ratios"]["int4, int8 activations : bfloat16"]["A"]["ratio"]["median"] > 0
    assert found["products"]["forms"].keys() == PRODUCTS
    assert "| vLLM, W8A8 | not prepared" in table.read_text()
    main([*tiny, "--rounds", "1", "--resume", "--engines", "bfloat16", *places])
    more = json.loads(json_file.read_text())
    assert more["rounds"][:2] == found["rounds"] and more["rounds"][2].keys() == {"bfloat16"}
    assert more["products"] == found["products"] and more["ratios"] == found["ratios"]
