"""The mirror of a Checkpointer's directory: in a bucket, or in another directory."""
