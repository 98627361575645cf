"""Prefill where the longest prefix of the prompt was computed before; decode engines share the requests evenly."""

from collections import OrderedDict

from coordinator.sdk import Router, microserving_entrypoints

BLOCK = 16  # tokens; a prefix counts in whole blocks
REMEMBERED = 50_000  # blocks per prefill engine


class Remembered:
    """Blocks of prompts that an engine has computed lately, each known by all that comes before it."""

    def __init__(self):
        self.blocks = OrderedDict()

    def length(self, keys):
        """How many blocks of a prompt are known, from its start on."""
        return next((count for count, key in enumerate(keys) if key not in self.blocks), len(keys))

    def add(self, keys):
        """Remember a prompt; forget what was not seen for the longest time."""
        for key in keys:
            self.blocks[key] = True
            self.blocks.move_to_end(key)
        while len(self.blocks) > REMEMBERED:
            self.blocks.popitem(last=False)


def keys_of(prompt):
    """A key for each whole block of a prompt, which stands for everything up to its end."""
    keys, key = [], 0
    for start in range(0, len(prompt) - BLOCK + 1, BLOCK):
        key = hash((key, *prompt[start : start + BLOCK]))
        keys.append(key)
    return keys


class LongestPrefixRouter(Router):
    """The coordinator has placed the request evenly; prefill is chosen anew."""

    async def translate_request(self, request, request_id):
        given, end, keys = request.model_dump(), len(request.prompt) - 1, keys_of(request.prompt)

        def memory(server):
            return self.shared.setdefault(server.id, Remembered())

        async with self.place("prefill", prefer=lambda server: memory(server).length(keys)) as prefill:
            prepare = microserving_entrypoints.PrepRecvRequest(**given, end=end)
            address, cached = await self.send_prepare_receive(None, prepare, self.decode.url)
            if cached < end:
                send = microserving_entrypoints.RemoteSendRequest(
                    **given, begin=cached, end=end, kv_addr_info=address, recv_rank=self.decode.recv_rank
                )
                await self.send_remote_send(None, send, prefill.url)
            memory(prefill).add(keys)

        generate = microserving_entrypoints.StartGenerateRequest(**given, begin=end)
        async for response in self.send_start_generate(None, generate, self.decode.url):
            yield None if response.choices and response.choices[0].finish_reason == "preempt" else response
