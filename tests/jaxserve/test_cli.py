"""What a command of `jaxserve` writes to standard output and standard error."""

import subprocess
import sys

from tests.server_process import PROGRAMS_CACHE, SMALL_ENGINE

LEDGER = " KV cache size: "


def test_generate_logs_the_memory_ledger_once() -> None:
    flags = (*SMALL_ENGINE, "--compilation-cache-dir", str(PROGRAMS_CACHE), "--temperature", "0")
    command = [sys.executable, "-m", "jaxserve", "generate", "--prompt", "12+30=", *flags]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert ended.stdout.startswith("12+30=42")
    assert ended.stderr.count(LEDGER) == 1
