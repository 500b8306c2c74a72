"""For tests of code that uses the package: small random models and tokenizers, and references to compare with."""
