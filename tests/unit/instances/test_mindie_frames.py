"""Every message of the MindIE protocol page §5.3, byte for byte, HTTP chunk included."""

import asyncio

import pytest

from instances.answers import Plan, Wish
from instances.mindie import frames
from instances.mindie.ask import Ask, Job, Token
from instances.mindie.dresult import ResultStream
from instances.mindie.families import COMPLETIONS, TGI, VLLM
from instances.mindie.families.form import dump
from instances.mindie.families.openai import DONE
from instances.replies import Pipe, chunked

MESSAGES = {
    "heartbeat": (frames.HEARTBEAT, b"d\r\nka:heartbeat\0\r\n"),
    "stream piece": (
        frames.message("1234567", "data", b'data: {"x":1}\n\n'),
        b'23\r\nreqId:1234567\0data:data: {"x":1}\n\n\0\r\n',
    ),
    "Triton piece": (
        frames.message("1234567", "data", b'data:{"x":1}\n\n'),
        b'22\r\nreqId:1234567\0data:data:{"x":1}\n\n\0\r\n',
    ),
    "vLLM piece": (
        frames.message("1234567", "data", b'{"text":["a"]}\0'),
        b'23\r\nreqId:1234567\0data:{"text":["a"]}\0\0\r\n',
    ),
    "last piece": (
        frames.message("1234567", "lastData", b'data: {"x":2}\n\n'),
        b'27\r\nreqId:1234567\0lastData:data: {"x":2}\n\n\0\r\n',
    ),
    "OpenAI terminator": (
        frames.message("1234567", "lastData", DONE),
        b"26\r\nreqId:1234567\0lastData:data: [DONE]\n\n\0\r\n",
    ),
    "whole answer": (
        frames.message("1234567", "lastData", b'{"generated_text":"hi"}'),
        b'2f\r\nreqId:1234567\0lastData:{"generated_text":"hi"}\0\r\n',
    ),
    "error": (
        frames.message("1234567", "error", frames.PULL_FAILED.encode()),
        b"31\r\nreqId:1234567\0error:Pull kv failed irreversibly.\0\r\n",
    ),
    "merged": (
        frames.message("1", "data", b'data: {"x":1}\n\n') + frames.HEARTBEAT,
        b'2a\r\nreqId:1\0data:data: {"x":1}\n\n\0ka:heartbeat\0\r\n',
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_message(name):
    message, wire = MESSAGES[name]
    assert chunked(message) == wire


def _job(path, body, prompt, done, limit, stream=True):
    wish = Wish(prompt, limit)
    ask = Ask(path, stream, wish, "hi", body)
    return Job("1234567", "m", ask, Plan((*done, 0), ("", "", ""), "stop"), sent=len(done), created=5)


def test_recompute_request_of_the_vllm_family():
    job = _job("/generate", {"prompt": "hi", "stream": True, "max_tokens": 8}, (1, 2, 3), (9,), 8)
    assert chunked(frames.message("1234567", "retry", dump(VLLM.retry(job)))) == (
        b'6c\r\nreqId:1234567\0retry:{"prompt":"3,1,2,3,9","origin_inputs":"hi","stream":true,'
        b'"max_tokens":8,"model":"None"}\0\r\n'
    )


def test_recompute_request_leaves_the_default_limit_of_vllm_out():
    job = _job("/generate", {"prompt": "hi"}, (1,), (9,), 16, stream=False)
    assert dump(VLLM.retry(job)) == b'{"prompt":"1,1,9","origin_inputs":"hi","stream":false,"model":"None"}'


class Transport(asyncio.Transport):
    def __init__(self):
        super().__init__()
        self.data, self.closed = b"", False

    def write(self, data):
        self.data += data

    def is_closing(self):
        return self.closed

    def close(self):
        self.closed = True


async def test_close_message_of_a_replaced_connection():
    transport = Transport()
    stream = ResultStream(Pipe(transport))
    stream.end("dresult_close")
    assert transport.data == (
        b"54\r\nreqId:0xffffffffffffffff\0close:new connection is to established, close the old one.\0\r\n"
    )
    assert stream.ended.is_set()


def test_stream_piece_shapes():
    plan = Plan((7, 8), ("Light", " of"), "length")
    body = {"inputs": "hi", "parameters": {}}
    job = Job("5", "m", Ask("/generate_stream", True, Wish((1,), 2, seed=4), "hi", body), plan, sent=2, created=9)
    first, last = Token(0, by_prefill=True, took_ms=1), Token(1, by_prefill=False, took_ms=1)
    assert TGI.piece(job, first) == (
        b'data: {"token":{"id":[7],"text":"Light","logprob":null,"special":null},"generated_text":null,"details":null}'
        b"\n\n"
    )
    assert b"".join(TGI.last(job, last)) == (
        b'data: {"token":{"id":[8],"text":" of","logprob":null,"special":null},"generated_text":"Light of",'
        b'"details":{"finish_reason":"length","generated_tokens":2,"seed":4}}\n\n'
    )
    assert VLLM.piece(job, first) == b'{"text":["Light"]}\0'
    piece, done = COMPLETIONS.last(job, last)
    assert done == b"data: [DONE]\n\n"
    assert piece == (
        b'data: {"id":"5","object":"text_completion","created":9,"model":"m","choices":[{"index":0,"text":" of",'
        b'"logprobs":null,"stop_reason":null,"finish_reason":"length"}],'
        b'"usage":{"prompt_tokens":1,"completion_tokens":2,"total_tokens":3}}\n\n'
    )
