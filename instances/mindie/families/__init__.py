"""The five dialects of a MindIE engine, and which path speaks which."""

import re
from collections.abc import Mapping
from typing import Any

from instances.mindie.ask import Family
from instances.mindie.families.native import Native
from instances.mindie.families.openai import Chat, Completions
from instances.mindie.families.tgi import Tgi
from instances.mindie.families.triton import TritonText, TritonTokens
from instances.mindie.families.vllm import Vllm
from instances.mindie.refusal import invalid

CHAT, COMPLETIONS, TGI, VLLM, NATIVE = Chat(), Completions(), Tgi(), Vllm(), Native()
TRITON_TEXT, TRITON_TOKENS = TritonText(), TritonTokens()

TRITON_PATH = re.compile(r"/v2/models/(?P<model>[\w.\-]+)/(?P<call>generate|generate_stream|infer)")
_BY_PATH: Mapping[str, Family] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/generate_stream": TGI,
    "/": TGI,
    "/infer": NATIVE,
    "/infer_token": NATIVE,
}


def serves(path: str) -> bool:
    """Whether this path takes inference requests."""
    return path in _BY_PATH or path == "/generate" or TRITON_PATH.fullmatch(path) is not None


def family_of(path: str, body: Mapping[str, Any]) -> Family:
    """The dialect of a call; `/generate` is shared, there the body decides (MindIE protocol page §2)."""
    if path == "/generate":
        if "inputs" in body:
            return TGI
        if "prompt" in body:
            return VLLM
        raise invalid("inputs or prompt must be given")
    triton = TRITON_PATH.fullmatch(path)
    if triton is not None:
        return TRITON_TOKENS if triton.group("call") == "infer" else TRITON_TEXT
    return _BY_PATH[path]
