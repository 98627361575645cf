"""The complete code of MLC-LLM's tutorial out of its published page, if that is at hand."""

from pathlib import Path

IMPORTS = {
    "from mlc_llm.router import Router": "from coordinator.sdk import Router",
    "from mlc_llm.protocol import openai_api_protocol": "from coordinator.sdk import openai_api_protocol",
    "from mlc_llm.serve.entrypoints import microserving_entrypoints": (
        "from coordinator.sdk import microserving_entrypoints"
    ),
    "from mlc_llm.interface.router import serve": "from coordinator.sdk import serve",
}
"""The import lines as the page has them, and ours: nothing else differs."""


def code_of(page):
    """The code of the page's last block, its import lines exchanged."""
    lines = [line for line in page.splitlines() if line.strip() != "|"]
    start = next(number for number, line in enumerate(lines) if "complete code is as below" in line)
    block = lines[start + 1 :]
    block = block[next(number for number, line in enumerate(block) if line.startswith(".. code::")) + 1 :]
    text = "\n".join(line.removeprefix("|") for line in block).strip("\n")
    indent = min(len(line) - len(line.lstrip()) for line in text.splitlines() if line.strip())
    code = "\n".join(line[indent:] for line in text.splitlines())
    for theirs, ours in IMPORTS.items():
        assert theirs in code
        code = code.replace(theirs, ours)
    return code + "\n"


def seed_page():
    """The page, where it is beside the checkout."""
    for folder in (Path(__file__).parents[3] / "shared/seeds", Path(__file__).parents[2] / "seeds"):
        for file in sorted(folder.glob("003_*.txt")):
            return file.read_text()
    return None


def same_code(first, second):
    """Whether two texts hold the same code: blank lines and spaces at line ends aside."""

    def lines(text):
        return [line.rstrip() for line in text.splitlines() if line.strip()]

    return lines(first) == lines(second)
