"""Descriptions of the trace formats, for `--help` (which imports no reader) and for errors about unknown files."""

CSV = """  CSV    TIMESTAMP,ContextTokens,GeneratedTokens      Azure's LLM inference traces
  CSV    arrival_time_s,input_tokens,output_tokens    and optionally wait_objective_s, priority
  CSV    num_prefill_tokens,num_decode_tokens         only lengths: --rate and --cv generate the arrivals"""
JSONL = """  JSONL  timestamp, input_length, output_length       Mooncake's traces (times in milliseconds), and
                                                      Bailian's (with chat_id; times in seconds)
  JSONL  arrival_unix_s, input_tokens, output_tokens  written by `alignedserve serve --request-log FILE`"""
MIX = """  mix:short=0.95,requests=2000                        generated: 32 to 999 (short) or 1000 to 8000 (long)
                                                      tokens, answers of 64 to 512; batch=500: and so many
                                                      requests without hurry at time 0"""
CHATS = """  chats:conversations=200,turns=8                     generated: each prompt has all that was said before
                                                      and a system prompt that all share (system=1024)"""
CSV_HEADERS = (
    "TIMESTAMP,ContextTokens,GeneratedTokens, or arrival_time_s,input_tokens,output_tokens, or "
    "num_prefill_tokens,num_decode_tokens"
)
JSONL_KEYS = "timestamp, input_length and output_length, or arrival_unix_s, input_tokens and output_tokens"
EVERY = "\n".join((CSV, JSONL, MIX, CHATS))
