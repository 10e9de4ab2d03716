"""The methods of SGLang's gRPC service."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any, NoReturn

import numpy as np

from app.apis.embeddings.handlers import task_all
from app.apis.grpc.calls import answer_call
from app.apis.grpc.generation import check_fields, check_start, generate_item, prompt_of, responses, submitted
from app.apis.grpc.messages import METHODS, SERVICE, message
from app.apis.grpc.transport import Call
from app.server.auth import AccessLevel
from app.server.errors import ApiError, invalid
from app.server.routes import Route
from app.server.service import Service
from app.server.version import troupe_version
from kernels.contract.tasks import Classify, Embed, Task

__all__ = ["Servicer"]


async def _no_handler(*_: object) -> NoReturn:
    raise NotImplementedError


_OPERATIONS = {"Generate": "text_completion", "Embed": "embeddings"}
_ROUTES = {
    name: Route(
        path=f"/{SERVICE}/{name}",
        methods=("POST",),
        level=AccessLevel.USER,
        handler=_no_handler,
        summary=name,
        operation=_OPERATIONS.get(name, ""),
        logged=name in _OPERATIONS or name == "Abort",
    )
    for name in METHODS
}


class Servicer:
    """The methods by their names. Each checks the key; requests and responses are messages of the service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._started = time.time()

    async def Generate(self, call: Call) -> AsyncIterator[Any]:
        """Tokens of a prompt, as they come (``stream``) or at the end."""
        service = self._service
        async with answer_call(service, _ROUTES["Generate"], call) as exchange:
            request = await call.request(message("GenerateRequest"))
            service.require_ready()
            item, names = generate_item(request)
            stream = submitted(service, exchange, item, names, call.seconds_left())
            await service.accepted([stream], names)
            check_start(item, stream.prompt_tokens)
            label = request.request_id or exchange.request_id
            async for response in responses(exchange, stream, item, label, chunks=request.stream):
                yield response

    async def Embed(self, call: Call) -> Any:
        """The vector of an input: an embedding, or the numbers of the model's head as they are."""
        service = self._service
        async with answer_call(service, _ROUTES["Embed"], call) as exchange:
            request = await call.request(message("EmbedRequest"))
            service.require_ready()
            check_fields(request)
            task = self._task(list(request.token_type_ids), len(request.tokenized.input_ids))
            options = {"label": request.request_id or None, "timeout": call.seconds_left()}
            result = await task_all(service, exchange, [(prompt_of(request), task)], "tokenized", **options)
            vector, tokens = result[0]
            exchange.tokens = (tokens, 0)
            return message("EmbedResponse")(embedding_dim=vector.size, embedding=vector, prompt_tokens=tokens)

    def _task(self, types: list[int], length: int) -> Task:
        """``types``: the token types of a pair of texts, 0 and then 1; none for one text."""
        info = self._service.engine.model_info
        pooling = info.pooling if info is not None else None
        if pooling is None and not self._service.arguments.is_embedding:
            raise invalid("this model generates text; serve one that embeds or classifies.", code="model_not_supported")
        second = types.index(1) if 1 in types else 0
        if types and types != [0] * (second or length) + [1] * (length - (second or length)):
            raise invalid("token_type_ids: are 0 and then 1, as many as input_ids.", param="token_type_ids")
        if pooling is not None and pooling.task == "classify":
            return Classify(False, second)
        if second:
            raise invalid("token_type_ids: tell the texts of a pair apart, and this model embeds one text.")
        return Embed(pooling is None or pooling.normalize)

    async def HealthCheck(self, call: Call) -> Any:
        """Whether the engine admits requests and makes progress."""
        async with answer_call(self._service, _ROUTES["HealthCheck"], call):
            healthy, reason = self.health()
            return message("HealthCheckResponse")(healthy=healthy, message=reason)

    def health(self) -> tuple[bool, str]:
        """Whether the service serves, and why not."""
        phase = self._service.status.phase
        if phase != "ready":
            return False, f"the engine is {phase}"
        health = self._service.engine.health()
        return health.ok, health.reason

    async def Abort(self, call: Call) -> Any:
        """Abort the requests with this id of the same key."""
        async with answer_call(self._service, _ROUTES["Abort"], call) as exchange:
            request = await call.request(message("AbortRequest"))
            if not request.request_id:
                raise invalid("request_id: is missing.", param="request_id")
            count = await self._service.abort(request.request_id, exchange.tenant)
            return message("AbortResponse")(success=count > 0, message=f"{count} requests are aborted.")

    async def GetModelInfo(self, call: Call) -> Any:
        """What the model is and what it takes."""
        async with answer_call(self._service, _ROUTES["GetModelInfo"], call):
            engine, arguments = self._service.engine, self._service.arguments
            info = engine.model_info
            pooling = info.pooling if info is not None else None
            labels = pooling.labels if pooling is not None else ()
            return message("GetModelInfoResponse")(
                model_path=arguments.model_path,
                tokenizer_path=arguments.tokenizer_path or arguments.model_path,
                is_generation=pooling is None,
                preferred_sampling_params=json.dumps(arguments.preferred_sampling_params),
                weight_version=arguments.weight_version,
                served_model_name=self._service.model_name,
                max_context_length=engine.context_length,
                max_req_input_len=engine.context_length - 1,
                vocab_size=engine.vocab_size,
                architectures=[engine.architecture],
                id2label_json=json.dumps(dict(enumerate(labels))) if labels else "",
                num_labels=len(labels),
            )

    async def GetServerInfo(self, call: Call) -> Any:
        """The server's arguments and state."""
        async with answer_call(self._service, _ROUTES["GetServerInfo"], call):
            loads = self._service.engine.loads()
            answer = message("GetServerInfoResponse")(
                active_requests=sum(bool(exchange.stream_ids) for exchange in self._service.live),
                is_paused=any(load.paused for load in loads),
                uptime_seconds=time.time() - self._started,
                sglang_version=troupe_version(),
                server_type="grpc",
                max_total_num_tokens=sum(load.max_total_num_tokens for load in loads),
            )
            described = json.loads(json.dumps(self._service.arguments.describe(), default=str))
            answer.server_args.update(described)
            answer.start_time.FromSeconds(int(self._started))
            return answer

    async def GetLoads(self, call: Call) -> Any:
        """Load for routers, of each replica."""
        async with answer_call(self._service, _ROUTES["GetLoads"], call):
            request = await call.request(message("GetLoadsRequest"))
            loads = self._service.engine.loads()
            if request.HasField("dp_rank"):
                if not 0 <= request.dp_rank < len(loads):
                    raise ApiError(400, f"dp_rank: is 0 to {len(loads) - 1} here.", param="dp_rank")
                loads = [loads[request.dp_rank]]
            names = [
                field.name for field in message("SchedulerLoad").DESCRIPTOR.fields if field.name != "gen_throughput"
            ]
            return message("GetLoadsResponse")(
                timestamp=datetime.now(UTC).isoformat(),
                version=troupe_version(),
                dp_rank_count=len(loads),
                loads=[{name: getattr(load, name) for name in names} for load in loads],
                aggregate={
                    "total_running_reqs": sum(load.num_running_reqs for load in loads),
                    "total_waiting_reqs": sum(load.num_waiting_reqs for load in loads),
                    "total_reqs": sum(load.num_total_reqs for load in loads),
                    "avg_token_usage": float(np.mean([load.token_usage for load in loads])),
                    "avg_utilization": float(np.mean([load.utilization for load in loads])),
                },
            )
