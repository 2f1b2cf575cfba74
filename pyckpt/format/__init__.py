"""The files on disk: the bytes around a tensor, the metadata, the commit."""
