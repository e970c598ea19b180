"""What the reader is shown runs: the README's Python blocks, and every script of docs/ and examples/."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted([*ROOT.glob("docs/*.py"), *ROOT.glob("examples/*.py")])
LONG = ("multi_host.py", "qlora_smollm2.py", "qat.py", "load_gguf.py", "llama.py")  # what they show has quicker tests
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def test_readme_blocks_run_in_order(capsys):
    text = (ROOT / "README.md").read_text()
    blocks = list(BLOCK.finditer(text))
    assert blocks, "README.md has no ```python block"
    namespace: dict[str, object] = {"__name__": "readme"}
    for block in blocks:
        # Blank lines in front keep the README's own line numbers in tracebacks and warnings.
        source = "\n" * text[: block.start(1)].count("\n") + block.group(1)
        exec(compile(source, str(ROOT / "README.md"), "exec"), namespace)
        printed = capsys.readouterr().out
        assert f"```\n{printed}```" in text or not printed, f"the README shows another output than\n{printed}"


def _case(path):
    marks = [pytest.mark.thorough] if path.name in LONG else []
    return pytest.param(path, id=str(path.relative_to(ROOT)), marks=marks)


@pytest.mark.every_release
@pytest.mark.parametrize("script", [_case(path) for path in SCRIPTS])
def test_script_runs(script):
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip(), f"{script.name} printed nothing"
