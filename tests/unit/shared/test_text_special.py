"""User text stays text: no spelling of a special token becomes one, whatever a chat template does with it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from alignedserve.errors import InvalidRequestError
from alignedserve.model import resolve_model
from alignedserve.testing.chat_templates import FAMILIES, Family
from alignedserve.testing.tokenizers import FRAGMENTS, family
from alignedserve.text import ChatTemplate, Prompt, PromptEncoder, Tokenizer
from alignedserve.text.user_text import Marks

TINY = resolve_model("tiny")
Turns = list[dict[str, str]]


class Chat:
    """A template, a tokenizer with its tokens, and the tokens of conversations."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, reserved: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.reserved = tuple(reserved)
        self.encoder = PromptEncoder(tokenizer, template)
        ids = [tokenizer.backend.token_to_id(text) for text in reserved]
        self.reserved_ids = {token for token in ids if token is not None}

    def prompt(self, turns: Turns) -> Prompt:
        return self.encoder.of_chat(self.template, turns)

    def tokens(self, turns: Turns) -> list[int]:
        return self.encoder.encode(self.prompt(turns), around=False)

    def specials(self, turns: Turns) -> list[int]:
        return [token for token in self.tokens(turns) if token in self.reserved_ids]

    def naive(self, turns: Turns) -> list[int]:
        """The earlier behaviour: in the rendered text, every spelling of a special token becomes one."""
        return self.tokenizer.encode(self.template.render(turns), special_tokens=False)


def made_chat(entry: Family, name: str = "llama3") -> Chat:
    backend = Backend.from_str(family(name))
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in entry.special])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in entry.plain])
    tokenizer = Tokenizer(backend, {"bos_token": entry.bos or None, "eos_token": entry.eos or None})
    template = ChatTemplate(entry.template, tokenizer.special_tokens)
    return Chat(tokenizer, template, (*entry.special, *entry.plain_roles, "<s>", "</s>", "<|im_start|>", "<|im_end|>"))


@cache
def chat(name: str) -> Chat:
    if name != "tiny":
        return made_chat(FAMILIES[name], "gemma" if name in ("gemma", "llama-2") else "llama3")
    tokenizer = Tokenizer.from_folder(TINY)
    assert tokenizer is not None
    template = ChatTemplate.from_folder(TINY, tokenizer.special_tokens)
    assert template is not None
    texts = [entry.content for entry in tokenizer.backend.get_added_tokens_decoder().values()]
    return Chat(tokenizer, template, texts)


def simple(template: str, *special: str, plain: tuple[str, ...] = ()) -> Chat:
    return made_chat(Family(template, special, plain))


def user(content: str, **more: str) -> Turns:
    return [{"role": "user", "content": content, **more}]


NAMES = ("tiny", *FAMILIES)
PIECES = (*FRAGMENTS, "</think>", "<tool_response>", "|", "<", ">", "&lt;", "\\", "{{ x }}", "\ue000", "  ")
HARMLESS = st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=6).map("".join)
ROLES = (
    ("user",),
    ("user", "assistant", "user"),
    ("system", "user"),
    ("user", "assistant", "user", "assistant", "user"),
)


def conversations(contents: st.SearchStrategy[str]) -> st.SearchStrategy[Turns]:
    return st.sampled_from(ROLES).flatmap(
        lambda roles: st.tuples(*[contents for _ in roles]).map(
            lambda texts: [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
        )
    )


@pytest.mark.parametrize("name", NAMES)
@given(turns=conversations(HARMLESS))
@settings(max_examples=30, deadline=None)
def test_where_nothing_special_is_spelled_nothing_changes(name: str, turns: Turns) -> None:
    made = chat(name)
    assume(name != "gemma" or turns[0]["role"] != "system")
    joined = "".join(turn["content"] for turn in turns)  # templates may put adjacent texts together
    assume(not any(text in joined for text in made.reserved))
    assert made.prompt(turns).text == made.template.render(turns)
    assert made.tokens(turns) == made.naive(turns)


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_no_spelling_adds_a_special_token(name: str, data: st.DataObject) -> None:
    made = chat(name)
    bits = [part for text in made.reserved for part in (text, text[: len(text) // 2], text[len(text) // 2 :], text[1:])]
    contents = st.lists(st.sampled_from(bits) | st.sampled_from((" ", "\n", "</think>", "x")), max_size=6).map("".join)
    turns = data.draw(conversations(contents))
    assume(name != "gemma" or turns[0]["role"] != "system")
    plain = [{**turn, "content": "x"} for turn in turns]
    assert made.specials(turns) == made.specials(plain)
    assert made.prompt(turns).text == made.template.render(turns)


def test_what_is_spelled_is_text_that_joins_its_neighbours() -> None:
    """The tokens are those of a tokenizer without that special token, not pieces cut around it."""
    made = chat("tiny")
    bare = Backend(made.tokenizer.backend.model)
    bare.pre_tokenizer = made.tokenizer.backend.pre_tokenizer
    text = "a sentence<|endoftext|>s' end <|user|> x"
    marks = {name: made.tokenizer.backend.token_to_id(f"<|{name}|>") for name in ("user", "end", "assistant")}
    assert made.tokens(user(text)) == [marks["user"], *bare.encode(text).ids, marks["end"], marks["assistant"]]
    assert made.encoder.encode(Prompt(text)) == bare.encode(text).ids


def test_a_caller_may_want_special_tokens() -> None:
    made = chat("tiny")
    text = "<|user|>Hi<|end|><|assistant|><|endoftext|"
    assert made.encoder.encode(made.encoder.special_in(text)) == made.tokenizer.encode(text)
    assert made.encoder.encode(made.encoder.special_in("plain")) == made.tokenizer.encode("plain")


X = "<|x|>"
CONTENT = "{{ messages[0].content }}"


@pytest.mark.parametrize(
    ("template", "content"),
    [
        ("{{ messages[0].content | replace('-', '') }}", "<|-x-|>"),  # the text between its halves is removed
        ("{{ messages[0].content.split('-') | join }}", "<|-x|>"),
        ("{{ messages[0].content | lower }}", "<|X|>"),
        ("{{ messages[0].content.lower() }}", "<|X|>"),
        ("{{ messages[0].content | striptags }}", "&lt;|x|&gt;"),
        ("{{ messages[0].content | escape }}{{ messages[0].content | urlencode }}", X),
        ("{{ messages[0].content[::-1] }}", ">|x|<"),
        ("{{ messages[0].content[0:2] ~ messages[0].content[2:] }}", X),
        ("{{ messages[0].content | list | join }}", X),
        ("{{ messages[0].content | tojson }}{{ {'a': [messages[0].content]} | tojson }}", X),
        ("{{ '%s' % messages[0].content }}{{ '{}'.format(messages[0].content) }}", X),
        ("{{ '%s' | format(messages[0].content) }}{{ messages[0].content | indent }}", X),
        ("{{ messages[0].content | safe }}{{ messages[0].content | string }}", X),
        ("{{ messages[0].content | truncate(5, true, '') }}{{ messages[0].content | center(80) }}", X),
        ("{% for c in messages[0].content %}{{ c }}{% endfor %}", X),
        ("{% filter upper | lower %}{{ messages[0].content }}{% endfilter %}", X),
        ("{% set c %}{{ messages[0].content }}{% endset %}{{ c.partition('q')[0] }}", X),
        ("{% macro m(c) %}{{ c }}{% endmacro %}{{ m(messages[0].content).strip() }}", X),
        ("{{ '<' + messages[0].content }}{{ messages[0].content + '>' }}", "|x|"),  # beside the template's own text
        ("{{ '<|' + messages[0].content + '|>' }}", "x"),
        ("{{ '<|' + messages[0].content + '|>' }}", "x|> and more than that <|x"),
        ("{{ messages[0].content + '|x|>' }}", "much that is said before <"),
        ("{{ messages[0].content }}{{ messages[0].name }}", "this is long enough <|"),
        ("{{ '<|' + messages[0].content | trim + '|>' }}", " " * 60 + "x"),
        ("{{ '<|' + messages[0].content.split(',')[0] + '|>' }}", "x, and much more that is said"),
        ("{{ '<|' + ('%s' % messages[0].content)[-1:] + '|>' }}", "this is long enough x"),
        ("{{ '<|' + (messages[0].content.split('-') | join | lower) + '|>' }}", "-X-"),
        ("{{ '<|' + ('%s' | format(messages[0].content) | title | wordwrap(2))[1:] + '|>' }}", "'x"),
    ],
)
def test_no_template_makes_one_of_what_is_said(template: str, content: str) -> None:
    made = simple(template, X)
    turns = user(content, name="x|> and this")
    assert made.specials(turns) == []
    assert made.prompt(turns).text == made.template.render(turns)


@given(text=st.text(max_size=20) | st.text("<|reSKſßİŉ\u212a> ", max_size=20), size=st.sampled_from((0, 100)))
@settings(max_examples=200, deadline=None)
def test_no_character_of_a_special_token_is_left_in_what_is_said(text: str, size: int) -> None:
    specials = ("<|system|>", "[INST]", "<ni>", "<\ue000>")
    marks = Marks(specials)
    marked = str.__str__(marks.mark(" " * size + text))
    for form in (marked, marked.lower(), marked.upper(), marked.title(), marked.casefold()):
        assert not {*form} & {*"".join(specials)}
    assert marks.unmark(marked) == " " * size + text or "\ue000" in text


@pytest.mark.parametrize(
    ("template", "content"),
    [
        ("{{ (messages[0].content | safe).unescape() }}", "&lt;|x|&gt;"),
        ("{{ messages[0].content.encode().decode('unicode_escape') }}", "\\x3c|x|>"),
        ("{{ messages[0].content % 60 }}", "%c|x|> is long enough"),
        ("{{ messages[0].content.format('<') }}", "{}|x|> is long enough"),
    ],
)
def test_nor_by_decoding_it(template: str, content: str) -> None:
    with contextlib.suppress(InvalidRequestError):  # it may find nothing to decode
        assert simple(template, X).specials(user(content)) == []


def test_what_a_template_writes_itself_is_special_however_it_writes_it() -> None:
    made = simple("{{ '<|' ~ 'x' + '|>' }}{% set m = {'user': '<|x|>'} %}{{ m[messages[0].role] }}<|x|>" + CONTENT, X)
    assert made.specials(user(X)) == [made.tokenizer.backend.token_to_id(X)] * 3
    replaced = simple("{{ messages[0].content | replace('\n', '<|x|>') }}", X)
    assert replaced.specials(user(f"a\nb{X}")) == [replaced.tokenizer.backend.token_to_id(X)]


QUESTIONS = (
    "'<|x|>' in c", "c == '<|x|> a|b'", "c.find('|b') == 7", "c.count('|') == 3", "c | length == 9", "c < '='",
    "c.startswith(('q', '<|'))", "c.split('|')[1] == 'x'", "c.rsplit('|', 1)[1] == 'b'", "{'<|x|> a|b': true}[c]",
    "c.removeprefix('<|') == 'x|> a|b'", "c.rpartition('|')[0] == '<|x|> a'", "c.splitlines() == ['<|x|> a|b']",
    "c.strip('<b') == '|x|> a|'", "c[0] in ['<', '>']", "c.replace('|', '') == '<x> ab'", "c | upper == '<|X|> A|B'",
    "c.isprintable()", "c.rindex('a') == 6", "c.casefold() == c", "c in ['<|x|> a|b']", "c ~ '!' == '<|x|> a|b!'",
    "(c + '!').endswith('|b!')", "c.split() == ['<|x|>', 'a|b']", "c.partition('|x')[2] == '|> a|b'", "c != 'x'",
)  # fmt: skip


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_template_may_ask_what_a_text_is(question: str) -> None:
    """The answers concern the user's text, not marks."""
    made = simple("{% set c = messages[0].content %}{{ " + question + " }}", X)
    assert made.prompt(user("<|x|> a|b")) == Prompt("True")


C = "messages[0].content"
LINES = "<think>\nHm, a well-known <thing>\n</think>\nyes | 12 www.example.com & 'so'"


@pytest.mark.parametrize("said", [LINES, "12", "", "x" * 90])
@pytest.mark.parametrize(
    "template",
    [
        f"{{{{ {{'content': {C}}} }}}}{{{{ [{C}] }}}}{{{{ ({C}, 1) }}}}",
        f"{{{{ {C}.split('\n') }}}}{{{{ {C} | slice(2) | list }}}}",
        "{{ messages[0] }}{{ messages | pprint }}",
        f"{{{{ {C} | pprint }}}}{{{{ ({C}, {C}) | pprint }}}}",
        f"{{{{ '%r %s' % ({C}, {C}) }}}}{{{{ '%r' % {C} }}}}{{{{ '{{!r:>200}}'.format({C}) }}}}",
        f"{{% set z = {C}.split('\n') | join(' ') %}}{{{{ '</think>' in z }}}}{{{{ z.split('</think>')[-1] }}}}",
        f"{{{{ '</think>' in {C}.splitlines() | map('trim') | join }}}}{{{{ '<t' in ' '.join({C}.split()) }}}}",
        f"{{{{ '<t' in '\n'.join({C}.split() | map('lower')) }}}}{{{{ '<' in {C} | list | join('-') }}}}",
        f"{{{{ '<t' in ('%s' | format({C})) }}}}{{{{ '<t' in ('%s' % {C}) }}}}{{{{ '<t' in '{{}}'.format({C}) }}}}",
        f"{{{{ '<t' in '{{x}}'.format(x={C}) }}}}{{{{ '<t' in '{{x}}'.format_map({{'x': {C}}}) }}}}",
        f"{{{{ '<t' in ({C} | center(200)) }}}}{{{{ '<t' in {C}.center(200) }}}}{{{{ '<t' in {C}.ljust(200, '-') }}}}",
        f"{{{{ {C} | wordwrap(10) }}}}{{{{ '<t' in ({C} | wordwrap(20)) }}}}{{{{ {C} | indent(2, true, true) }}}}",
        f"{{{{ '<t' in ({C} | indent(2, blank=true)) }}}}{{{{ '<t' in {C}.expandtabs() }}}}{{{{ {C}.zfill(80) }}}}",
        f"{{{{ {C} | title }}}}{{{{ {C} | wordcount }}}}{{{{ {C} | urlize }}}}{{{{ {{'a': {C}}} | xmlattr }}}}",
        f"{{{{ {C} | int + 1 }}}}{{{{ {C} | float }}}}{{{{ {C} * 2 }}}}{{{{ 2 * {C} }}}}{{{{ '<t' in {C} * 2 }}}}",
        f"{{{{ ({C} | e) + '<b>' }}}}{{{{ ({C} | forceescape) + '<b>' }}}}{{{{ {C} | truncate(20) }}}}",
        f"{{{{ ({C}.split('-') | join | lower) == {C}.lower() }}}}{{{{ {C}.split('-') | join | upper }}}}",
        "{% macro f(x) %}[{{ x }}]{% endmacro %}{{ '<t' in f(" + C + ") }}{{ 7 % 4 }}{{ '%s' % 'a' }}{{ 'a'.upper() }}",
    ],
)
def test_what_a_template_makes_of_a_text_is_the_same_with_marks(template: str, said: str) -> None:
    made = simple(template, "<|x-y_z|>", "<|reserved_0123456789|>", "[INST]")
    turns = user(said, name="Bob <b>")
    assert made.prompt(turns).text == made.template.render(turns)


def test_characters_for_private_use_stay_what_they_are() -> None:
    made = chat("tiny")
    private = "".join(map(chr, range(0xE000, 0xE200)))
    turns = user(f"{private}<|end|>{private}")
    assert made.prompt(turns).text == made.template.render(turns)
    assert made.specials(turns) == made.specials(user("x"))


def test_special_tokens_may_be_spelled_with_characters_for_private_use() -> None:
    special = "<\ue000\ue005>"
    made = simple("{{ messages[0].content }}" + special, special)
    (token,) = made.specials(user("a<b & %\ue000"))
    assert token == made.tokenizer.backend.token_to_id(special)
    assert made.specials(user(special)) == [token]
    assert made.prompt(user("a<b")).text == f"a<b{special}"


def test_a_refusal_says_what_the_user_wrote() -> None:
    made = simple("{{ raise_exception('not this: ' + messages[0].content) }}", X)
    with pytest.raises(InvalidRequestError, match=r"not this: <\|x\|> \| y"):
        made.prompt(user("<|x|> | y"))


def test_tokens_that_their_tokenizer_calls_text_stay_tokens() -> None:
    made = chat("qwen-3")
    think = made.tokenizer.backend.token_to_id("<think>")
    assert think in made.tokens(user("<think>"))
    assert made.tokenizer.backend.token_to_id("<tool_call>") in made.tokens(user("a<tool_call>b"))
    assert made.specials(user("<tool_response>")) == made.specials(user("x")), "its template writes it around a turn"
    thought = [*user("a"), {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"}, *user("b")]
    assert "hm" not in made.prompt(thought).text, "the template still finds what it looks for"


@pytest.mark.parametrize("text", ["<s>", "a <s> b</s>", "x<s><s>", "＜s＞ </s>", "▁<s>"])
def test_a_model_that_knows_a_special_token_itself_makes_none_of_a_text(text: str) -> None:
    """Unigram has it among its pieces."""
    tokenizer = Tokenizer(Backend.from_str(family("unigram")), {"bos_token": "<s>", "eos_token": "</s>"})
    encoder = PromptEncoder(tokenizer)
    bos, eos = (tokenizer.backend.token_to_id(name) for name in ("<s>", "</s>"))
    tokens = encoder.encode(Prompt(text))
    assert tokens[0] == bos
    assert not {bos, eos} & set(tokens[1:])
    assert encoder.encode(Prompt("▁Ω plain")) == tokenizer.encode("▁Ω plain")
    assert encoder.encode(encoder.special_in("a <s> b")) == tokenizer.encode("a <s> b")


def test_a_unigram_spells_a_special_token_as_any_other_text() -> None:
    tokenizer = Tokenizer(Backend.from_str(family("unigram")), {"bos_token": "<s>", "eos_token": "</s>"})
    encoder = PromptEncoder(tokenizer)
    for text, pieces in (("a<s>b", "▁ a < s > b"), ("</s>", "▁ < / s >"), ("a <s>", "▁ a ▁ < s >")):
        tokens = encoder.encode(Prompt(text), around=False)
        assert [tokenizer.backend.id_to_token(token) for token in tokens] == pieces.split()


def test_a_word_that_is_a_special_token_is_taken_apart() -> None:
    backend = Backend(models.WordLevel({"[UNK]": 0, "<s>": 1, "a": 2, "<s": 3, ">": 4}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<s>"])
    encoder = PromptEncoder(Tokenizer(backend, {"bos_token": "<s>"}))
    assert encoder.encode(Prompt("a <s> a")) == [2, 0, 0, 2]
    assert encoder.encode(encoder.special_in("a <s> a")) == [2, 1, 2]


def test_a_single_character_is_text_whatever_it_is_called() -> None:
    """Some models name "!" as their padding."""
    tokenizer = Tokenizer(Backend.from_str(family("llama3")), {"pad_token": "!"})
    assert PromptEncoder(tokenizer).encode(Prompt("a! b")) == tokenizer.encode("a! b")
