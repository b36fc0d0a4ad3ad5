"""Host seconds that DDP, fully_shard, offload and pipelines add to a step, each from small models of its own."""
