"""Adapts a conversation in OpenAI's form to what a chat template reads. Templates differ in what they expect."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from alignedserve.text.user_text import unmarked

_TESTS_FOR_NONE = re.compile(r"content['\"]?\]?\)?\s+is\s+(?:not\s+)?none\b", re.IGNORECASE)
_READS_THINKING = re.compile(r"\.thinking\b|\[['\"]thinking['\"]\]|get\(['\"]thinking['\"]")
_READS_ONE_CALL = re.compile(r"tool_calls(?:['\"]\])?\[0\]")
_SHORT_IDS = re.compile(r"\|\s*length\s*(?:!=|<)\s*9\b")  # Mistral's: a call's id has nine letters and digits
_ID_LENGTH = 9
_ID_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
_NO_PARAMETERS = {"type": "object", "properties": {}}

Turn = dict[str, Any]


class TurnsFor:
    """What the template `source` reads of a message."""

    def __init__(self, source: str) -> None:
        self._developer = "developer" in source
        self._none = _TESTS_FOR_NONE.search(source) is not None
        self._thinking = _READS_THINKING.search(source) is not None
        self._one_call = _READS_ONE_CALL.search(source) is not None
        self._short_ids = _SHORT_IDS.search(source) is not None

    def adapted(self, messages: Sequence[Mapping[str, Any]]) -> list[Turn]:
        """The messages, with OpenAI's newer role `developer`, an answer without content, its reasoning, several calls
        in one answer, and the ids of calls written as the template reads them.
        """
        turns = [dict(message) for message in messages]
        if self._one_call:
            turns = _one_call_each(turns)
        if self._short_ids:
            turns = _with_short_ids(turns)
        for turn in turns:
            if turn["role"] == "developer" and not self._developer:
                turn["role"] = "system"
            if turn["content"] is None and not self._none:
                turn["content"] = ""
            if self._thinking and "reasoning_content" in turn and not (turn["content"] and "tool_calls" in turn):
                turn["thinking"] = turn["reasoning_content"]
        return turns


def completed(turns: Sequence[Turn], tools: Any) -> tuple[list[Turn], Any] | None:
    """The conversation with what clients may leave out and some templates require; None if it has all of it.

    That is a description and parameters of each tool, and the name of each result's function.
    """
    calls = [call for turn in turns for call in turn.get("tool_calls", ()) if "id" in call]
    names = {call["id"]: call["function"]["name"] for call in calls}
    named = [
        {**turn, "name": names[turn["tool_call_id"]]}
        if turn["role"] == "tool" and "name" not in turn and turn.get("tool_call_id") in names
        else turn
        for turn in turns
    ]
    whole = [_whole(tool) for tool in tools] if tools else tools
    return None if named == list(turns) and whole == tools else (named, whole)


def _whole(tool: Mapping[str, Any]) -> dict[str, Any]:
    given = {key: value for key, value in tool["function"].items() if value is not None}
    return {**tool, "function": {"description": "", "parameters": _NO_PARAMETERS, **given}}


def _one_call_each(turns: Sequence[Turn]) -> list[Turn]:
    """Several calls of an answer as answers of their own, each with its result after it."""
    found: list[Turn] = []
    at = 0
    while at < len(turns):
        turn, at = turns[at], at + 1
        calls = turn.get("tool_calls", ())
        if len(calls) < 2:
            found.append(turn)
            continue
        begin = at
        while at < len(turns) and turns[at]["role"] == "tool":
            at += 1
        results = list(turns[begin:at])
        for number, call in enumerate(calls):
            found.append({**(turn if number == 0 else {"role": turn["role"], "content": None}), "tool_calls": [call]})
            own = [result for result in results if "id" in call and result.get("tool_call_id") == call["id"]]
            found += own
            results = [result for result in results if not any(result is one for one in own)]
        found += results
    return found


def _with_short_ids(turns: Sequence[Turn]) -> list[Turn]:
    """Each call with an id of nine letters and digits, which its result has, too. Others are hashed, or made."""
    found: list[Turn] = []
    waiting: list[str] = []  # ids of calls without a result
    for at, turn in enumerate(map(dict, turns)):
        if calls := turn.get("tool_calls"):
            turn["tool_calls"] = [
                {**call, "id": _short(call.get("id") or f"{at}/{number}")} for number, call in enumerate(calls)
            ]
            waiting = [call["id"] for call in turn["tool_calls"]]
        elif turn["role"] == "tool":
            given = turn.get("tool_call_id")
            own = _short(given) if given else next(iter(waiting), "")
            waiting = [one for one in waiting if one != own]
            turn["tool_call_id"] = own
        found.append(turn)
    return found


def _short(call_id: str) -> str:
    if len(call_id) == _ID_LENGTH and call_id.isalnum():
        return call_id
    digest = hashlib.blake2b(unmarked(call_id).encode(errors="replace")).digest()
    return "".join(_ID_LETTERS[byte % len(_ID_LETTERS)] for byte in digest[:_ID_LENGTH])
