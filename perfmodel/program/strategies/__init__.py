"""Data-parallel strategies, which insert instructions as torch does: by hand, DDP, ZeRO-1, fully_shard."""
