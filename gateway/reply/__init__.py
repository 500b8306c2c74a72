"""From tokens to the replies of OpenAI's formats and gRPC."""
