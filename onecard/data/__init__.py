"""Text in, tokens on disk, batches out: the same sequences whatever the batch size."""
