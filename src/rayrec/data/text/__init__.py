"""Text and MosaicML shards as blocks of tokens."""
