"""``verify``: whether a checkpoint is whole, by its metadata and by its data files."""
