"""Files of other tools, imported as DCP checkpoints and exported from them."""
