"""Block stores, and the channels that copy blocks between them. Nothing here imports torch but `transfer.device`."""
