"""The table of API families: a family is one module and one line here."""

from typing import Final

from .disaggpb import Disaggpb
from .family import Family
from .mindie import Mindie
from .openai import OpenAi
from .sglang import Sglang
from .tgi import Tgi
from .triton import Triton
from .vllm import Vllm

# The first one answers for paths that are nobody's; of two that share a path the earlier one is asked first.
FAMILIES: Final[tuple[Family, ...]] = (OpenAi(), Tgi(), Vllm(), Sglang(), Triton(), Mindie(), Disaggpb())
