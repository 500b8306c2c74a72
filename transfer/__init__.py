"""Block stores, and the channels that copy blocks between them. Modules for host memory do not import torch."""
