"""The base class of all formats: it reads the text of one choice once, as it arrives.

A format is written as a generator that reads like its grammar, with the methods of :class:`TextReader`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from secrets import token_hex
from typing import Any, ClassVar

import msgspec

from app.parsers.events import CallArguments, CallBegun, Piece, Reasoning, Text
from app.parsers.reasoning.formats import ReasoningFormat
from app.parsers.text_reader import IncompleteCall, ParseError, Reading, TextReader, decoded
from app.parsers.tools.lark import Rules, Schema, Unenforceable

__all__ = ["StreamingParser"]

_log = logging.getLogger("troupe.parsers")

_PIECE = 4096


class _PartialCall(msgspec.Struct):
    """What is known of a call that is written as JSON. ``begun``: its arguments were passed on. ``unknown``: an object
    under another key was skipped."""

    name: str = ""
    arguments: str | None = None
    id: str | None = None
    begun: bool = False
    unknown: bool = False


class StreamingParser(TextReader):
    """Splits the text of one choice into thought, content and tool calls.

    A format declares its marks and overrides :meth:`block`, which reads one block of calls after a mark of ``OPEN``.
    Marks never become content. A block that is no call of a given tool becomes content without its marks, and a warning
    is logged; of a call that is malformed after its name, the rest becomes content. Nothing is evaluated; the cost is
    linear in the length of the text.

    A format may also override :meth:`at_start` (calls without a mark), :meth:`frame` or :meth:`call_rule` (a call as
    part of a grammar), :meth:`section`, :meth:`answer_rule` (a whole answer as a grammar) and :meth:`history_id`. It
    builds them from the reading methods (``until``, ``skip``, ``take``, ``name_until``, ``named_call``, ``json_calls``,
    ...), which none overrides.

    ``tools``: the parameters of the tools that may be called, by name; calls of other tools are content. None: no call
    is looked for. Unless ``parallel``, only the first call is returned. ``reasoning_format``: of the reasoning before
    the answer, None for none. ``thinking``: whether the prompt has begun the reasoning (True) or ended it (False); None
    if it says nothing. Unless ``separate``, the reasoning becomes content with its marks. ``stream_reasoning`` False
    returns the reasoning at its end only. ``hidden``: marks of reasoning that are special tokens, which are dropped
    from content.
    """

    OPEN: ClassVar[tuple[str, ...]] = ()
    """Marks that begin a block of calls."""

    MARKS: ClassVar[tuple[str, ...]] = ()
    """Marks that are dropped from content. Tokenizers may have them, and those of ``OPEN``, as special tokens."""

    TOKENS: ClassVar[tuple[str, ...]] = ()
    """Special tokens that are parts of the format's syntax."""

    SECTION: ClassVar[tuple[str, str]] = ("", "")
    """What stands around all calls of an answer; its begin is a mark of ``OPEN`` or ``MARKS``, if the format has any.
    Without a begin, the first mark of ``OPEN`` stands before each call."""

    BETWEEN: ClassVar[str] = '"\\n"?'
    """What stands between two calls, as part of a grammar."""

    STARTS: ClassVar[str] = ""
    """Characters that begin a call at the start of an answer."""

    BARE: ClassVar[bool] = False
    """Whether calls at the start of an answer need no mark."""

    TEXT_MARKS: ClassVar[tuple[str, ...]] = ()
    """Marks that are dropped from content and stand in answers without calls, too."""

    TAKES_IDS: ClassVar[bool] = False
    """Whether an ``id`` that the model writes in a call becomes the call's id."""

    def __init__(
        self,
        tools: Mapping[str, dict[str, Any]] | None,
        *,
        parallel: bool = True,
        reasoning_format: ReasoningFormat | None = None,
        thinking: bool | None = None,
        separate: bool = True,
        stream_reasoning: bool = True,
        hidden: tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        self.calls = 0
        self._ids: set[str] = set()
        self.thought = False  # whether a thought has begun
        self.thought_chars = self.chars = 0
        self._tools = tools
        self._parallel = parallel
        self._reasoning_format = reasoning_format
        self._separate = separate
        self._stream_thought = stream_reasoning
        self._hidden = hidden
        self._answer_ends: tuple[str, ...] = ()
        self._pieces: list[Piece] = []
        self._space: list[str] = []  # at the end of the thought, unless more of it follows
        self._held_thought: list[str] = []
        self._called = False  # the current block has a call
        self._suppressed = False  # the current call is not returned
        self._run = self._everything(thinking)
        next(self._run)

    # -- for the caller

    def read(self, text: str) -> list[Piece]:
        """Add a piece of the choice; returns what is certain with it, in order."""
        self.chars += len(text)
        for at in range(0, len(text), _PIECE):  # so that joining what is held stays linear
            self._text += text[at : at + _PIECE]
            self._resume()
        return self._take_pieces()

    def end(self) -> list[Piece]:
        """The rest of the choice. A call without its end is returned as far as it was made."""
        tokens = (*self.TOKENS, *(self._reasoning_format.tokens if self._reasoning_format is not None else ()))
        if any(token in self._text for token in tokens):
            self._text = ""  # the begin of a mark of several tokens: the answer was cut there
        self._ended = True
        self._resume()
        return self._take_pieces()

    def reasoning_tokens(self, token_ids: int) -> int:
        """An estimate by characters of how many of so many tokens are the thought's."""
        return round(token_ids * self.thought_chars / self.chars) if self.chars else 0

    def _resume(self) -> None:
        try:
            next(self._run)
        except StopIteration:
            self._text = ""

    def _take_pieces(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    # -- what formats override

    def block(self, mark: str) -> Reading[None]:
        """Read the calls after ``mark``, which is one of ``OPEN``. Raises ParseError."""
        raise ParseError("the format has no blocks")
        yield

    def at_start(self) -> Reading[None]:
        """Read calls that begin the answer without a mark, in formats that have such. Raises ParseError."""
        return
        yield

    def answer(self) -> Reading[None]:
        """Read everything after the thought."""
        yield from self.attempt(self.at_start(), expected=False)
        marks = (*self.OPEN, *self.MARKS, *self._hidden, *self._answer_ends)
        while mark := (yield from self.until(marks, self.add_content)):
            if mark in self.OPEN:
                yield from self.attempt(self.block(mark))
            elif mark not in self._hidden:
                yield from self.space()

    @classmethod
    def new_id(cls, name: str, number: int) -> str:
        """The id of a call that has none in the text; ``number`` counts the calls of the choice."""
        del name, number
        return f"call_{token_hex(12)}"

    @classmethod
    def frame(cls, name: str) -> tuple[str, str] | None:
        """What stands before and after the JSON arguments of a call. None if arguments are no JSON, or the text before
        them varies."""
        del name
        return None

    @classmethod
    def call_rule(cls, name: str, schema: Schema, rules: Rules) -> str:
        """A call whose arguments match the schema, as part of a grammar. Raises Unenforceable."""
        frame = cls.frame(name)
        if frame is None:
            raise Unenforceable("this format's calls have no grammar")
        return f"{rules.text(frame[0])} {rules.json(schema or {'type': 'object'})} {rules.text(frame[1])}"

    @classmethod
    def section(cls, rules: Rules) -> tuple[str, str]:
        """``SECTION`` in a grammar, with the marks that the vocabulary has."""
        del rules
        return cls.SECTION

    @classmethod
    def answer_rule(cls, calls: list[str], rules: Rules, *, forced: bool, other: str | None) -> str | None:
        """A whole answer, in formats that do not have calls in the middle of text. ``calls``: each a rule; ``forced``,
        ``other``: see :func:`app.parsers.tools.constraints.native_calls`."""
        del calls, rules, forced, other
        return None

    @classmethod
    def history_id(cls, given: str | None, name: str, number: int) -> str | None:
        """The id of an earlier call as the template wants it; ``number`` counts the calls of the conversation."""
        del name, number
        return given

    # -- the thought

    def _everything(self, thinking: bool | None) -> Reading[None]:
        yield  # until the first text
        if self._reasoning_format is not None:
            yield from self._think(self._reasoning_format, thinking)
            if self._separate and self._reasoning_format.answer:
                yield from self._begin_answer(*self._reasoning_format.answer)
        if self._tools is None:
            while mark := (yield from self.until((*self._hidden, *self._answer_ends), self.add_content)):
                if mark not in self._hidden:
                    yield from self.space()
        else:
            yield from self.answer()

    def _think(self, reasoning_format: ReasoningFormat, thinking: bool | None) -> Reading[None]:
        self._read = []
        yield from self.space()
        has_begin = yield from self.skip(*reasoning_format.begins)
        if not has_begin and not (thinking or (reasoning_format.always and thinking is None)):
            self.give_up()
            if thinking is False:
                yield from self._repeated(reasoning_format)
            return
        self.thought = True
        before, self._read = self._read, None
        if reasoning_format.inline:
            self._separate, has_begin = False, has_begin or reasoning_format.begin
        if self._separate:
            yield from self.space()
        else:
            self.add_content("".join(before) + has_begin)
        ends, known = reasoning_format.ends, (*self.OPEN, *self.MARKS, *reasoning_format.answer)
        interrupts = (each for each in reasoning_format.interrupted_by if each in known)
        mark = yield from self.until((*ends, *interrupts), self._think_aloud)
        self.end_thought()
        if mark and mark not in ends:
            self._text = mark + self._text
        elif mark and not self._separate:
            self.add_content(mark)
        if mark and self._separate:
            yield from self.space()
            yield from self._repeated(reasoning_format)

    def _repeated(self, reasoning_format: ReasoningFormat) -> Reading[None]:
        """Drop the end marks that a model repeats."""
        self._read = []
        yield from self.space()
        if not (yield from self.skip(*reasoning_format.ends)):
            self.give_up()
            return
        self._read = None
        yield from self.space()
        while (yield from self.skip(*reasoning_format.ends)):
            yield from self.space()

    def _begin_answer(self, begin: str, *ends: str) -> Reading[None]:
        """Drop the mark before the answer; those after it are dropped where they come."""
        self._answer_ends = tuple(before + end for end in ends for before in ("\n", ""))
        self._read = []
        yield from self.space()
        if (yield from self.skip(begin)):
            self._read = None
            yield from self.space()
        else:
            self.give_up()

    def _think_aloud(self, text: str) -> None:
        self.thought_chars += len(text)
        if self._separate:
            self.add_thought(text)
        else:
            self.add_content(text)

    def add_thought(self, text: str) -> None:
        """Add to the thought; white space at its end is dropped."""
        stripped = text.rstrip()
        if stripped:
            kept, self._space = "".join((*self._space, stripped)), []
            if self._stream_thought:
                self._reason(kept)
            else:
                self._held_thought.append(kept)
        if len(stripped) < len(text):
            self._space.append(text[len(stripped) :])

    def end_thought(self) -> None:
        self._reason("".join(self._held_thought))
        self._held_thought, self._space = [], []

    def _reason(self, text: str) -> None:
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, Reasoning):
            last.text += text
        elif text:
            self._pieces.append(Reasoning(text))

    # -- content and calls

    def add_content(self, text: str) -> None:
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, Text):
            last.text += text
        elif text:
            self._pieces.append(Text(text))

    def give_up(self) -> None:
        """Make what was read since the last mark the next text again."""
        self._text = "".join(self._read or ()) + self._text
        self._read = None

    def attempt(self, reading: Reading[None], *, expected: bool = True) -> Reading[None]:
        """Read calls, or make them content if they are malformed. White space after a call is dropped.

        ``expected``: a mark says that there is a call.
        """
        self._read, self._called, self._calling = [], False, False
        try:
            yield from reading
        except ParseError as error:
            if self._called or (expected and not isinstance(error, IncompleteCall)):
                _log.warning("The model wrote a tool call that cannot be read: %s. The rest of it stays text.", error)
            if self._calling and isinstance(error, IncompleteCall):
                self._text = ""  # the begin of a mark
            else:
                self.give_up()
        self._read = None
        if self._called:
            yield from self.space()

    def begin_call(self, name: str, identity: str | None = None) -> None:
        """Begin a call; raises ParseError if there is no such tool. Its arguments follow."""
        name = name.strip()
        if self._tools is None or name not in self._tools:
            raise ParseError(f"no tool {name[:64]!r}")
        self._read, self._called, self._calling = [], True, True
        self._suppressed = not self._parallel and self.calls > 0
        if not self._suppressed:
            number = self.calls
            while not identity or identity in self._ids:  # a model may write one twice
                identity, number = self.new_id(name, number), number + 1
            self._ids.add(identity)
            self._pieces.append(CallBegun(self.calls, identity, name))
            self.calls += 1

    def add_arguments(self, text: str) -> None:
        """Add to the arguments of the call that began last."""
        self._read = []
        if self._suppressed or not text:
            return
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, CallArguments):  # of this call, for another would have begun in between
            last.text += text
        else:
            self._pieces.append(CallArguments(self.calls - 1, text))

    def end_call(self) -> None:
        """The call that began last is complete; another may follow."""
        self._read, self._calling = [], False

    def parameters(self, name: str) -> dict[str, Any]:
        """The JSON Schema of a tool's parameters."""
        return (self._tools or {}).get(name.strip()) or {}

    # -- calls as JSON

    def named_call(self, name: str, identity: str | None = None) -> Reading[None]:
        """Read the arguments of a call whose name is known: a JSON object, or a string that contains one."""
        name = name.strip()
        try:
            yield from self.space()
            first = yield from self.peek()
            if first == "{":
                self.begin_call(name, identity)
                yield from self.json_value(self.add_arguments)
            else:
                self._call_with(name, (yield from self._whole()), identity)
        except IncompleteCall:
            if not self._called:
                self.begin_call(name, identity)
            raise
        self.end_call()

    def _whole(self) -> Reading[str]:
        parts: list[str] = []
        yield from self.json_value(parts.append)
        return "".join(parts)

    def json_call(self, name_key: str = "name", *argument_keys: str) -> Reading[None]:
        """Read a call as a JSON object with the tool's name and its arguments. Other keys are skipped."""
        written = _PartialCall()
        try:
            yield from self._json_members(written, name_key, argument_keys or ("arguments", "parameters"))
        except IncompleteCall:
            if written.name and not written.begun:
                self.begin_call(written.name, written.id)
            raise
        if not written.name:
            raise ParseError("it has no name")
        if not written.begun and written.arguments is None and written.unknown:
            raise ParseError("its arguments are under another key")
        if not written.begun:
            self._call_with(written.name, written.arguments, written.id)
        self.end_call()

    def _json_members(self, written: _PartialCall, name_key: str, argument_keys: tuple[str, ...]) -> Reading[None]:
        yield from self.symbol("{")
        while True:
            key = yield from self.text_string()
            yield from self.symbol(":")
            if key == name_key:
                written.name = yield from self.text_string()
                if self._tools is None or written.name not in self._tools:
                    raise ParseError(f"no tool {written.name[:64]!r}")
            elif key in argument_keys and written.name and not written.begun:
                written.begun = True
                yield from self.named_call(written.name, written.id)
            elif key in argument_keys:
                written.arguments = yield from self._whole()
            elif key == "id" and self.TAKES_IDS:
                written.id = yield from self.text_string()
            else:
                skipped = yield from self._whole()
                written.unknown = written.unknown or skipped.startswith("{")
            if (yield from self.symbol(",", "}")) == "}":
                return

    def _call_with(self, name: str, raw: str | None, identity: str | None) -> None:
        arguments = "{}" if raw is None or raw == "null" else raw
        if arguments.startswith('"'):
            arguments = decoded(arguments, str)
        arguments = _object(arguments)
        self.begin_call(name, identity)
        self.add_arguments(arguments)

    def json_calls(self, name_key: str = "name", *argument_keys: str) -> Reading[None]:
        """One call as JSON, or a list of them."""
        yield from self.space()
        if (yield from self.peek()) != "[":
            yield from self.json_call(name_key, *argument_keys)
            return
        yield from self.symbol("[")
        while True:
            yield from self.json_call(name_key, *argument_keys)
            if (yield from self.symbol(",", "]")) == "]":
                return


def _object(text: str) -> str:
    decoded(text, dict[str, Any])
    return text
