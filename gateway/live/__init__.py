"""What the live page, `alignedserve top` and `alignedserve explain` show."""
