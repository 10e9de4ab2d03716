"""Steps that are prepared beforehand, so that running one costs the host little."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from kernels.batch import ForwardBatch
from kernels.host_target import HostTarget
from kernels.models.decoder import Decoder
from kernels.platforms.base import Platform
from kernels.platforms.operators import Acceptance
from kernels.platforms.prepared import Decodes, PassHead, Steps
from kernels.prompt_ends import PromptEnds
from kernels.slots import SlotTable
from kernels.speculative.following import Following
from kernels.speculative.steady import SteadyChains
from kernels.speculative.tree import DraftTree
from kernels.steady import SteadyDecodes
from kernels.step import RunnerConfig

if TYPE_CHECKING:
    from kernels.loaded_model import LoadedModel

__all__ = ["CapturedSteps", "Passes"]


class Passes:
    """What is captured of a model: over ``caches``, for the ``slots``' tables. ``agree``: as ``Platform`` says."""

    def __init__(
        self,
        config: RunnerConfig,
        platform: Platform,
        model: Decoder,
        caches: list[Any],
        slots: SlotTable,
        windows: Iterable[int],
        agree: Callable[[bool], bool],
    ) -> None:
        self._config, self._platform, self._agree = config, platform, agree
        self._model, self._caches, self._slots, self._windows = model, caches, slots, sorted(windows)

    def capture_decodes(self, rows: int, tokens: int = 1, tree: bool = False, depth: int = 0) -> Decodes | None:
        """As ``Platform.capture_decodes`` says. ``depth``: the longest path of what is verified."""
        model, platform, table, greedy = self._model, self._platform, self._slots.tokens, self._platform.greedy
        speculation, head = self._config.speculation, None

        def find(result: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            assert greedy is not None
            logits = model.logits(model.split(result)[0])
            return logits, *greedy(logits)

        def accept(given: DraftTree, rows: Tensor, index: Tensor, sampled: Tensor, broken: Tensor) -> Acceptance:
            found = platform.accept(given, rows, sampled, broken, min(depth, tokens - 1), forced, table)
            assert found is not None
            if tree:
                platform.move_accepted(self._caches, index, found.rows, found.outcome)
            return found

        if speculation is not None and tokens > 1 and greedy is not None and self._config.tp_size == 1:
            forced = int(speculation.fixed_acceptance)
            known = platform.accepts and forced == speculation.fixed_acceptance
            head = PassHead(find, accept if known else None, lambda result: model.split(result)[1])
        return self._platform.capture_decodes(
            lambda batch: model.forward(batch, self._caches),
            self._windows,
            rows,
            self._slots.pages.shape[1],
            self._agree,
            tokens,
            tree,
            prompts=self._config.max_step_tokens,
            head=head,
        )

    def capture_steps(self, rows: int) -> Steps | None:
        """As ``Platform.capture_steps`` says."""
        model, caches = self._model, self._caches

        def forward(batch: ForwardBatch, last: Tensor | None) -> tuple[Tensor, Tensor]:
            hidden = model.split(model.forward(batch, caches, wanted=last))[0]
            return hidden, model.logits(hidden)

        columns = self._slots.pages.shape[1]
        return self._platform.capture_steps(forward, self._slots.tokens, self._windows, rows, columns)


class CapturedSteps:
    """Of one model. Each is None where the platform gains nothing by it, or not all ranks could.

    ``decodes``: the model's part of steps of decodes. ``verifies``: the same of decodes that all have guesses.
    ``steady`` and ``chains``: all of such a step, where the device is the host; ``ends``: of one that runs prompts to
    their ends. ``unseen_steady`` and ``unseen_ends``: the same of steps that nothing is kept of for a draft.
    ``steps``: all of a step, whatever is sampled then; there are no ``decodes`` beside them.
    ``target``: what ``steady`` and ``chains`` both run where there are guesses. ``following``: runs steps in which all
    verify before those before them are settled.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self.decodes: Decodes | None = None
        self.verifies: Decodes | None = None
        self.steady: SteadyDecodes | None = None
        self.chains: SteadyChains | None = None
        self.ends: PromptEnds | None = None
        self.unseen_steady: SteadyDecodes | None = None
        self.unseen_ends: PromptEnds | None = None
        self.steps: Steps | None = None
        self.target: HostTarget | None = None
        self.following: Following | None = None
        self.capture()

    @property
    def rows(self) -> tuple[int, ...]:
        """The numbers of rows that decodes were prepared for."""
        held = self.steps or self.decodes
        return held.rows if held is not None else ()

    def capture(self) -> None:
        """Prepare them, the drafter's own among them; again, once the platform has better operators."""
        loaded = self._loaded
        config, platform, model, caches = loaded.config, loaded.platform, loaded.model, loaded.caches
        windows, speculator = sorted(loaded.windows), loaded.speculator
        rows = config.max_slots - 1
        self.verifies = self.chains = self.target = self.following = None
        self.steady, self.ends = self.unseen_steady, self.unseen_ends = None, None
        passes = Passes(config, platform, model, caches, loaded.slots, windows, self._agree)
        self.steps = passes.capture_steps(rows) if speculator is None and loaded.group.size == 1 else None
        self.decodes = passes.capture_decodes(rows) if self.steps is None else None
        if speculator is None:
            self.steady, self.ends = self._unseen(rows)
            return
        assert config.speculation is not None
        if config.speculation.adaptive.enabled:
            self.unseen_steady, self.unseen_ends = self._unseen(rows)
        drafter = speculator.drafter
        rows = min(rows, config.max_step_tokens // drafter.most_nodes)
        self.verifies = passes.capture_decodes(rows, drafter.most_nodes, drafter.branches, drafter.depth)
        drafter.capture(self._agree, self.verifies.ends if self.verifies is not None else {})
        speculator.verifier.prepare(drafter.most_nodes, caches if drafter.branches else [])
        if self.verifies is not None and self.verifies.ends and loaded.group.size == 1:
            self.following = Following(speculator, platform, loaded.slots, self.verifies)
        self.target = target = HostTarget.make(platform, model, caches, windows, rows * drafter.most_nodes)
        if target is None:
            return
        self.steady = SteadyDecodes(loaded.slots, loaded.sampler, target, rows)
        self.ends = PromptEnds.make(platform, model, caches, windows, loaded.slots, loaded.sampler, rows)
        drafts = drafter.host_drafts(loaded.slots, rows)
        speculator.observer.settle_here(drafts, target.features.shape[1])
        if drafts is not None and speculator.exact:
            steps = config.speculation.num_steps
            self.chains = SteadyChains(
                platform, loaded.slots, loaded.sampler, speculator, drafts, target, caches, rows, steps
            )

    def _unseen(self, rows: int) -> tuple[SteadyDecodes | None, PromptEnds | None]:
        """Steps of up to ``rows`` rows that nothing is kept of, as an engine without a draft runs them."""
        loaded = self._loaded
        model = (loaded.platform, loaded.model, loaded.caches, sorted(loaded.windows))
        target = HostTarget.make(*model, rows, False)
        if target is None:
            return None, None
        steady = SteadyDecodes(loaded.slots, loaded.sampler, target, rows)
        return steady, PromptEnds.make(*model, loaded.slots, loaded.sampler, rows, False)

    def _agree(self, could: bool) -> bool:
        """Whether all ranks could."""
        return bool(self._loaded.group.least(int(could)))
