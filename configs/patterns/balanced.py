"""Balanced prefill: decode computes a part of each prompt itself, the more the busier prefill is."""

from coordinator.sdk import Router, microserving_entrypoints

LEAST, MOST = 0.1, 0.5


class BalancedRouter(Router):
    """Prefill computes the first part of the prompt, decode the rest."""

    async def translate_request(self, request, request_id):
        given = request.model_dump()
        end = int((1 - self.decodes_share()) * len(request.prompt))
        end = max(0, min(end, len(request.prompt) - 1))

        prepare = microserving_entrypoints.PrepRecvRequest(**given, end=end)
        address, cached = await self.send_prepare_receive(None, prepare, self.decode.url)
        if cached < end:
            send = microserving_entrypoints.RemoteSendRequest(
                **given, begin=cached, end=end, kv_addr_info=address, recv_rank=self.decode.recv_rank
            )
            await self.send_remote_send(None, send, self.prefill.url)

        generate = microserving_entrypoints.StartGenerateRequest(**given, begin=end)
        async for response in self.send_start_generate(None, generate, self.decode.url):
            yield None if response.choices and response.choices[0].finish_reason == "preempt" else response

    def decodes_share(self):
        """Of the prompt; by how much busier the least busy prefill engine is than the least busy decode engine."""
        busy = [min(server.in_flight for server in self.servers(role)) for role in ("prefill", "decode")]
        return min(MOST, LEAST + max(0, busy[0] - busy[1]) * 0.1)
