"""A model's text: its tokenizer, incremental detokenisation, stop strings, and its chat template.

Gateways and workers share it, so that both find a stop string at the same token. Nothing here imports torch or
transformers; `tokenizers` and `jinja2` are imported when first needed.
"""

from alignedserve.text.call_arguments import CallArguments
from alignedserve.text.chat_template import ChatTemplate
from alignedserve.text.detokenizer import IncrementalDetokenizer
from alignedserve.text.encoder import Prompt, PromptEncoder
from alignedserve.text.marked import MarkedText
from alignedserve.text.stops import StopChecker, StopMatcher, StoppableText
from alignedserve.text.tokenizer import Tokenizer

__all__ = [
    "CallArguments",
    "ChatTemplate",
    "IncrementalDetokenizer",
    "MarkedText",
    "Prompt",
    "PromptEncoder",
    "StopChecker",
    "StopMatcher",
    "StoppableText",
    "Tokenizer",
]
