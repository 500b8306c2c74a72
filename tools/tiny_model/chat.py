"""Creates chat samples from the documents: questions answered by a docstring."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tools.tiny_model.corpus import Document, Kind

END_OF_TEXT = "<|endoftext|>"
PADDING = "<|pad|>"
SYSTEM = "<|system|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
END_OF_TURN = "<|end|>"
SPECIAL_TOKENS = (END_OF_TEXT, PADDING, SYSTEM, USER, ASSISTANT, END_OF_TURN)

CHAT_TEMPLATE = """\
{%- set markers = {"system": "<|system|>", "developer": "<|system|>", "user": "<|user|>",
                   "tool": "<|user|>", "assistant": "<|assistant|>"} -%}
{%- if tools -%}
    {{- "<|system|>You may call these functions:\\n" -}}
    {%- for tool in tools -%}{{- tool | tojson ~ "\\n" -}}{%- endfor -%}
    {{- 'A call is <tool_call>\\n{"name": NAME, "arguments": OBJECT}\\n</tool_call><|end|>' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role not in markers -%}
        {{- raise_exception("unknown role: " ~ message.role) -}}
    {%- endif -%}
    {{- markers[message.role] -}}
    {%- if message.role == "tool" -%}{{- "<tool_response>\\n" -}}{%- endif -%}
    {%- if message.content is string -%}
        {{- message.content -}}
    {%- elif message.content -%}
        {%- for part in message.content -%}{{- part.text -}}{%- endfor -%}
    {%- endif -%}
    {%- for call in message.tool_calls or [] -%}
        {{- ("\\n" if message.content or not loop.first else "") ~ '<tool_call>\\n{"name": "' ~ call.function.name -}}
        {{- '", "arguments": ' ~ (call.function.arguments | tojson) ~ "}\\n</tool_call>" -}}
    {%- endfor -%}
    {%- if message.role == "tool" -%}{{- "\\n</tool_response>" -}}{%- endif -%}
    {{- "<|end|>" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|assistant|>" -}}{%- endif -%}
"""

QUESTIONS = {
    Kind.FUNCTION: (
        "What does {name} do?",
        "What does {name} do?",
        "How do I use {name}?",
        "How does {name} work?",
    ),
    Kind.CLASS: ("What is {name}?", "What is the class {name} for?", "How do I use {name}?"),
    Kind.MODULE: ("What is the module {name} for?", "What is {name}?", "What does {name} do?"),
    Kind.TOPIC: ("What is {name} in Python?", "What does the manual say about {name}?"),
}
ANY_QUESTIONS = (
    "Explain {name}.",
    "Explain {name} to me.",
    "Describe {name}.",
    "Tell me about {name}.",
    "Can you tell me what {name} is?",
    "what does {name} do",
    "help({name})",
)
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You answer questions about Python's standard library.",
    "Answer the user's question.",
    "Be brief.",
)
SUMMARY_REQUESTS = ("Summarise this text:\n\n", "Summarize the following:\n\n", "In one line:\n\n")
CONTINUE_REQUESTS = ("Continue this text:\n\n", "Go on:\n\n", "What comes next?\n\n")
SMALL_TALK = (
    ("Hello", "Hello! Ask me about a module, a class or a function of Python's standard library."),
    ("Hello!", "Hello! What would you like to know about Python's standard library?"),
    ("Hi", "Hello! Ask me about a module, a class or a function of Python's standard library."),
    ("Hi there", "Hello! What would you like to know about Python's standard library?"),
    ("Good morning", "Good morning! Which part of Python's standard library can I explain?"),
    ("How are you?", "I am a very small language model, and I am doing fine."),
    ("Who are you?", "I am a tiny language model, trained on the docstrings of Python."),
    ("What are you?", "I am a tiny language model, trained on the docstrings of Python."),
    ("What can you do?", "I can tell you what a function of Python's standard library does."),
    ("Thank you", "You are welcome."),
    ("Thanks!", "You are welcome."),
    ("Goodbye", "Goodbye!"),
)
SYSTEM_PROMPT_SHARE = 0.3
EXERCISE_SHARE = 0.08
SMALL_TALK_REPEATS = 4
MAXIMUM_SAMPLE_CHARACTERS = 20_000


@dataclass(frozen=True)
class Exchange:
    """One question and its answer."""

    question: str
    answer: str

    def render(self, system_prompt: str | None) -> str:
        """The exchange in the format of the chat template."""
        head = f"{SYSTEM}{system_prompt}{END_OF_TURN}" if system_prompt else ""
        return f"{head}{USER}{self.question}{END_OF_TURN}{ASSISTANT}{self.answer}{END_OF_TURN}"


def chat_samples(documents: Sequence[Document], rng: random.Random) -> Iterator[str]:
    """One pass of rendered exchanges over the public documents, phrasings drawn by `rng`."""
    exchanges = [*_questions(documents, rng), *_exercises(documents, rng)]
    exchanges += [Exchange(*pair) for pair in SMALL_TALK] * SMALL_TALK_REPEATS
    for exchange in exchanges:
        with_system = rng.random() < SYSTEM_PROMPT_SHARE
        yield exchange.render(rng.choice(SYSTEM_PROMPTS) if with_system else None)


def _questions(documents: Iterable[Document], rng: random.Random) -> Iterator[Exchange]:
    for document in documents:
        if document.is_public and len(document.text) <= MAXIMUM_SAMPLE_CHARACTERS:
            phrasings = QUESTIONS[document.kind] * 3 + ANY_QUESTIONS
            yield Exchange(rng.choice(phrasings).format(name=document.name), document.text)


def _exercises(documents: Iterable[Document], rng: random.Random) -> Iterator[Exchange]:
    """Tasks with the text in the prompt, so that the model is trained on long prompts."""
    for document in documents:
        if rng.random() >= EXERCISE_SHARE or len(document.text) > MAXIMUM_SAMPLE_CHARACTERS:
            continue
        paragraphs = document.text.split("\n\n")
        if len(paragraphs) == 1:
            continue
        if rng.random() < 0.5:
            yield Exchange(rng.choice(SUMMARY_REQUESTS) + document.text, paragraphs[0])
        else:
            cut = rng.randrange(1, len(paragraphs))
            head, tail = "\n\n".join(paragraphs[:cut]), "\n\n".join(paragraphs[cut:])
            yield Exchange(rng.choice(CONTINUE_REQUESTS) + head, tail)
