"""Requests of the three microserving calls under the names that MLC-LLM gives them (protocol page §3)."""

from .openai_api_protocol import CompletionRequest, Shape


class PrepRecvRequest(CompletionRequest):
    """To decode: make room for the KV of `prompt[0:end]`; a negative end counts from the prompt's end."""

    end: int


class PrepRecvResponse(Shape):
    """Where the KV goes, and how much of it decode has cached."""

    kv_append_metadata: str
    prefix_matched_length: int


class RemoteSendRequest(CompletionRequest):
    """To prefill: compute `prompt[begin:end]` and write its KV to `kv_addr_info` at the PEs from `recv_rank` on."""

    begin: int
    end: int
    kv_addr_info: str
    recv_rank: int


class StartGenerateRequest(CompletionRequest):
    """To decode: prefill `prompt[begin:]` and generate."""

    begin: int
