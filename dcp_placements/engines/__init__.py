"""The same declaration for other checkpoint engines than ``torch.distributed.checkpoint``."""
