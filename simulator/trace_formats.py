"""Which traces there are, in words: for `--help`, which imports no reader, and for where a file is none of them."""

CSV = """  CSV    TIMESTAMP,ContextTokens,GeneratedTokens      Azure's LLM inference traces
  CSV    arrival_time_s,input_tokens,output_tokens    and wait_objective_s, where requests have one
  CSV    num_prefill_tokens,num_decode_tokens         lengths alone: --rate and --cv make the arrivals"""
JSONL = """  JSONL  timestamp, input_length, output_length       Mooncake's traces (times in milliseconds)
  JSONL  arrival_unix_s, input_tokens, output_tokens  what `alignedserve serve --request-log FILE` writes"""
MIX = """  mix:short=0.95,requests=2000                        no file: short (32 to 999 tokens) and long (1000 to 8000)
                                                      requests, answers of 64 to 512"""
CSV_HEADERS = (
    "TIMESTAMP,ContextTokens,GeneratedTokens, or arrival_time_s,input_tokens,output_tokens, or "
    "num_prefill_tokens,num_decode_tokens"
)
JSONL_KEYS = "timestamp, input_length and output_length, or arrival_unix_s, input_tokens and output_tokens"
EVERY = "\n".join((CSV, JSONL, MIX))
