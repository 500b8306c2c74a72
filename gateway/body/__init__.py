"""From a request body to a checked and tokenised request."""
