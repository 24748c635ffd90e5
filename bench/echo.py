"""A server that knows nothing: the same services on the same stack, each call answered at once.

What a call costs here is what gRPC, protobuf and Python cost; no scheduler on this stack can be faster.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc

from servingfleet_protos.v1 import (
    common_pb2,
    routing_pb2,
    routing_pb2_grpc,
    stream_pb2,
    stream_pb2_grpc,
)

ACK_MESSAGES = 64
WINDOW_MESSAGES = 4096
MAX_MESSAGE_BYTES = 16 * 1024 * 1024

Context = grpc.aio.ServicerContext[Any, Any]


class EchoRouter(routing_pb2_grpc.RouterServicer):
    """Answers as large as a scheduler's."""

    async def Route(
        self, request: routing_pb2.RouteRequest, context: Context
    ) -> routing_pb2.RouteResponse:
        return routing_pb2.RouteResponse(
            decision_id="x" * 160,
            target=common_pb2.Target(replica="replica-00", rank=0),
            endpoint="replica-00:8000",
            prediction=routing_pb2.Prediction(
                prompt_tokens=len(request.prompt.tokens_le32) // 4, predicted=1, lower=1, upper=1
            ),
            estimated_ttft_s=0.1,
            basis=routing_pb2.BASIS_INDEX,
            policy="cost",
        )

    async def Explain(
        self, request: routing_pb2.RouteRequest, context: Context
    ) -> routing_pb2.ExplainResponse:
        return routing_pb2.ExplainResponse(basis=routing_pb2.BASIS_INDEX, policy="cost")

    async def Report(
        self, request: routing_pb2.ReportRequest, context: Context
    ) -> routing_pb2.ReportResponse:
        return routing_pb2.ReportResponse(disposition=routing_pb2.ReportResponse.DISPOSITION_JOINED)


class EchoIntake(stream_pb2_grpc.RelayIntakeServicer):
    """Reads and acknowledges."""

    async def Stream(
        self, requests: AsyncIterator[stream_pb2.RelayMessage], context: Context
    ) -> AsyncIterator[stream_pb2.SchedulerMessage]:
        welcome = stream_pb2.Welcome(instance_id="echo", expected_seq=1, window=WINDOW_MESSAGES)
        yield stream_pb2.SchedulerMessage(welcome=welcome)
        yield stream_pb2.SchedulerMessage(grant_snapshot=stream_pb2.GrantSnapshot(ranks=[0]))
        acked = 0
        async for message in requests:
            # The end of a batch: what is sent next waits for it.
            if message.seq - acked >= ACK_MESSAGES or message.WhichOneof("body") != "delta":
                acked = message.seq
                yield stream_pb2.SchedulerMessage(ack=stream_pb2.Ack(seq=acked))


async def main() -> None:
    size = MAX_MESSAGE_BYTES
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", size),
            ("grpc.max_send_message_length", size),
            ("grpc.so_reuseport", 0),
        ]
    )
    routing_pb2_grpc.add_RouterServicer_to_server(EchoRouter(), server)
    stream_pb2_grpc.add_RelayIntakeServicer_to_server(EchoIntake(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(json.dumps({"event": "listening", "port": port}), file=sys.stderr, flush=True)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()
    await server.stop(1)


if __name__ == "__main__":
    asyncio.run(main())
