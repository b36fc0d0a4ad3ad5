"""fully_shard (ZeRO-2, ZeRO-3, HSDP): groups of parameters, gathers, reduce-scatters, offload, accumulation."""
