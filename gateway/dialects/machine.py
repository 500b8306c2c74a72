"""Parsers as generators that read one character at a time, so that no decision depends on how a text was cut."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from alignedserve.gateway.dialects.json_scanner import JsonScanner, object_in
from alignedserve.gateway.dialects.pieces import (
    CallArguments,
    CallStart,
    Content,
    MakeId,
    Parser,
    Piece,
    Reasoning,
    joined,
)

_ARGUMENTS = ('"arguments"', '"parameters"')
_BESIDES = ('"type"', '"id"')  # keys of a call that say nothing more
T = TypeVar("T")
Reading = Generator[None, str, T]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `parameters`: the JSON schema of its arguments; empty: anything."""

    name: str
    parameters: dict[str, Any] = field(default_factory=dict)
    strict: bool = False


class Machine(Parser):
    """A parser whose `read` is a generator: `yield from self.char()` is the next character, "" at the end."""

    def __init__(self) -> None:
        self._out: list[Piece] = []
        self._again: list[str] = []  # characters to be read again, the next one last
        self._held: list[str] | None = None  # characters read in an attempt
        self._ended = False
        self._finished = False  # the model ended the answer
        self._saw_end = False  # in the last attempt, or since this was set
        self._cut = ""
        self._run = self.read()
        next(self._run)

    @abstractmethod
    def read(self) -> Reading[None]:
        """Reads everything, up to the end."""

    def feed(self, text: str) -> list[Piece]:
        send = self._run.send
        for character in text:
            send(character)
        return self._taken()

    def end(self) -> list[Piece]:
        self._ended = True
        try:
            self._run.send("")
        except StopIteration:
            return self._taken()
        raise AssertionError("a parser must not read past the end")

    def end_whole(self) -> list[Piece]:
        self._finished = True
        return self.end()

    @property
    def reasoning(self) -> bool:
        return False

    @property
    def cut(self) -> str:
        return self._cut

    def _taken(self) -> list[Piece]:
        taken, self._out = joined(self._out), []
        return taken

    # ---- reading

    def char(self) -> Reading[str]:
        if self._again:
            character = self._again.pop()
        elif self._ended:
            character = ""
        else:
            character = yield
        self._saw_end = self._saw_end or not character
        if self._held is not None and character:
            self._held.append(character)
        return character

    def back(self, text: str) -> None:
        """These characters, which were read last, are read again."""
        self._again.extend(reversed(text))
        if self._held is not None and text:
            del self._held[-len(text) :]

    def peek(self) -> Reading[str]:
        character = yield from self.char()
        self.back(character)
        return character

    def spaces(self) -> Reading[str]:
        """Passes white space. Returns it."""
        found = ""
        while (character := (yield from self.char())).isspace():
            found += character
        self.back(character)
        return found

    def literal(self, text: str) -> Reading[bool]:
        """Passes this text, if it follows; else nothing."""
        read = ""
        for wanted in text:
            character = yield from self.char()
            read += character
            if character != wanted:
                self.back(read)
                return False
        return True

    def one_of(self, texts: Iterable[str]) -> Reading[str]:
        """Passes the one of these texts that follows, and returns it; "" if none does. None may begin another."""
        open_texts, read = list(texts), ""
        while open_texts:
            character = yield from self.char()
            read += character
            open_texts = [text for text in open_texts if character and text.startswith(read)]
            if read in open_texts:
                return read
        self.back(read)
        return ""

    def one_follows(self, texts: Sequence[str]) -> Reading[bool]:
        """Whether one of these texts follows, after white space, or the text ends before that is known."""
        read, found = "", True
        space = yield from self.spaces()
        while found and read not in texts and (character := (yield from self.char())):
            read += character
            found = any(text.startswith(read) for text in texts)
        self.back(space + read)
        return found

    def until(self, ends: Iterable[str], take: Callable[[str], None]) -> Reading[str]:
        """Gives the text before the first of `ends` to `take`. Returns that end; "" if the text ends before."""
        marks = tuple(ends)
        firsts = {mark[0] for mark in marks}
        tail = ""
        while character := (yield from self.char()):
            tail += character
            if tail.endswith(marks):
                mark = next(mark for mark in marks if tail.endswith(mark))
                take(tail[: -len(mark)])
                return mark
            while tail and (tail[0] not in firsts or not any(mark.startswith(tail) for mark in marks)):
                take(tail[0])
                tail = tail[1:]
        take(tail)
        return ""

    def attempt(self, reading: Reading[Any]) -> Reading[bool]:
        """Reads what may turn out to be nothing: unless `reading` calls `commit`, its characters are read again.

        Returns whether it did.
        """
        self._held, self._saw_end = [], False
        yield from reading
        held, self._held = self._held, None
        if held is None:
            return True
        self._again.extend(reversed(held))
        if self._saw_end:  # which has cut it short
            self._cut = self._cut or "".join(reversed(self._again))
        return False

    def commit(self) -> None:
        self._held = None

    # ---- writing

    def emit(self, piece: Piece) -> None:
        self._out.append(piece)

    def content(self, text: str) -> None:
        if text:
            self._out.append(Content(text))

    def thought(self, text: str) -> None:
        if text:
            self._out.append(Reasoning(text))


class CallMachine(Machine):
    """Reads content with tool calls in it. White space around calls is dropped, all other text is kept.

    A dialect sets `openers`, and reads a call in `call`.
    """

    openers: str  # characters that may begin a call
    at_start_only = False  # calls come before all content

    def __init__(self, tools: Iterable[Tool], make_id: MakeId, most: int | None = None) -> None:
        self.tools = {tool.name: tool for tool in tools}
        self.calls = 0  # number of calls so far
        self._make_id = make_id
        self._most = most  # of calls; further ones are text
        self._space = ""  # white space that is dropped if a call follows, or if a call came before and nothing follows
        self.said = False  # whether there is content since the last call
        self._ids: set[str] = set()
        super().__init__()

    @abstractmethod
    def call(self) -> Reading[bool]:
        """Reads one call, or several that belong together. Returns False, without `commit`, if it is none."""

    def read(self) -> Reading[None]:
        while True:
            self._space += yield from self.spaces()
            character = yield from self.peek()
            if not character:
                break
            if character in self.openers and self._may_call() and (yield from self.attempt(self.call())):
                continue
            self.say((yield from self.char()))
        if self.said or not self.calls:
            self.content(self._space)

    def say(self, text: str) -> None:
        """Content."""
        if text:
            self.content(self._space + text)
            self._space, self.said = "", True

    def _may_call(self) -> bool:
        return (self._most is None or self.calls < self._most) and not (self.at_start_only and self.said)

    # ---- calls

    def begin(self, name: str, call_id: str | None = None) -> None:
        """A call begins, for sure. `call_id`: the model's own; ours if an earlier call of the answer has it."""
        self.commit()
        self._space, self.said = "", False
        index, self.calls = self.calls, self.calls + 1
        own = None if call_id in self._ids else call_id
        self._ids.add(found := own or self._make_id(index))
        self.emit(CallStart(index, found, name))

    def argue(self, text: str) -> None:
        """Arguments of the last call."""
        if text:
            self.emit(CallArguments(self.calls - 1, text))

    def close(self, *texts: str) -> Reading[bool]:
        """Passes markers after a call, each with white space before it, as far as they follow."""
        for text in texts:
            space = yield from self.spaces()
            if not (yield from self.literal(text)):
                self.back(space)
                return False
        return True

    def name(self, ends: str) -> Reading[str]:
        """Reads the name of a tool, up to one of the characters `ends`, which is not passed; "" if there is none."""
        read = ""
        while character := (yield from self.char()):
            if character in ends and read in self.tools:
                self.back(character)
                return read
            read += character
            if not any(name.startswith(read) for name in self.tools):
                break
        return ""

    def json_object(self, take: Callable[[str], None]) -> Reading[bool]:
        """Reads a JSON object and gives it to `take`. False if it ends, or is no JSON from here on."""
        scanner = JsonScanner()
        while not scanner.done:
            character = yield from self.char()
            text = scanner.push(character) if character else None
            if text is None:
                self.back(character)
                return False
            take(text)
        return True

    def object_begins(self) -> Reading[bool]:
        """Whether a JSON object follows, as far as the character after its bracket. Passes white space before it."""
        yield from self.spaces()
        if not (yield from self.literal("{")):
            return False
        space = yield from self.spaces()
        character = yield from self.peek()
        self.back("{" + space)
        return character in ('"', "}")

    def call_of(self, name: str, ends: Iterable[str], call_id: str | None = None) -> Reading[bool]:
        """Reads a call's arguments as JSON, then passes the markers `ends` as far as they follow.

        False, without a call, if no object begins.
        """
        if not (yield from self.object_begins()):
            return False
        self.begin(name, call_id)
        if (yield from self.json_object(self.argue)):
            yield from self.close(*ends)
        return True

    # ---- {"name": …, "arguments": {…}}

    def json_call(self) -> Reading[bool]:
        """Reads an object with a tool's name and its arguments. False if it is none, or if it was read as text."""
        calls = self.calls
        found = yield from self._json_call()
        return found and self.calls > calls

    def _json_call(self) -> Reading[bool]:
        if not (yield from self.literal("{")):
            return False
        key, arguments = "", ""
        while True:
            yield from self.spaces()
            key = yield from self.one_of(['"name"', *_BESIDES, *_ARGUMENTS])
            if not key or not (yield from self._colon()):
                return False
            if key == '"name"':
                break
            if key in _BESIDES:
                if not (yield from self._short_string()):
                    return False
            elif arguments:
                return False
            else:
                found = yield from self._early_arguments()
                if not found:
                    return False if found is None else self._all_text()
                arguments = found
            if not (yield from self._comma()):
                return False
        if not (yield from self.literal('"')) or not (name := (yield from self.name('"'))):
            return self._all_text() if arguments else False
        yield from self.char()
        return (yield from self._json_rest(name, arguments))

    def _json_rest(self, name: str, arguments: str) -> Reading[bool]:
        """What follows the name."""
        while not (yield from self._closed()):
            key = ""
            if (yield from self._comma()):
                yield from self.spaces()
                key = yield from self.one_of([*_BESIDES, *_ARGUMENTS])
            if not key or not (yield from self._colon()):
                return self._all_text() if arguments else False
            if key in _BESIDES:
                if not (yield from self._short_string()):
                    return self._all_text() if arguments else False
                continue
            if arguments:
                return self._all_text()
            if not (yield from self.object_begins()):
                found = yield from self._other_arguments()
                if not found:
                    return False if found is None else self._all_text()
                arguments = found
                continue
            self.begin(name)
            if (yield from self.json_object(self.argue)):
                while (yield from self.attempt(self._besides())):
                    pass
                yield from self.close("}")
            return True
        self.begin(name)
        self.argue(arguments or "{}")
        return True

    def _early_arguments(self) -> Reading[str | None]:
        """Reads arguments before it is known whose they are: as JSON; "" if they are none in the end, None at once."""
        if not (yield from self.object_begins()):
            return (yield from self._other_arguments())
        found: list[str] = []
        return "".join(found) if (yield from self.json_object(found.append)) else ""

    def _other_arguments(self) -> Reading[str | None]:
        """Reads null, which is no arguments, or an object that is written as a string, whose end must be known first.

        Returns what `_early_arguments` does.
        """
        if (yield from self.literal("null")):
            return "{}"
        if not (yield from self.literal('"{')):
            return None
        written, skip = ["{"], False
        while character := (yield from self.char()):
            if character == '"' and not skip:
                return object_in("".join(written))
            skip = character == "\\" and not skip
            written.append(character)
        return ""

    def _besides(self) -> Reading[None]:
        """Passes `, "id": "…"`."""
        if (yield from self._comma()):
            yield from self.spaces()
            key = yield from self.one_of(_BESIDES)
            if key and (yield from self._colon()) and (yield from self._short_string()):
                self.commit()

    def _closed(self) -> Reading[bool]:
        yield from self.spaces()
        return (yield from self.literal("}"))

    def _colon(self) -> Reading[bool]:
        yield from self.spaces()
        found = yield from self.literal(":")
        yield from self.spaces()
        return found

    def _comma(self) -> Reading[bool]:
        yield from self.spaces()
        return (yield from self.literal(","))

    def _short_string(self) -> Reading[bool]:
        if not (yield from self.literal('"')):
            return False
        for _ in range(65):
            character = yield from self.char()
            if character == '"':
                return True
            if not character or character in "\\\n":
                return False
        return False

    def _all_text(self) -> bool:
        """What was read in this attempt is content, for sure; so a long text is read once only."""
        held = "".join(self._held or ())
        self.commit()
        self.say(held)
        return True
