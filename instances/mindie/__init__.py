"""A simulated MindIE instance, after the MindIE protocol page."""
