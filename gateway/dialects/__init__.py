"""How model families write reasoning and tool calls: parsers of their text, and grammars for what they must write.

Pure code: no I/O. `families.py` lists the dialects by name, `detection.py` finds the one of a model.
"""
