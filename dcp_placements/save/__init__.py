"""The save side: from a rank's state dict to the items that it writes."""
