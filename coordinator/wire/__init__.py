"""Bytes in, values out: parsers of the engines' framings. They do no I/O and remember only what is incomplete."""
