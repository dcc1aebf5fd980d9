"""Where tensors come from: models, state dicts, safetensors and torch files, shards, quantised weights, adapters."""
