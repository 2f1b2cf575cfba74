"""The adapters to ``torch.distributed.checkpoint`` (DCP)."""
