"""APIs that are translated to chat completions and back: OpenAI's responses, and Anthropic's messages."""
