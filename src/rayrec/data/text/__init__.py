"""Text and MosaicML shards as token blocks."""
