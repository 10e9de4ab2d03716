"""ActorTree: the actors of an engine, the order in which they start, and their supervisors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from actors.boards.health_board import HealthBoard
from actors.engine.replica import Replica, ReplicaEvents, ReplicaSetup
from actors.protocol import TokenizerProtocol
from actors.requests.router import Route
from actors.runtime import ActorRef, Event, EventKind, Strategy, Supervision
from actors.text.rendering import Rendering
from actors.text.tokenizer import Tokenizer
from kernels.contract.info import ModelInfo

__all__ = ["ActorTree"]


class ActorTree:
    """Spawns the actors and keeps their refs: shared tokenizers and renderers, and the replicas.

    ``boards``: one for each replica. ``on_progress``: called with the progress of the slowest replica. ``on_ready``:
    called when every replica has loaded, or one has loaded again, with the info of the replica with the shortest
    context. ``hand_over``: as ReplicaEvents.
    """

    rendering: Rendering

    def __init__(
        self,
        setup: ReplicaSetup,
        boards: Sequence[HealthBoard],
        *,
        on_progress: Callable[[str, float], None],
        on_ready: Callable[[ModelInfo], None],
        on_refused: Callable[[str, bool], None],
        hand_over: Callable[[Route], Sequence[int]],
    ) -> None:
        self._hand_over = hand_over
        self.tokenizers: list[ActorRef[TokenizerProtocol]] = []
        self.replicas: list[Replica] = []
        for number, board in enumerate(boards):
            lead = self.replicas[0] if number and setup.arguments.enable_dp_attention else None
            self.replicas.append(Replica(number, setup, board, self._events(number, on_refused), lead))
        self._setup = setup
        self._on_progress = on_progress
        self._on_ready = on_ready
        self._progress: dict[int, float] = {}
        self._infos: dict[int, ModelInfo] = {}

    def find(self, actor: str) -> Replica | None:
        """The replica with a worker of this name, or None."""
        for replica in self.replicas:
            if any(worker.name == actor for worker in replica.worker_ids):
                return replica
        return None

    async def assemble(self) -> None:
        """Start every actor. Workers may still load when this returns; ``on_ready`` reports the end of loading."""
        await self._start_tokenizers()
        if len(self.replicas) > 1:
            self._setup.system.on_event(self._on_event)
        # Worker processes next: they take longest, and the rest starts while they import.
        for replica in self.replicas:
            await replica.start_workers()
        arguments, codec = self._setup.arguments, self._setup.opened.served.codec
        self.rendering = await Rendering.start(
            self._setup.system,
            template=codec.template if codec else None,
            variables=codec.special_tokens if codec else {},
            count=arguments.tokenizer_worker_num,
            guests=arguments.trust_request_chat_template,
            faults=self._setup.fault_plan,
        )
        for replica in self.replicas:
            await replica.start_actors()

    async def _start_tokenizers(self) -> None:
        arguments, codec = self._setup.arguments, self._setup.opened.served.codec
        if codec is None:
            return
        batch_timeout = arguments.dynamic_batch_tokenizer_batch_timeout
        for number in range(arguments.tokenizer_worker_num):
            self.tokenizers.append(
                await self._setup.system.spawn(
                    lambda: Tokenizer(
                        codec,
                        batch_size=arguments.dynamic_batch_tokenizer_batch_size,
                        batch_timeout=batch_timeout if arguments.enable_dynamic_batch_tokenizer else 0.0,
                        batch_encode=arguments.enable_tokenizer_batch_encode,
                    ),
                    name=f"tokenizer-{number}",
                    capacity=8192,
                    supervision=Supervision(strategy=Strategy.RESTART_ONE, max_restarts=5, within=60.0),
                )
            )

    def _events(self, number: int, on_refused: Callable[[str, bool], None]) -> ReplicaEvents:
        return ReplicaEvents(
            on_progress=lambda stage, fraction: self._progressed(number, stage, fraction),
            on_ready=lambda info: self._loaded(number, info),
            on_refused=on_refused,
            hand_over=self._hand_over,
            others_serve=lambda: any(
                replica.number != number and replica.board.worker is not None for replica in self.replicas
            ),
        )

    def _on_event(self, event: Event) -> None:
        """Sequences of a replica whose worker died go on in the others."""
        replica = self.find(event.actor) if event.kind is EventKind.DIED else None
        if replica is not None:
            replica.hand_over()

    def _progressed(self, number: int, stage: str, fraction: float) -> None:
        self._progress[number] = fraction
        slowest = min(self._progress.get(replica.number, 0.0) for replica in self.replicas)
        if slowest == fraction:
            self._on_progress(stage, fraction)

    def _loaded(self, number: int, info: ModelInfo) -> None:
        self._infos[number] = info
        if len(self._infos) == len(self.replicas):
            self._on_ready(min(self._infos.values(), key=lambda info: info.context_length))
        for replica in self.replicas:  # one that died while no other was ready
            replica.hand_over()
