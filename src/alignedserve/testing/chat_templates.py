"""Chat templates like those of served models, with the special tokens that each writes."""

from __future__ import annotations

from dataclasses import dataclass

CHATML = r"""
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

LLAMA_3 = r"""
{%- for message in messages %}
{%- set head = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' %}
{%- set content = head + message['content'] | trim + '<|eot_id|>' %}
{%- if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

LLAMA_2 = r"""
{%- if messages[0]['role'] == 'system' %}{% set turns = messages[1:] %}{% set system = messages[0]['content'] %}
{%- else %}{% set turns = messages %}{% set system = false %}{% endif %}
{%- for message in turns %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- if loop.index0 == 0 and system != false %}
{%- set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + message['content'] %}
{%- else %}{% set content = message['content'] %}{% endif %}
{%- if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
{%- elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"""

GEMMA = r"""{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('there is no system role') }}{% endif %}
{%- for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{- '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

PHI_4_MINI = r"""
{%- for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""

QWEN_3 = r"""
{%- set ns = namespace(searching=true, last=messages | length - 1) %}
{%- for message in messages[::-1] %}{% set at = messages | length - 1 - loop.index0 %}
{%- set response = message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>') %}
{%- if ns.searching and message.role == "user" and not response %}
{%- set ns.searching = false %}{% set ns.last = at %}{% endif %}{% endfor %}
{%- for message in messages %}{% set content = message.content if message.content is string else '' %}
{%- if message.role in ("user", "system") %}
{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
{%- elif message.role == "assistant" %}{% set thought = '' %}
{%- if '</think>' in content %}
{%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.last and (loop.last or thought) %}
{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}{% endif %}
{{- content.lstrip('\n') }}{{- '<|im_end|>\n' }}
{%- elif message.role == "tool" %}
{%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' }}{{- content }}{{- '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{ '<|im_end|>\n' }}{% endif %}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

DEEPSEEK_R1 = r"""
{%- set ns = namespace(system='') %}
{%- for message in messages %}{% if message['role'] == 'system' %}{% set ns.system = message['content'] %}{% endif %}
{%- endfor %}{{ bos_token }}{{ ns.system }}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}{% endif %}
{%- if message['role'] == 'assistant' %}{% set content = message['content'] %}
{%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
{{- '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"""

MACROS = r"""
{%- macro shown(content) %}{{ content | trim }}{% endmacro %}
{%- for message in messages %}{% set content %}{{ shown(message.content) }}{% endset %}
{%- if '</think>' in content %}{% set content = content.split('</think>') | last %}{% endif %}
{{- '<|turn>' ~ message.role ~ '\n' ~ content ~ '<turn|>' }}
{%- if message.name is defined %}{{ {'name': message.name} | tojson }}{% endif %}{% endfor %}{{ '<|turn>model\n' }}"""


@dataclass(frozen=True)
class Family:
    """`special`, `plain`: added tokens with and without the `special` flag. `plain_roles`: a subset of `plain`."""

    template: str
    special: tuple[str, ...]
    plain: tuple[str, ...] = ()
    plain_roles: tuple[str, ...] = ()
    bos: str = ""
    eos: str = ""


_IM = ("<|im_start|>", "<|im_end|>")
_THINK = ("<think>", "</think>")
_HEADER = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|reserved_special_token_0|>")
_PHI = ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>")
_GEMMA = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
_BEGIN, _END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
_TURNS = ("<｜User｜>", "<｜Assistant｜>")
FAMILIES = {
    "chatml": Family(CHATML, ("<|endoftext|>", *_IM)),
    "chatml-not-special": Family(CHATML, ("</s>",), (*_THINK, *_IM), _IM),
    "llama-3": Family(LLAMA_3, ("<|begin_of_text|>", *_HEADER), bos="<|begin_of_text|>"),
    "llama-2": Family(LLAMA_2, ("<s>", "</s>", "<unk>"), bos="<s>", eos="</s>"),
    "gemma": Family(GEMMA, _GEMMA, ("\n\n", "<b>"), bos="<bos>"),
    "phi-4-mini": Family(PHI_4_MINI, _PHI),
    "qwen-3": Family(
        QWEN_3,
        ("<|endoftext|>", *_IM),
        (*_THINK, "<tool_call>", "<tool_response>", "</tool_response>"),
        ("<tool_response>", "</tool_response>"),
    ),
    "deepseek-r1": Family(DEEPSEEK_R1, (_BEGIN, _END), (*_TURNS, *_THINK), _TURNS, bos=_BEGIN, eos=_END),
    "macros": Family(MACROS, ("<|turn>", "<turn|>", "<pad>")),
}
